"""Checkpoint contents, and exact resumption from a checkpoint.

    checkpoints/step-00000500/
        checkpoint.json            format, step, plan hash, ranks, sharding, checksums of the other files
        state.safetensors          weights and optimizer (replicated: written by rank 0)
        state-00003.safetensors    a shard of both (sharded: written by the ranks of the first replica)
        rng-00003.safetensors      random generator states of a rank

`step` counts finished steps. The learning rate depends only on the step and data order is in the plan, so neither is
saved. Weights are those that the optimizer updates. Shards are row ranges under any sharding, so a run may resume under
another one: a rank slices its shard from memory-mapped files. Tensors are named `model/NAME` and
`optimizer/PARAMETER/ENTRY`; an optimizer's scalars are in the file header, as JSON. No file is a pickle, so loading a
checkpoint cannot run code.

Why not torch.distributed.checkpoint: its reader loads metadata with `pickle.load`, which can run code. Its safetensors
storage (`HuggingFaceStorageWriter`, as of torch 2.13) has no such file, but also no mark that a checkpoint is complete.
It stores only tensors, not the scalars of parameter groups; serializes a rank's file in memory in addition to the copy;
needs a second process group for asynchronous saves, since it runs collectives in a thread; and is not public in the
oldest supported torch. Its benefit, resharding, is `_own_rows` here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcp_cli.errors import RunError
from fcp_cli.runs.checkpoints import (
    PREFIX,
    CheckpointHeader,
    FileSums,
    checkpoints,
    damage,
    kept_before,
    sums_of,
    way_back,
)
from fcp_cli.runs.run_dir import require_own_link
from fcp_cli.runtime import Session
from fcp_cli.runtime.transport import gather_texts
from fcp_cli.training.sharding import Shares
from fcp_cli.training.weights import copy_companions, published_folder
from fcp_cli.util.files import flush_to_disk, json_text, reason_of, write_text_atomically
from fcp_cli.util.inputs import decode_json, decode_record, read_json
from fcp_cli.util.words import first_line

_STATE_KEY = "optimizer"  # key in the header of a state file
_LENGTH_BYTES = 8  # before the header of a safetensors file


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Live objects captured by a checkpoint.

    Attributes:
        weights: this rank's part of each parameter by name (tied ones once): unsharded, rows, or an FSDP2 shard.
        buffers: buffers by name, unsharded.
        optimizer: optimizer of the trained weights.
        device: device of this rank.
        shares: sharding of weights and optimizer.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device
    shares: Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The part of a checkpoint that a rank writes.

    Attributes:
        tensors: tensors (live or copies) by file name and tensor name.
        headers: additional header fields by file name.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    headers: Mapping[str, Mapping[str, str]]


def capture(state: TrainState, header: CheckpointHeader, *, rank: int) -> Captured:
    """Capture this rank's part; tensors are live, only random generator states are copies."""
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
    """Split an optimizer's state into tensors, named PARAMETER/ENTRY, and scalars."""
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
    """Write a rank's files from host tensors, and flush them to disk.

    Returns:
        Checksums by file name, computed from memory, so that they also detect write errors.
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
        number = re.search(r"os error (\d+)", str(error))  # a SafetensorError wraps it
        failure = OSError(int(number[1]), "") if number else error
        reason = reason_of(failure, path.parent) if isinstance(failure, OSError) else first_line(failure)
        raise RunError(f"cannot write {path}: {reason}; {kept_before(path.parent.parent)}") from error
    return sums


def _pieces(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the content of a tensor file: the header, read back, then tensors from memory."""
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
    """Restore a checkpoint into the live objects bitwise, whatever the sharding then and now.

    A new rank keeps its initial random generator states. Ranks that read the same files divide their verification; a
    rank that finds damage ends the job.
    """
    names, shares = _state_files(header), state.shares
    readers = (rank, num_ranks)
    if len(names) == shares.count:  # equal sharding: the rank reads only its own file
        names, readers = [names[shares.index]], (shares.copy, max(1, num_ranks // shares.count))
        shares = Shares()
    _verify(checkpoint, header, names, *readers)
    with ExitStack() as stack:
        # Memory-mapped, so that a rank that needs a part of each file does not load all of them.
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
    """Verify a share of the checksums of some files."""
    if (unlisted := next((name for name in names if name not in header.files), None)) is not None:
        raise RunError(f"{checkpoint / unlisted} is not listed in checkpoint.json; {way_back(checkpoint)}")
    found = damage(checkpoint, {name: header.files[name] for name in names}, index=index, count=count)
    if found is not None:
        raise RunError(f"{found}; {way_back(checkpoint)}")


def _state_files(header: CheckpointHeader) -> list[str]:
    """Return the state files, in shard order."""
    if header.sharding == "replicated":
        return ["state.safetensors"]
    return [f"state-{index:05d}.safetensors" for index in range(header.shards)]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be read ({first_line(error)}); {way_back(path.parent)}") from error


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, sharing memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _own_rows(parts: Sequence[Any], shares: Shares) -> Tensor:
    """Read this rank's rows of a tensor that is split over files."""
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
    """Read this rank's part of a saved tensor; scalars, such as Adam's step count, are not sharded."""
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
    """Load this rank's optimizer state; moments of FSDP2 parameters become DTensors again."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = decode_record(saved[0].metadata()[_STATE_KEY])
    groups = numbers["param_groups"]
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        group.update(fused=live["fused"], foreach=live["foreach"])  # these depend on the device, not the run
    state: dict[int, dict[str, Any]] = {int(index): dict(entries) for index, entries in numbers["entries"].items()}
    for name in saved[0].keys():  # noqa: SIM118
        kind, _, place = name.partition("/")
        if kind == "optimizer":
            index, _, key = place.partition("/")
            own = _restored(saved, name, shares)
            state.setdefault(int(index), {})[key] = _like(own, parameters[int(index)]) if own.dim() else own
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _like(own: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment on its parameter's device, as a DTensor if the parameter is one."""
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


# Asynchronous saving: the state is copied to the host, and a thread writes the copy.
#
# Checkpoint folders appear atomically: ranks write into a hidden folder, which rank 0 renames once all ranks report
# that their files are on disk. They report in the exchange at the end of each step (`trainer.reduce_flags`), so no
# thread takes part in a collective. Before the rename, rank 0 gathers the checksums of all files into
# `checkpoint.json`. A run killed at any moment keeps its earlier checkpoints.

_PARTIAL: Final = ".partial"


class CheckpointSaver:
    """Saves a run's checkpoints; all methods must be called by all ranks in the same order.

    Args:
        folder: checkpoint folder, shared by all ranks.
        session: session of this rank.
        keep: number of newest checkpoints to keep.
        in_background: whether `save` returns once the state is copied.
        saved: called on rank 0 with folder and step of each complete checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        *,
        keep: int,
        in_background: bool,
        saved: Callable[[Path, int], None] = lambda path, step: None,
    ) -> None:
        self._folder = folder
        self._session = session
        self._keep = keep
        self._in_background = in_background
        self._saved = saved
        self._copies = _HostCopies()
        self._pending: _Writing | None = None

    def save(self, header: CheckpointHeader, state: TrainState) -> None:
        """Save the state of a finished step, after the previous checkpoint is complete."""
        self.finish()
        final = self._folder / f"{PREFIX}{header.step:08d}"
        partial = self._folder / f".{final.name}{_PARTIAL}"
        try:
            if self._session.rank == 0:
                require_own_link(self._folder)
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        except OSError as error:
            raise _cannot_write(final, error) from error
        dist.barrier()  # rank 0 must empty the folder first
        captured = capture(state, header, rank=self._session.rank)
        # Copy tensors that the next step may change while they are written, or that are on a device.
        if self._in_background or state.device.type != "cpu":
            captured = self._copies.of(captured)
        self._pending = _Writing(final=final, partial=partial, header=header, copied=self._copies.event())
        self._pending.start(captured)
        if not self._in_background:
            self.finish()

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing files."""
        return self._pending is not None and not self._pending.is_done()

    def publish(self) -> None:
        """Publish the checkpoint that all ranks have written, if any. Collective; called after all writes ended."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        own = json.dumps({name: asdict(sums) for name, sums in pending.sums.items()})
        gathered = gather_texts(self._session.world, own)
        if self._session.rank != 0:
            return
        files = {
            name: FileSums(bytes=sums["bytes"], crc32=tuple(sums["crc32"]))
            for text in gathered
            for name, sums in decode_json(text).items()
        }
        require_own_link(self._folder)
        try:
            _name_checkpoint(pending, files)
        except OSError as error:
            raise _cannot_write(pending.final, error) from error
        for old in checkpoints(self._folder)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        self._saved(pending.final, pending.header.step)

    def finish(self) -> None:
        """Wait until the pending checkpoint is complete."""
        if self._pending is None:
            return
        self._pending.wait()
        dist.barrier()  # all files must be complete before the rename
        self.publish()
        dist.barrier()


class _Writing:
    """A checkpoint whose files this rank is writing."""

    def __init__(self, *, final: Path, partial: Path, header: CheckpointHeader, copied: Any) -> None:
        self.final = final
        self.partial = partial
        self.header = header
        self.sums: Mapping[str, FileSums] = {}
        self._copied = copied
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, captured: Captured) -> None:
        # A daemon thread: a failed run does not wait for a checkpoint that is never used.
        self._thread = Thread(target=self._write, args=(captured,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, captured: Captured) -> None:
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self.sums = write_files(self.partial, captured)
        except BaseException as error:
            self._error = error

    def is_done(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


class _HostCopies:
    """Host memory for state copies, pinned for copies from a device.

    Reused for all checkpoints: pinning is slow, and so a run that has saved once can save again.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}
        self._device: torch.device | None = None

    def of(self, captured: Captured) -> Captured:
        """Copy tensors; copies from a device are complete once `event` has completed."""
        tensors = {
            file: {name: self._copy((file, name), tensor) for name, tensor in held.items()}
            for file, held in captured.tensors.items()
        }
        return Captured(tensors=tensors, headers=captured.headers)

    def _copy(self, place: tuple[str, str], tensor: Tensor) -> Tensor:
        on_device = tensor.device.type != "cpu"
        kept = self._kept.get(place)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
            self._kept[place] = kept
        if on_device:
            self._device = tensor.device
        return kept.copy_(tensor, non_blocking=on_device)

    def event(self) -> Any:
        """Return an event that completes with the copies, or None; the next update waits for it."""
        if self._device is None:
            return None
        device = torch.get_device_module(self._device)
        event = device.Event()
        event.record(device.current_stream(self._device))
        return event


def _name_checkpoint(written: _Writing, sums: Mapping[str, FileSums]) -> None:
    write_text_atomically(written.partial / "checkpoint.json", replace(written.header, files=sums).text())
    # All files have been flushed to disk; the rename publishes the checkpoint.
    replaced = written.partial.with_name(f".{written.final.name}.replaced{_PARTIAL}")
    if written.final.exists():  # the same step, saved before this run was resumed
        written.final.rename(replaced)
    written.partial.rename(written.final)
    shutil.rmtree(replaced, ignore_errors=True)
    with suppress(OSError):  # some file systems cannot flush folders
        flush_to_disk(written.final.parent)


def _cannot_write(path: Path, error: OSError) -> RunError:
    reason = reason_of(error, path.parent)
    return RunError(f"cannot write the checkpoint {path}: {reason}; {kept_before(path.parent)}")


def remove_leftovers(folder: Path) -> None:
    """Remove remains of a killed save. Called by one rank at the start of a run."""
    require_own_link(folder)
    for leftover in folder.glob(f".{PREFIX}*{_PARTIAL}"):
        with suppress(OSError):
            shutil.rmtree(leftover)


# The run's copy of its initial checkpoint without weights, for resuming and exporting if the original is gone.

_NAMES = "tensor-names.json"


def keep_origin(target: Path, *, model: str, source: Path, names: Mapping[str, str]) -> None:
    """Copy configuration, tokenizer and processor of a checkpoint. Called by one rank at the start of a run.

    Args:
        target: folder to create.
        model: model as named; if it is a folder or a config.json, that configuration is copied.
        source: initial checkpoint.
        names: checkpoint name of each tensor, from `match_weights`.
    """
    given = Path(model)
    config = given / "config.json" if given.is_dir() else given
    with published_folder(target, rank=0, barrier=lambda: None) as partial:
        if config.name.endswith(".json") and config.is_file():
            shutil.copyfile(config, partial / "config.json")
        copy_companions(source, partial)
        (partial / _NAMES).write_text(json_text(dict(names)), encoding="utf-8")


def kept_names(origin: Path) -> dict[str, str] | None:
    """Return the checkpoint names of a run's tensors, or None if it had no initial checkpoint."""
    path = origin / _NAMES
    if not path.is_file():
        return None
    names = read_json(path, error=RunError)
    if not isinstance(names, dict):
        raise RunError(f"{path} is damaged; remove it, and give the checkpoint with --weights")
    return names
