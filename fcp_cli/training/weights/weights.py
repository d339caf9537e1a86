"""Loads weights of a Hugging Face checkpoint into a model, and exports a model as such a checkpoint.

Both work tensor by tensor on replicas and on models sharded with `fully_shard`: a rank reads its rows from
memory-mapped files and writes its own files, so that no rank ever holds the full model in host memory. Files are
safetensors, which cannot run code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.errors import RunError
from fcp_cli.models.weights import INDEX, SINGLE, WeightFiles, opened_file
from fcp_cli.words import counted

# Files copied on export: everything that transformers and vLLM read for tokenizer and processor.
_COMPANIONS: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def match_weights(model: nn.Module, weights: WeightFiles) -> dict[str, str]:
    """Return the checkpoint name of each parameter and saved buffer of a model."""
    live = _live_tensors(model)
    names = _checkpoint_names(model, weights, live)
    missing = [name for name in live if name not in names]
    if missing:
        raise RunError(
            f"{weights.folder} has no weights for {missing[0]!r} ({counted(len(missing), 'tensor')} missing); give the "
            "checkpoint of this model, or --weights random"
        )
    return names


def load_weights(model: nn.Module, weights: WeightFiles, names: Mapping[str, str]) -> None:
    """Copy a checkpoint's weights into a model, converted to its dtypes; each rank reads its rows.

    Args:
        model: transformers model, plain or sharded by rows, not on `meta`.
        weights: from `find_weights`.
        names: from `match_weights`.
    """
    with ExitStack() as stack, torch.no_grad():
        opened = {
            file: stack.enter_context(opened_file(file, framework="pt")) for file in sorted(set(weights.files.values()))
        }
        for name, tensor in _live_tensors(model).items():
            if name in names:  # adapters are not in the checkpoint
                _copy_rows(opened[weights.files[names[name]]].get_slice(names[name]), tensor, names[name], weights)


def unexpected_weights(names: Mapping[str, str], weights: WeightFiles, model: nn.Module) -> list[str]:
    """Return the checkpoint's tensors that the model lacks, without aliases of tied weights."""
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sorted(set(weights.files) - set(names.values()) - tied)


def describe_unexpected(names: Sequence[str], weights: WeightFiles) -> str | None:
    """Describe such tensors, to follow the model's name; or None."""
    if not names:
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"has no place for {counted(len(names), 'tensor')} of {weights.folder}, which are neither trained nor "
        f"exported: {', '.join(names[:3])}{more}"
    )


def _live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters (tied ones once) and saved buffers."""
    saved = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def _checkpoint_names(model: nn.Module, weights: WeightFiles, live: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checkpoint name of each live tensor, with transformers' renaming of older checkpoints."""
    rename = _renaming(model)
    found = {rename(name): name for name in weights.files}
    aliases = _aliases(model)
    return {
        name: found[alias]
        for name in live
        if (alias := next((alias for alias in aliases.get(name, [name]) if alias in found), None)) is not None
    }


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter by its first name: tied weights have several."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in by_tensor.values()}


def _renaming(model: Any) -> Callable[[str], str]:
    """Return a function from checkpoint names to model names."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # before transformers 5
        patterns: Mapping[str, str] = getattr(model, "_checkpoint_conversion_mapping", {})
        return lambda name: next((re.sub(old, new, name) for old, new in patterns.items() if re.match(old, name)), name)
    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    known = model.state_dict(keep_vars=True)

    def rename(name: str) -> str:
        renamed, _ = rename_source_key(
            name, renamings, [], base_model_prefix=model.base_model_prefix, meta_state_dict=known
        )
        return renamed

    return rename


def _copy_rows(stored: Any, tensor: Tensor, name: str, weights: WeightFiles) -> None:
    """Copy this rank's rows of a stored tensor."""
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise RunError(
            f"{weights.files[name]}: {name!r} is {shape}, but the model's is {tuple(tensor.shape)}; give the "
            "checkpoint of this model"
        )
    if not str(stored.get_dtype()).startswith(("F16", "BF16", "F32", "F64")):
        raise RunError(
            f"{weights.files[name]}: {name!r} is {stored.get_dtype()}, a quantised type, which is not trained; give a "
            "checkpoint in bfloat16 or float32"
        )
    local, rows = local_rows(tensor)
    if local.numel():
        local.copy_(stored[rows.start : rows.stop] if tensor.dim() else stored[:])


def local_rows(tensor: Tensor) -> tuple[Tensor, range]:
    """Return this rank's part of a tensor, and its row range."""
    if not isinstance(tensor, DTensor):
        return tensor, range(tensor.shape[0] if tensor.dim() else 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), range(offset[0], offset[0] + shape[0])


def export_model(
    model: Any,
    folder: Path,
    *,
    rank: int,
    num_ranks: int,
    barrier: Callable[[], None],
    dtype: torch.dtype,
    names: Mapping[str, str] | None = None,
    source: Path | None = None,
) -> None:
    """Write a Hugging Face checkpoint to a shared folder, atomically. Collective.

    Args:
        model: transformers model, plain or sharded by rows.
        folder: output folder.
        rank, num_ranks: rank of this process and number of ranks; rank r writes file r.
        barrier: waits for all ranks.
        dtype: dtype of the weights in the files.
        names: tensor names from `match_weights`; None: the model's names.
        source: folder whose tokenizer and processor are copied.
    """
    live = _live_tensors(model)
    names = names or {name: name for name in live}
    shares = _shares({name: tensor.numel() * dtype.itemsize for name, tensor in live.items()}, num_ranks)
    with published_folder(folder, rank=rank, barrier=barrier) as partial:
        _write_share(partial / _file_name(rank, len(shares)), live, names, shares, rank, dtype)
        if rank == 0:
            _write_config(partial, model, dtype)
            copy_companions(source, partial)
            if len(shares) > 1:
                _write_index(partial / INDEX, live, names, shares, dtype)


@contextmanager
def published_folder(folder: Path, *, rank: int, barrier: Callable[[], None]) -> Iterator[Path]:
    """Yield a folder for all ranks to write into, which replaces `folder` when the block ends on all ranks."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()  # rank 0 must empty the folder first
        yield partial
        barrier()  # all files must be complete before the rename
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        barrier()
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}") from error


def _shares(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Split tensors, in order, into at most one file per rank, of similar sizes; none is empty."""
    whole, shares, held = sum(sizes.values()), [[]], 0  # type: ignore[var-annotated]
    for name, size in sizes.items():
        if shares[-1] and held >= whole * len(shares) / num_ranks:
            shares.append([])
        shares[-1].append(name)
        held += size
    return shares


def _file_name(rank: int, files: int) -> str:
    return SINGLE if files == 1 else f"model-{rank + 1:05d}-of-{files:05d}.safetensors"


def _write_share(
    file: Path,
    live: Mapping[str, Tensor],
    names: Mapping[str, str],
    shares: Sequence[Sequence[str]],
    rank: int,
    dtype: torch.dtype,
) -> None:
    from safetensors.torch import save_file

    kept: dict[str, Tensor] = {}
    for writer, share in enumerate(shares):
        for name in share:
            whole = whole_tensor(live[name])  # collective: every rank has rows of it
            if writer == rank:
                kept[names[name]] = whole.detach().to("cpu", dtype if whole.is_floating_point() else None, copy=True)
    if kept:
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, file, metadata={"format": "pt"})


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_index(
    path: Path,
    live: Mapping[str, Tensor],
    names: Mapping[str, str],
    shares: Iterable[Sequence[str]],
    dtype: torch.dtype,
) -> None:
    shares = list(shares)
    files = {names[name]: _file_name(rank, len(shares)) for rank, share in enumerate(shares) for name in share}
    size = sum(tensor.numel() * dtype.itemsize for tensor in live.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")


def _write_config(folder: Path, model: Any, dtype: torch.dtype) -> None:
    config = model.config
    before = config.dtype
    config.dtype, config.architectures = dtype, [_family_name(model)]
    try:
        config.save_pretrained(folder)
    finally:
        config.dtype = before


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy a checkpoint's tokenizer and processor files, if any."""
    for name in _COMPANIONS:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _family_name(model: Any) -> str:
    """Return the transformers class of a model, which `fully_shard` replaces by its own subclass."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    return kinds[0].__name__
