"""A bounded pool of processes that decode pictures ahead of the training loop.

Processes are spawned, not forked: the trainer has threads, sockets and devices that do not survive a fork. Pixels stay
in the trainer's memory until their micro-batch is loaded, so the loader's prefetch depth bounds that memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.training.pictures.decoding import Decoder, Values, Wanted
from fcp_cli.vision.processor import VisionProcessor

_MOST_WORKERS = 8


def usual_workers(local_ranks: int) -> int:
    """Return the number of decoder processes of a rank: its share of cores minus 1, between 1 and 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_WORKERS, max(1, cores // max(local_ranks, 1) - 1))


class PixelPool:
    """Processes that decode with a checkpoint's processor.

    Args:
        folder: checkpoint folder.
        processor: processor with which the manifest was counted.
        workers: number of processes; 0 decodes in the calling thread.
    """

    def __init__(self, folder: Path, processor: VisionProcessor, *, workers: int) -> None:
        self._decoder = Decoder(folder, processor) if workers == 0 else None
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                max_workers=workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(folder, processor),
            )
            self._pool.submit(os.getpid)  # starts workers now, so that they import while the model is built

    def begin(self, wanted: Wanted) -> Callable[[], list[Values]]:
        """Start decoding a picture; return a function that waits for its rows."""
        if self._decoder is not None:
            return partial(self._decoder, wanted)
        assert self._pool is not None
        try:
            future = self._pool.submit(_decode, wanted)
        except BrokenProcessPool as error:
            raise _broken() from error

        def wait() -> list[Values]:
            try:
                return future.result()
            except BrokenProcessPool as error:
                raise _broken() from error

        return wait

    def close(self) -> None:
        """End the processes; pending pictures are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def _broken() -> RunError:
    return RunError(
        "a process that decodes images ended, perhaps because memory ran out; see the lines above, and try fewer "
        "with --decode-workers"
    )


_decoders: list[Decoder] = []


def _start_worker(folder: Path, processor: VisionProcessor) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C and ends its workers
    threading.Thread(target=_follow_parent, name="fcp-parent", daemon=True).start()
    _decoders.append(Decoder(folder, processor))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the processes already run in parallel


def _follow_parent() -> None:
    """Exit when the trainer exits, even if killed: waiting for work would never end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _decode(wanted: Wanted) -> list[Values]:
    return _decoders[0](wanted)
