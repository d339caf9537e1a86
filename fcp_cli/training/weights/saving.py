"""Saves checkpoints asynchronously: the state is copied to the host, and a thread writes the copy.

Checkpoint folders appear atomically: ranks write into a hidden folder, which rank 0 renames once all ranks report that
their files are on disk. They report in the exchange at the end of each step (`trainer.tell_all`), so no thread takes
part in a collective. Before the rename, rank 0 gathers the checksums of all files into `checkpoint.json`. A run killed
at any moment keeps its earlier checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.files import flush_to_disk, reason_of, write_text_atomically
from fcp_cli.reading.documents import decode_json
from fcp_cli.runs.checkpoints.checkpoint_files import FileSums
from fcp_cli.runs.checkpoints.checkpoint_header import PREFIX, CheckpointHeader, checkpoints, kept_before
from fcp_cli.training.weights.checkpoint import Captured, TrainState, capture, write_files

_PARTIAL: Final = ".partial"


class CheckpointSaver:
    """Saves a run's checkpoints; all methods must be called by all ranks in the same order.

    Args:
        folder: checkpoint folder, shared by all ranks.
        rank: rank of this process.
        barrier: waits for all ranks.
        gather: all-gathers a text.
        keep: number of newest checkpoints to keep.
        in_background: whether `save` returns once the state is copied.
        saved: called on rank 0 with folder and step of each complete checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        barrier: Callable[[], None],
        gather: Callable[[str], list[str]] = lambda text: [text],
        keep: int,
        in_background: bool,
        saved: Callable[[Path, int], None] = lambda path, step: None,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._barrier = barrier
        self._gather = gather
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
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        except OSError as error:
            raise _cannot_write(final, error) from error
        self._barrier()  # rank 0 must empty the folder first
        captured = capture(state, header, rank=self._rank)
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
        sums = self._gather(json.dumps({name: asdict(sums) for name, sums in pending.sums.items()}))
        if self._rank != 0:
            return
        try:
            _name_checkpoint(pending, dict(_told_sums(sums)))
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
        self._barrier()  # all files must be complete before the rename
        self.publish()
        self._barrier()


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


def _told_sums(texts: Iterable[str]) -> Iterator[tuple[str, FileSums]]:
    for text in texts:
        for name, sums in decode_json(text).items():
            yield name, FileSums(bytes=sums["bytes"], crc32=tuple(sums["crc32"]))


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
    for leftover in folder.glob(f".{PREFIX}*{_PARTIAL}"):
        with suppress(OSError):
            shutil.rmtree(leftover)
