"""`make fuzz`: so many inputs over all kinds, in two processes, which are ended where an input takes too long; prints what it finds.

python -m tests.fuzz 20000 [FIRST] [KIND ...]
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.fuzz.campaign import KINDS
from tests.fuzz.judgement import MOST_WALL_SECONDS
from tests.fuzz.seeds import write_seeds

_PROCESSES = 2
_START_SECONDS = 300.0  # imports; on a busy machine
_PIECE = 100  # inputs of one turn, so that both processes have work until the end


class Campaign:
    """Inputs of kinds, handed out to processes.

    Args:
        kinds: with the number of inputs of each.
        first: number of the first input of each kind.
        seeds: of which each process has a copy.
    """

    def __init__(self, kinds: dict[str, int], first: int, seeds: Path) -> None:
        self._seeds = seeds
        self._waiting: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._left = Counter[str]()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._ended: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self._lock = threading.Lock()
        self.places = Counter[str]()
        pieces = [
            (kind, first + at, min(_PIECE, count - at))
            for kind, count in kinds.items()
            for at in range(0, count, _PIECE)
        ]
        for kind, at, count in pieces:
            self._left[kind] += count
            self._waiting.put((kind, at, count))

    def run(self) -> None:
        """Run all inputs."""
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(_PROCESSES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def ended(self) -> Counter[str]:
        """Return how many inputs were answered, refused and found, over all kinds."""
        return sum(self._ended.values(), Counter[str]())

    def _work(self, number: int) -> None:
        worker: Worker | None = None
        while not self._waiting.empty():
            try:
                kind, first, count = self._waiting.get_nowait()
            except queue.Empty:
                break
            began, end = time.monotonic(), first + count
            while first < end:
                worker = worker or Worker(self._seeds, self._seeds.with_name(f"seeds-{number}"))
                first, died = self._piece(worker, kind, first, end)
                if died is not None:
                    self._note(kind, first, "found", *died)
                    worker.end()
                    worker, first = None, first + 1
            self._note_time(kind, count, time.monotonic() - began)
        if worker is not None:
            worker.end()

    def _piece(self, worker: Worker, kind: str, first: int, end: int) -> tuple[int, tuple[str, str] | None]:
        """Run inputs in a process; return the number that it ended at, and how it died there."""
        worker.ask(kind, first, end - first)
        at, name = first, "it did not begin"
        while (answer := worker.answer()) is not None:
            if answer == "null":
                return end, None
            at, became, name, wrong = json.loads(answer)
            if became is not None:
                self._note(kind, at, became, name, wrong)
        return at, (name, worker.death())

    def _note(self, kind: str, number: int, became: str, name: str, wrong: str | None) -> None:
        with self._lock:
            self._ended[kind][became] += 1
            if wrong is not None:
                place = re.sub(r"[0-9]+", "N", wrong)[:160]
                self.places[place] += 1
                if self.places[place] == 1:
                    print(f"  {kind} {number}: {name}: {wrong}", flush=True)

    def _note_time(self, kind: str, count: int, seconds: float) -> None:
        with self._lock:
            self._left[kind] -= count
            self._seconds[kind] += seconds
            if not self._left[kind]:
                ended = self._ended[kind]
                words = ", ".join(f"{ended[name]} {name}" for name in ("answered", "refused", "found"))
                print(f"{kind}: {ended.total()} inputs: {words}, {self._seconds[kind]:.0f} s", flush=True)


class Worker:
    """A process that runs inputs over its own copy of the seeds."""

    def __init__(self, seeds: Path, own: Path) -> None:
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(seeds, own, symlinks=True)
        command = [sys.executable, "-m", "tests.fuzz.campaign", str(own)]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `end`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )
        self._patience, self._is_late, self._read = _START_SECONDS, False, b""

    def ask(self, kind: str, first: int, count: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, first, count]).encode() + b"\n")

    def answer(self) -> str | None:
        """Return the next line; None where none comes in time, or ever."""
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            with selectors.DefaultSelector() as ready:
                ready.register(self._process.stdout, selectors.EVENT_READ)
                self._is_late = not ready.select(self._patience)
            piece = b"" if self._is_late else os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                return None
            self._read += piece
        self._patience = 2 * MOST_WALL_SECONDS
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def death(self) -> str:
        """Return why no line came."""
        if self._is_late:
            return "it does not end"
        status = self._process.wait()
        self._errors.seek(0)
        return f"the process ended with status {status}: {self._errors.read()[-300:]}"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    wanted = sys.argv[3:] or list(KINDS)
    whole = sum(KINDS[kind].share for kind in wanted)
    kinds = {kind: max(1, math.ceil(count * KINDS[kind].share / whole)) for kind in wanted}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder) / "seeds"
        seeds.mkdir()
        write_seeds(seeds)
        campaign = Campaign(kinds, first, seeds)
        campaign.run()
    ended = campaign.ended
    words = ", ".join(f"{ended[name]} {name}" for name in ("answered", "refused", "found"))
    print(
        f"{ended.total()} inputs in {time.monotonic() - began:.0f} s: {words}; {len(campaign.places)} different findings"
    )
    sys.exit(1 if campaign.places else 0)


if __name__ == "__main__":
    main()
