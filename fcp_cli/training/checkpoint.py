"""Save and load checkpoints: a folder per saved step that exists whole or not at all, from which a run resumes exactly.

    checkpoints/step-00000500/
        checkpoint.json      format, step, plan hash, ranks, sharding
        state.pt             weights and optimizer (replicated: written by rank 0)
        state-00003.pt       a share of both (sharded: written by the ranks of the first copy)
        rng-00003.pt         this rank's random generators

`step` counts finished steps. The learning rate is a function of the step and the data order is the plan, so neither is
saved. Weights are those that the optimizer updates. A share is the same rows of each tensor in every sharding, so that
a run may resume under another one: a rank cuts what it keeps out of the mapped files. Everything is read with
`weights_only`: a checkpoint can hold tensors and numbers, never code.

Not torch.distributed.checkpoint: its reader opens the metadata of a checkpoint with a plain `pickle.load`, which runs
whatever code the file holds. Its storage without pickle (safetensors) is not public in the oldest torch that fcp
supports, takes tensors only, where an optimizer's parameter groups hold numbers, and doubles a rank's shard in host
memory while it writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoint_header import FORMAT, PREFIX, CheckpointHeader, checkpoints
from fcp_cli.training.shares import Shares
from fcp_cli.words import first_line


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The live objects that a checkpoint captures.

    Attributes:
        weights: name -> what this rank keeps of each parameter, a tied one once: whole, its rows, or FSDP2's shard.
        buffers: name -> buffer; whole on every rank.
        optimizer: of the weights that are trained.
        device: of this rank.
        shares: how weights and optimizer are cut.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device
    shares: Shares


def save_checkpoint(
    folder: Path,
    header: CheckpointHeader,
    state: TrainState,
    *,
    rank: int,
    barrier: Callable[[], None],
    keep: int,
) -> Path:
    """Write a checkpoint; called by all ranks, who share `folder`. The oldest beyond `keep` are removed afterwards.

    Killed at any moment, it leaves the checkpoints before it as they were.

    Raises:
        RunError: this rank cannot write (disk full, no permission).
    """
    final = folder / f"{PREFIX}{header.step:08d}"
    partial = folder / f".{final.name}.partial"
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()  # no rank writes into a folder that rank 0 has yet to empty
        _write_tensors(partial / f"rng-{rank:05d}.pt", _random_states(state.device))
        if state.shares.copy == 0:
            _write_tensors(partial / _state_files(header)[state.shares.index], _captured(state))
        barrier()  # every file is whole before the folder gets its name
        if rank == 0:
            _publish(partial, final, header)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        barrier()
    except OSError as error:
        raise RunError(
            f"cannot write the checkpoint {final}: {error.strerror or error}; older ones are kept"
        ) from error
    return final


def _publish(partial: Path, final: Path, header: CheckpointHeader) -> None:
    text = json.dumps({"format": FORMAT, **asdict(header)}, indent=2)
    with (partial / "checkpoint.json").open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    # What the folder holds is on disk by now: the rename is what makes it a checkpoint.
    shutil.rmtree(final, ignore_errors=True)  # the same step, saved by the run that this one was resumed from
    partial.rename(final)


def load_checkpoint(checkpoint: Path, state: TrainState, *, header: CheckpointHeader, rank: int) -> None:
    """Put a checkpoint back into the live objects, bit for bit as it was saved, whatever ranks kept of it then and now.

    A rank that was not there before keeps the random generators that it started with.

    Raises:
        RunError: a file is missing or damaged, or its tensors are not this model's.
    """
    files = [checkpoint / name for name in _state_files(header)]
    shares = state.shares
    if len(files) == shares.count:  # cut as this run's: the rank's own file is what it keeps
        files, shares = [files[shares.index]], Shares()
    # Mapped, so that a rank that needs a part of every file does not hold them all.
    saved = [_read_tensors(file, mapped=True) for file in files]
    try:
        _restore_tensors(state, saved, shares)
        _restore_optimizer(state.optimizer, saved, shares)
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(f"{checkpoint} does not fit this model: {first_line(error)}") from error
    if rank < header.num_ranks:
        _restore_random_states(_read_tensors(checkpoint / f"rng-{rank:05d}.pt"), state.device)


def _state_files(header: CheckpointHeader) -> list[str]:
    """Return the files of the shares, in order."""
    if header.sharding == "replicated":
        return ["state.pt"]
    return [f"state-{index:05d}.pt" for index in range(header.shards or header.num_ranks)]


def _captured(state: TrainState) -> dict[str, Any]:
    tensors = {**state.weights, **state.buffers}
    return {
        # A row-range view would be saved with the whole tensor that it is a part of.
        "model": {name: _own_memory(_local(tensor).detach()) for name, tensor in tensors.items()},
        "optimizer": _map_tensors(state.optimizer.state_dict(), _local),
    }


def _own_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that is not a part of larger memory."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.to("cpu", copy=True) if is_part else tensor


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint of a model holds."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which shares its memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_tensors(item, function) for item in value]
    return value


def _own_rows(parts: Sequence[Tensor], shares: Shares) -> Tensor:
    """Return the rows that this rank keeps of a tensor that lies in parts, without a copy where one part has them."""
    own = shares.rows(sum(len(part) for part in parts))
    found, start = [], 0
    for part in parts:
        first, last = max(own.start - start, 0), min(own.stop - start, len(part))
        if first < last:
            found.append(part[first:last])
        start += len(part)
    if not found:
        return parts[0][:0]
    return found[0] if len(found) == 1 else torch.cat(found)


def _restore_tensors(state: TrainState, saved: Sequence[dict[str, Any]], shares: Shares) -> None:
    live = {**state.weights, **state.buffers}
    names = saved[0]["model"].keys()
    if live.keys() != names:
        raise ValueError(f"the names {sorted(live.keys() ^ names)[:3]} are in one of them only")
    with torch.no_grad():
        for name, tensor in live.items():
            parts = [file["model"][name] for file in saved]
            own, kept = _own_rows(parts, shares) if name in state.weights else parts[0], _local(tensor)
            if kept.shape != own.shape:
                raise ValueError(f"{name} is {tuple(own.shape)}, not {tuple(kept.shape)}")
            kept.copy_(own)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Sequence[dict[str, Any]], shares: Shares) -> None:
    """Load what this rank's optimizer keeps; moments of FSDP2's parameters become shards again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [file["optimizer"]["state"] for file in saved]
    groups = [dict(group) for group in saved[0]["optimizer"]["param_groups"]]
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        group.update(fused=live["fused"], foreach=live["foreach"])  # of the devices, not of the run
    moments = {
        index: {key: _restored([state[index][key] for state in states], parameters[index], shares) for key in entries}
        for index, entries in states[0].items()
    }
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


def _restored(parts: Sequence[Any], like: Tensor, shares: Shares) -> Any:
    """Return one entry of an optimizer's state for a parameter; every rank keeps a scalar, as Adam's count of steps."""
    if not isinstance(parts[0], Tensor) or not parts[0].dim():
        return parts[0]
    own = _own_rows(parts, shares).to(_local(like).device, copy=True)  # not the mapped file, which will be removed
    if not isinstance(like, DTensor):
        return own
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
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


def _write_tensors(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _read_tensors(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        return saved
    except Exception as error:  # torch raises many kinds for a damaged file; all mean the same here
        raise RunError(
            f"{path} cannot be read ({first_line(error)}); remove {path.parent} to resume from the one before"
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill during a save left behind. One rank calls it, at the start of a run."""
    for leftover in folder.glob(f".{PREFIX}*.partial"):
        with suppress(OSError):
            shutil.rmtree(leftover)
