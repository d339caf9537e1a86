"""Save and load checkpoints: a folder per saved step that exists whole or not at all, from which a run resumes exactly.

    checkpoints/step-00000500/
        checkpoint.json      format, step, plan hash, ranks, sharding
        state.pt             weights and optimizer (replicated: written by rank 0)
        state-00003.pt       this rank's shard of both (sharded: written by every rank)
        rng-00003.pt         this rank's random generators

`step` counts finished steps. The learning rate is a function of the step and the data order is the plan, so neither is
saved. Everything is read with `weights_only`: a checkpoint can hold tensors and numbers, never code.

Not torch.distributed.checkpoint: its reader opens the metadata of a checkpoint with a plain `pickle.load`, which runs
whatever code the file holds. Its storage without pickle (safetensors) is not public in the oldest torch that fcp
supports, takes tensors only, where an optimizer's parameter groups hold numbers, and doubles a rank's shard in host
memory while it writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoint_header import FORMAT, PREFIX, CheckpointHeader, checkpoints
from fcp_cli.words import first_line


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The live objects that a checkpoint captures. `model` is the one whose parameters the optimizer holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


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
        if header.sharding == "sharded":
            _write_tensors(partial / f"state-{rank:05d}.pt", _captured(state))
        elif rank == 0:
            _write_tensors(partial / "state.pt", _captured(state))
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


def load_checkpoint(
    checkpoint: Path, state: TrainState, *, header: CheckpointHeader, rank: int, num_ranks: int
) -> None:
    """Put a checkpoint back into the live objects, bit for bit as it was saved.

    On another number of ranks than it was saved on, each rank cuts its shard out of the saved ones. A rank that was
    not there before keeps the random generators that it started with.

    Raises:
        RunError: a file is missing or damaged, or its tensors are not this model's.
    """
    try:
        saved = _saved_state(checkpoint, state, header, rank, num_ranks)
        _restore_model(state.model, saved["model"])
        _restore_optimizer(state.optimizer, saved["optimizer"])
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(f"{checkpoint} does not fit this model: {first_line(error)}") from error
    if rank < header.num_ranks:
        _restore_random_states(_read_tensors(checkpoint / f"rng-{rank:05d}.pt"), state.device)


def _saved_state(
    checkpoint: Path, state: TrainState, header: CheckpointHeader, rank: int, num_ranks: int
) -> dict[str, Any]:
    """Read what this rank loads: the one state, its own shard, or a shard cut from those of all ranks."""
    if header.sharding == "replicated":
        return _read_tensors(checkpoint / "state.pt")
    if header.num_ranks == num_ranks:
        return _read_tensors(checkpoint / f"state-{rank:05d}.pt")
    # Mapped, so that a rank that needs a part of every shard does not hold them all.
    shards = [_read_tensors(checkpoint / f"state-{saved:05d}.pt", mapped=True) for saved in range(header.num_ranks)]
    return _resharded(shards, state)


def _resharded(shards: Sequence[dict[str, Any]], state: TrainState) -> dict[str, Any]:
    """Return this rank's shard of every tensor, out of the shards of all ranks that saved it."""
    first = shards[0]
    live = dict(_named_tensors(state.model))
    if live.keys() != first["model"].keys():
        raise ValueError(f"the names {sorted(live.keys() ^ first['model'].keys())[:3]} are in one of them only")
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    moments = {
        index: {
            name: _own_part([shard["optimizer"]["state"][index][name] for shard in shards], parameters[index])
            for name in entries
        }
        for index, entries in first["optimizer"]["state"].items()
    }
    return {
        "model": {name: _own_part([s["model"][name] for s in shards], tensor) for name, tensor in live.items()},
        "optimizer": {**first["optimizer"], "state": moments},
    }


def _own_part(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return this rank's rows of a tensor, shared out as `fully_shard` does; every rank holds a scalar whole."""
    if not isinstance(like, DTensor) or not parts[0].dim():
        return parts[0].clone()
    whole = torch.cat(list(parts))
    rows = -(-whole.shape[0] // like.device_mesh.size())  # of each rank, less at the end
    start = like.device_mesh.get_local_rank() * rows
    return whole[start : start + rows].clone()


def _captured(state: TrainState) -> dict[str, Any]:
    return {
        "model": {name: _local(tensor).detach() for name, tensor in _named_tensors(state.model)},
        "optimizer": _map_tensors(state.optimizer.state_dict(), _local),
    }


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and saved buffers, a tied one once."""
    parameters = dict(model.named_parameters())
    yield from parameters.items()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


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


def _restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    live = dict(_named_tensors(model))
    if live.keys() != saved.keys():
        raise ValueError(f"the names {sorted(live.keys() ^ saved.keys())[:3]} are in one of them only")
    with torch.no_grad():
        for name, tensor in live.items():
            if _local(tensor).shape != saved[name].shape:
                raise ValueError(f"{name} is {tuple(saved[name].shape)}, not {tuple(_local(tensor).shape)}")
            _local(tensor).copy_(saved[name])


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load a state dict of local tensors; those of sharded parameters become shards again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entries in saved["state"].items():
        like = parameters[index]
        if isinstance(like, DTensor):
            shape = _local(like).shape  # what has another, as Adam's count of steps, is whole on every rank
            saved["state"][index] = {
                key: _sharded_like(value, like) if isinstance(value, Tensor) and value.shape == shape else value
                for key, value in entries.items()
            }
    optimizer.load_state_dict(saved)


def _sharded_like(local: Tensor, like: DTensor) -> DTensor:
    local = local.to(_local(like).device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
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
