"""The model to train: built, sharded, filled with weights, adapted and exported.

Models are unmodified transformers classes with the plan's attention. Weights are loaded, drawn and exported tensor by
tensor, on replicas and on models sharded with `fully_shard`: a rank reads its rows from memory-mapped files and writes
its own files, so that no rank ever holds the full model in host memory. Files are safetensors, which cannot run code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import ALL_LINEAR, Lora, Recipe, Recompute, frozen_names, parse_lora
from fcp_cli.errors import RunError, UsageError
from fcp_cli.models.checkpoint_config import read_configuration
from fcp_cli.models.model import load_model
from fcp_cli.models.transformers_config import whole_config
from fcp_cli.models.weights import INDEX, SINGLE, WeightFiles, opened_file
from fcp_cli.runs.run_dir import require_own_link
from fcp_cli.runtime.inject import transformers_models
from fcp_cli.util.words import counted, nearest_words, short_count
from fcp_cli.vision.families import FAMILIES


def build_model(
    name: str,
    *,
    seed: int,
    device: torch.device,
    recompute: Recompute = "none",
    levels: Sequence[RecomputeLevel] = (),
    freeze_vision: bool = False,
    is_filled: bool = True,
) -> Any:
    """Build a float32 model with random weights, equal on all ranks; its forward takes `position_ids`.

    Args:
        name: a shipped model, a model YAML, or a Hugging Face config.json.
        seed: seed of the initialization, for torch's generator.
        device: device of the returned model.
        recompute: activation recomputation of layers.
        levels: recompute levels of the plan, for as-needed recomputation.
        freeze_vision: train only the language model; no effect without an encoder.
        is_filled: False leaves weights uninitialized, to be filled by `draw_weights` or a checkpoint: untouched host
            memory is never allocated, so a model that is sharded next takes none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    integration = transformers_models()
    config = model_config(name)
    family = AutoModelForImageTextToText if has_vision(config) else AutoModelForCausalLM
    with _no_init_weights():
        model: Any = family.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.tie_weights()
    if is_filled:
        draw_weights(model, seed)
    with nullcontext() if is_filled else integration.weights_to_come():
        integration.prepare(model)
    if freeze_vision and has_vision(config):
        model.base_model.requires_grad_(False)
        model.base_model.language_model.requires_grad_(True)
    integration.recompute_layers(model, recompute, levels)
    model.to(device).train()
    return model


def _no_init_weights() -> AbstractContextManager[None]:
    """Return transformers' context for building models without initializing weights."""
    import transformers

    major = int(transformers.__version__.partition(".")[0])
    module: Any = import_module("transformers.initialization" if major > 4 else "transformers.modeling_utils")
    context: AbstractContextManager[None] = module.no_init_weights()
    return context


def model_config(name: str) -> Any:
    """Return the transformers configuration of a config.json or a model description.

    For an unsupported vision-language model, it is that of the language model.
    """
    from transformers import AutoConfig

    spec = load_model(name)
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        document = _with_infinities(read_configuration(path))
        if document.get("model_type") not in FAMILIES:
            document = document.get("text_config") or document.get("llm_config") or document
        model_type, arguments = document.pop("model_type"), document
        backbones = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe", "qwen2_5_vl_text": "qwen2"}
        model_type = backbones.get(model_type, model_type)
    else:
        model_type, arguments = whole_config(spec)
    config = AutoConfig.for_model(model_type, **arguments)
    config.get_text_config().use_cache = False
    return config


def _with_infinities(value: Any) -> Any:
    """Restore infinities in a configuration: Mamba-2 bounds time steps by infinity."""
    if isinstance(value, dict):
        named = value.get("__float__")
        if named in ("Infinity", "-Infinity"):
            return float(named)
        return {key: _with_infinities(one) for key, one in value.items()}
    return [_with_infinities(one) for one in value] if isinstance(value, list) else value


def has_vision(config: Any) -> bool:
    """Return whether a transformers configuration belongs to a vision-language model."""
    return hasattr(config, "vision_config")


def shard_model(model: nn.Module, mesh: DeviceMesh, *, dtype: torch.dtype | None, keeps_weights: bool) -> None:
    """Shard weights, gradients and optimizer states with FSDP2, layer by layer, in place.

    Args:
        model: model on any device, or on `meta` to fill the shards later.
        mesh: device mesh of all ranks: one dimension to shard, or two to replicate and shard; shards move to the
            device.
        dtype: dtype of gathered weights and matrix products; shards and reduced gradients keep the model's. None: the
            model's dtype.
        keeps_weights: keep gathered weights for the entire step instead of resharding after each layer.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Reduced in fp32: over many ranks, bf16 would round small gradients away.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    if dtype is not None:
        for frozen in (parameter for parameter in model.parameters() if not parameter.requires_grad):
            frozen.data = frozen.data.to(dtype)  # never updated, so it needs no higher precision
    # Layers first; the root gets the remaining parameters.
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_weights)
    fully_shard(model, mesh=mesh, mp_policy=policy)


# Weights of a Hugging Face checkpoint.


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
    return {**dict(model.named_parameters()), **saved_buffers(model)}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers of a model."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


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


# Random initial weights.
#
# Modules are drawn one after another on the host, as transformers initializes them, and each rank keeps its rows. The
# generator runs through all modules on every rank, so that weights depend only on the seed, not on ranks or sharding.

_Fill = Callable[[nn.Module], None]


def draw_weights(model: Any, seed: int) -> None:
    """Fill a transformers model, plain or sharded by rows, with random weights.

    Weights without an initialization rule keep their value from construction.

    Args:
        model: model on any device but `meta`.
        seed: seed for torch's generator.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        _draw(model, model._init_weights, set())


def _draw(module: nn.Module, fill: _Fill, drawn: set[int]) -> None:
    from transformers import PreTrainedModel

    for name, child in module.named_children():
        if name.startswith("lora_"):  # adapters are already initialized
            continue
        # Nested models, such as vision encoders, have their own rules.
        _draw(child, child._init_weights if isinstance(child, PreTrainedModel) else fill, drawn)
    own = {
        name: tensor for name, tensor in module._parameters.items() if tensor is not None and id(tensor) not in drawn
    }
    if own:
        drawn.update(map(id, own.values()))  # tied weights are drawn once
        _draw_own(module, own, fill)


def _draw_own(module: nn.Module, own: dict[str, nn.Parameter], fill: _Fill) -> None:
    """Draw a module's full weights, and keep this rank's rows."""
    whole = {name: nn.Parameter(torch.full(held.shape, torch.nan)) for name, held in own.items()}
    module._parameters.update(whole)
    try:
        fill(module)
    finally:
        module._parameters.update(own)
    for name, held in own.items():
        local, rows = local_rows(held)
        if local.numel() and _is_drawn(whole[name]):
            local.copy_(whole[name][rows.start : rows.stop] if held.dim() else whole[name])


def _is_drawn(tensor: Tensor) -> bool:
    """Return whether a rule wrote to a NaN tensor; transformers 4 writes to `.data`, which has no version counter."""
    return tensor._version > 0 or not bool(tensor.flatten()[0].isnan())


# Low-rank adapters with peft, injected into an unchanged transformers class; and freezing by pattern.

_BASE: Final = ".base_layer."
_OUTSIDE_LANGUAGE_MODEL: Final = r"^(?!.*\blanguage_model\.).*$"


def choose_trained(model: nn.Module, recipe: Recipe, *, seed: int) -> None:
    """Add adapters or freeze weights by pattern, as the recipe says; frozen weights stay frozen."""
    if recipe.lora is not None:
        _add_adapters(model, parse_lora(recipe.lora), seed=seed, only_language_model=recipe.freeze_vision)
    elif recipe.freeze is not None:
        everywhere = dict(model.named_parameters(remove_duplicate=False))
        for name in frozen_names(everywhere, recipe.freeze):
            everywhere[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("nothing is left to train; remove some patterns of --freeze")


def _add_adapters(model: nn.Module, lora: Lora, *, seed: int, only_language_model: bool) -> None:
    """Add adapters to linear layers, in their dtype; B is 0, so that outputs are unchanged."""
    from peft import LoraConfig, inject_adapter_in_model

    outside = _OUTSIDE_LANGUAGE_MODEL if only_language_model and hasattr(model.config, "vision_config") else None
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        if target not in linear and lora.targets != (ALL_LINEAR,):
            near = nearest_words(target, sorted(linear), most=3, cutoff=0.3) or sorted(linear)
            raise UsageError(f"--lora: {target!r} is not a linear layer of the model; it has {', '.join(near)}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft accepts floats
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        exclude_modules=outside,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)  # reseeded, so that adapters do not depend on earlier draws
    inject_adapter_in_model(config, model)


def describe_frozen(model: nn.Module, recipe: Recipe, name: str) -> str | None:
    """Describe the frozen part of a model; None if everything is trained."""
    parameters = list(model.parameters())
    if all(parameter.requires_grad for parameter in parameters):
        return None
    trained = short_count(sum(parameter.numel() for parameter in parameters if parameter.requires_grad))
    if recipe.lora is not None:
        return f"adapters of {trained} parameters are trained ({parse_lora(recipe.lora)}); {name} is frozen"
    if recipe.freeze is None:
        return f"the vision encoder of {name} is frozen"
    return f"{trained} parameters of {name} are trained, those of --freeze {recipe.freeze} are frozen"


def adapted_names(names: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Map tensor names of the model with adapters to names in the checkpoint."""
    live = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: names[plain] for name in live if (plain := name.replace(_BASE, ".")) in names}


# Export as a Hugging Face checkpoint, or of adapters in peft's format.

_ADAPTER: Final = ".lora_"
_PEFT_PREFIX: Final = "base_model.model."  # prefix of PeftModel's wrapped model
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
    if rank == 0:
        require_own_link(folder)
    final = folder.resolve() if folder.is_symlink() else folder  # a run's own link stays
    partial = final.with_name(f".{final.name}.partial")
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()  # rank 0 must empty the folder first
        yield partial
        barrier()  # all files must be complete before the rename
        if rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
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
    # `fully_shard` replaces the class by its own subclass.
    family = next(kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    config.dtype, config.architectures = dtype, [family]
    try:
        config.save_pretrained(folder)
    finally:
        config.dtype = before


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy a checkpoint's tokenizer and processor files, if any."""
    for name in _COMPANIONS:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def export_adapters(
    model: Any,
    folder: Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    dtype: torch.dtype,
    base: Path | None,
    source: Path | None,
) -> None:
    """Write adapters in peft's format, for `PeftModel.from_pretrained`. Collective.

    Args:
        model: the model with adapters, plain or sharded by rows.
        folder: output folder, replaced atomically.
        rank: rank of this process; rank 0 writes.
        barrier: waits for all ranks.
        dtype: dtype of the adapters in the file.
        base: checkpoint of the base model.
        source: folder whose tokenizer and processor are copied.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    with published_folder(folder, rank=rank, barrier=barrier) as partial:
        whole = {}
        for name, parameter in model.named_parameters():
            if _ADAPTER in name:
                tensor = whole_tensor(parameter)  # collective: every rank has rows of it
                if rank == 0:
                    whole[name] = tensor.detach().to("cpu", dtype).contiguous()
        if rank == 0:
            named = get_peft_model_state_dict(model, state_dict=whole)
            tensors = {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in named.items()}
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            config = model.peft_config["default"]
            config.base_model_name_or_path = None if base is None else str(base)
            config.inference_mode = True
            config.save_pretrained(partial)
            copy_companions(source, partial)
