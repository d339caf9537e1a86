"""Contents of a checkpoint, and the exact resumption of a run from it.

    checkpoints/step-00000500/
        checkpoint.json            format, step, plan hash, ranks, sharding, checksums of the other files
        state.safetensors          weights and optimizer (replicated: written by rank 0)
        state-00003.safetensors    a share of both (sharded: written by the ranks of the first copy)
        rng-00003.safetensors      this rank's random generators

`step` counts finished steps. The learning rate is a function of the step and the data order is the plan, so neither is
saved. Weights are those that the optimizer updates. A share is the same rows of each tensor in every sharding, so that
a run may resume under another one: a rank slices its shard from the mapped files. Tensors are named `model/NAME`
and `optimizer/PARAMETER/ENTRY`; an optimizer's plain numbers are in the file's header, as JSON. No file is a
pickle: nothing that a checkpoint holds can run.

Not torch.distributed.checkpoint. Its reader opens a checkpoint's metadata with a plain `pickle.load`, which runs
any code in the file. Its storage in safetensors (`HuggingFaceStorageWriter`, as of torch 2.13) has no such
file, but no mark either that a checkpoint was written to the end; it takes only tensors, whereas an optimizer's
parameter groups hold numbers; it serialises a rank's file in memory in addition to the copy that it writes from; its
asynchronous form runs collectives in a thread, for which every job needs a second process group; and it is not public
in the oldest torch that fcp supports. Its benefit, resharding of tensors, is `_own_rows` here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.errors import RunError
from fcp_cli.files import flush_to_disk, reason_of
from fcp_cli.reading.documents import decode_record
from fcp_cli.runs.checkpoints.checkpoint_files import FileSums, damage, sums_of
from fcp_cli.runs.checkpoints.checkpoint_header import CheckpointHeader, kept_before, way_back
from fcp_cli.training.weights.shares import Shares
from fcp_cli.words import first_line

_STATE_KEY = "optimizer"  # in the header of a file of state
_LENGTH_BYTES = 8  # before the header of a safetensors file


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The live objects that a checkpoint captures.

    Attributes:
        weights: name -> this rank's part of each parameter, a tied one once: whole, its rows, or FSDP2's shard.
        buffers: name -> buffer; whole on every rank.
        optimizer: the optimizer of the weights that are trained.
        device: the device of this rank.
        shares: how weights and optimizer are cut.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device
    shares: Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The part of a checkpoint that one rank writes.

    Attributes:
        tensors: file name -> name -> tensor: live, or a copy of it.
        headers: file name -> fields of its header besides the tensors.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    headers: Mapping[str, Mapping[str, str]]


def capture(state: TrainState, header: CheckpointHeader, *, rank: int) -> Captured:
    """Return this rank's part; the tensors are live, only the random generators are copies."""
    random = f"rng-{rank:05d}.safetensors"
    tensors: dict[str, Mapping[str, Tensor]] = {random: _random_states(state.device)}
    headers: dict[str, Mapping[str, str]] = {random: {}}
    if state.shares.copy == 0:
        name = _state_files(header)[state.shares.index]
        optimizer, numbers = _optimizer_parts(state.optimizer)
        live = {**state.weights, **state.buffers}
        tensors[name] = {
            **{f"model/{key}": _local(tensor).detach() for key, tensor in live.items()},
            **{f"optimizer/{key}": _local(tensor) for key, tensor in optimizer.items()},
        }
        headers[name] = {_STATE_KEY: json.dumps(numbers)}
    return Captured(tensors=tensors, headers=headers)


def _optimizer_parts(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer, as PARAMETER/ENTRY, and its numbers: parameter groups and other entries."""
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for parameter, entries in saved["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{parameter}/{key}"] = value
            else:
                others.setdefault(str(parameter), {})[key] = value
    return tensors, {"param_groups": saved["param_groups"], "entries": others}


def write_files(folder: Path, captured: Captured) -> dict[str, FileSums]:
    """Write a rank's files, whose tensors are on the host, and see that the disk has them.

    Returns:
        Their checksums, by name: of the bytes in memory, so they detect damage on the way to the disk, too.
    """
    return {
        name: _write_file(folder / name, tensors, captured.headers[name]) for name, tensors in captured.tensors.items()
    }


def _write_file(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> FileSums:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(dict(tensors), path, metadata=dict(header))
        flush_to_disk(path)
        sums = sums_of(_pieces(path, tensors))
        if sums.bytes != path.stat().st_size:
            raise OSError(f"it has {path.stat().st_size:,} bytes of {sums.bytes:,}")
    except (OSError, SafetensorError) as error:
        number = re.search(r"os error (\d+)", str(error))  # of a SafetensorError
        failure = OSError(int(number[1]), "") if number else error
        reason = reason_of(failure, path.parent) if isinstance(failure, OSError) else first_line(failure)
        raise RunError(f"cannot write {path}: {reason}; {kept_before(path.parent.parent)}") from error
    return sums


def _pieces(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the bytes of a file of tensors, in order: its header, which is read, and the tensors in memory."""
    with path.open("rb") as file:
        size = file.read(_LENGTH_BYTES)
        header = file.read(int.from_bytes(size, "little"))
    yield memoryview(size + header)
    places = {name: place["data_offsets"] for name, place in decode_record(header).items() if name in tensors}
    for name in sorted(places, key=places.__getitem__):
        content: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        yield memoryview(content)


def load_checkpoint(
    checkpoint: Path, state: TrainState, *, header: CheckpointHeader, rank: int, num_ranks: int = 1
) -> None:
    """Restore a checkpoint into the live objects, bit for bit, under any sharding then and now.

    A rank that was not there before keeps the random generators that it started with. Ranks that read the same files
    share their verification; one that finds damage ends the job.
    """
    names, shares = _state_files(header), state.shares
    readers = (rank, num_ranks)
    if len(names) == shares.count:  # same sharding as this run: the rank reads only its own file
        names, readers = [names[shares.index]], (shares.copy, max(1, num_ranks // shares.count))
        shares = Shares()
    _verify(checkpoint, header, names, *readers)
    with ExitStack() as stack:
        # Mapped, so that a rank that needs a part of every file does not hold them all.
        saved = [stack.enter_context(_opened(checkpoint / name)) for name in names]
        try:
            _restore_tensors(state, saved, shares)
            _restore_optimizer(state.optimizer, saved, shares)
        except (KeyError, ValueError, RuntimeError) as error:
            raise RunError(f"{checkpoint} does not fit this model: {first_line(error)}") from error
    if rank < header.num_ranks:
        name = f"rng-{rank:05d}.safetensors"
        _verify(checkpoint, header, [name])
        with _opened(checkpoint / name) as file:
            _restore_random_states({name: file.get_tensor(name) for name in file.keys()}, state.device)  # noqa: SIM118


def _verify(checkpoint: Path, header: CheckpointHeader, names: Sequence[str], index: int = 0, count: int = 1) -> None:
    """Compare a share of some files with their checksums."""
    if (unlisted := next((name for name in names if name not in header.files), None)) is not None:
        raise RunError(f"{checkpoint / unlisted} is not listed in checkpoint.json; {way_back(checkpoint)}")
    found = damage(checkpoint, {name: header.files[name] for name in names}, index=index, count=count)
    if found is not None:
        raise RunError(f"{found}; {way_back(checkpoint)}")


def _state_files(header: CheckpointHeader) -> list[str]:
    """Return the files of the shares, in order."""
    if header.sharding == "replicated":
        return ["state.safetensors"]
    return [f"state-{index:05d}.safetensors" for index in range(header.shards)]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({first_line(error)}); {way_back(path.parent)}") from error


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of a model holds."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _own_rows(parts: Sequence[Any], shares: Shares) -> Tensor:
    """Return the rows that this rank keeps of a tensor that lies in parts of files; no others are read."""
    counts = [part.get_shape()[0] for part in parts]
    own = shares.rows(sum(counts))
    found: list[Tensor] = []
    start = 0
    for part, count in zip(parts, counts, strict=True):
        first, last = max(own.start - start, 0), min(own.stop - start, count)
        if first < last:
            found.append(part[first:last])
        start += count
    if not found:
        return parts[0][:0]  # type: ignore[no-any-return]
    return found[0] if len(found) == 1 else torch.cat(found)


def _restored(saved: Sequence[Any], name: str, shares: Shares) -> Tensor:
    """Return this rank's part of a saved tensor; every rank keeps scalars, such as Adam's step count."""
    parts = [file.get_slice(name) for file in saved]
    return _own_rows(parts, shares) if parts[0].get_shape() else saved[0].get_tensor(name)


def _restore_tensors(state: TrainState, saved: Sequence[Any], shares: Shares) -> None:
    live = {**state.weights, **state.buffers}
    names = {name.removeprefix("model/") for name in saved[0].keys() if name.startswith("model/")}  # noqa: SIM118
    if live.keys() != names:
        raise ValueError(f"the names {sorted(live.keys() ^ names)[:3]} are in one of them only")
    with torch.no_grad():
        for name, tensor in live.items():
            key, kept = f"model/{name}", _local(tensor)
            own = _restored(saved, key, shares) if name in state.weights else saved[0].get_tensor(key)
            if kept.shape != own.shape:
                raise ValueError(f"{name} is {tuple(own.shape)}, not {tuple(kept.shape)}")
            kept.copy_(own)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Sequence[Any], shares: Shares) -> None:
    """Load this rank's optimizer state; moments of FSDP2's parameters become shards again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = decode_record(saved[0].metadata()[_STATE_KEY])
    groups = numbers["param_groups"]
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        group.update(fused=live["fused"], foreach=live["foreach"])  # of the devices, not of the run
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in numbers["entries"].items()}
    for name in saved[0].keys():  # noqa: SIM118
        kind, _, place = name.partition("/")
        if kind == "optimizer":
            index, _, key = place.partition("/")
            own = _restored(saved, name, shares)
            state.setdefault(int(index), {})[key] = _like(own, parameters[int(index)]) if own.dim() else own
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(own: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment on the device of its parameter, as FSDP2's shard if that is one."""
    own = own.to(_local(parameter).device)
    if not isinstance(parameter, DTensor):
        return own
    return DTensor.from_local(
        own,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    return states


def _restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(states[device.type], device)
