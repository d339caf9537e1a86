"""Runs one input in this process and says how it broke the rule: an answer, or one short line and status 1 or 2.

Beside the status and the words, it sees time and memory beyond their limits, files that were left, changed or written elsewhere, and processes
that were started, signalled or called with words of the input as options. A crash is seen by whoever started this process.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import FcpError
from tests.cli.planning_folder import fcp
from tests.fuzz.folder import SeedFolder
from tests.fuzz.kind import Input
from tests.fuzz.mutations import OPTION_WORDS

MOST_SECONDS = 20.0  # of this process; a busy machine gives it later
MOST_WALL_SECONDS = 60.0
MOST_MEMORY = 4 << 30  # of addresses beyond those of the process before; arenas and thread stacks reserve some
MOST_CHARACTERS = 1300


class TooLongError(BaseException):
    """An input took longer than it may."""


class StartedError(BaseException):
    """A process was to be started."""


class Watch:
    """Sees what happens outside of Python's view of a command: processes, signals, files written elsewhere.

    Attributes:
        faults: in words.
    """

    current: Watch | None = None
    _is_hooked = False

    def __init__(self, folder: Path, one: Input) -> None:
        self._folder = str(folder)
        self._may_write = (self._folder, tempfile.gettempdir(), "/dev/", "/proc/")
        self._input = one
        self._patch = pytest.MonkeyPatch()
        self.faults: list[str] = []

    def __enter__(self) -> Watch:
        if not Watch._is_hooked:
            sys.addaudithook(_on_event)  # for the life of the process
            Watch._is_hooked = True
        Watch.current = self
        self._patch.setattr(signal, "pidfd_send_signal", self._see_signal, raising=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        Watch.current = None

    def _see_signal(self, handle: int, number: int, *_: object) -> None:
        if number:
            self.faults.append(f"it sends signal {number} to a process")
            raise StartedError

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.kill", "os.killpg") and arguments[1] != 0:
            self.faults.append(f"it sends signal {arguments[1]} to process {arguments[0]}")
            raise StartedError
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"):
            self._see_process(event, arguments)
        if event == "open" and isinstance(arguments[0], str):
            self._see_open(*arguments)

    def _see_process(self, event: str, arguments: tuple[Any, ...]) -> None:
        words = [str(word) for word in arguments[1] or ()] if event == "subprocess.Popen" else [event]
        if found := [word for word in words[1:] if word in OPTION_WORDS]:
            self.faults.append(f"{words[0]} gets the option {found[0]} from the input")
            raise StartedError
        is_fake = words[0] in _SCHEDULERS and Path(self._folder, "bin", words[0]).is_file()
        if is_fake or Path(words[0]).name in _ASKED or _RENDERER in words[-1]:
            return
        if not self._input.starts:
            self.faults.append(f"it starts {words[:3]}")
        raise StartedError

    def _see_open(self, path: str, mode: str | None, flags: int) -> None:
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or path.endswith((".nbi", ".nbc", ".pyc")):
            return
        whole = os.path.abspath(path)  # noqa: PTH100  links stay: where they lead is where the command was sent
        if not whole.startswith(self._may_write) and "__pycache__" not in whole:
            self.faults.append(f"it writes {whole[:200]}")


_ASKED = ("gcc", "cc", "ld", "objdump", "nvidia-smi", "npu-smi", "lspci", "ldconfig", "uname", "git")
_RENDERER = "from fcp_cli.util.templates import serve"
_SCHEDULERS = ("squeue", "sacct", "scancel", "kubectl", "sbatch")  # of the seeds: scripts that print a file


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if Watch.current is not None:
        Watch.current.see(event, arguments)


def judged(one: Input, seeds: SeedFolder) -> tuple[str, str | None]:
    """Run an input, and put the folder back.

    Returns:
        "answered", "refused" or "found", and what is wrong with it, in words.
    """
    seeds.write(one.files)
    outcome = _Outcome(one)
    with Watch(seeds.path, one) as watch:
        outcome.run(seeds.path)
    left = [name for name in seeds.restore(one.files) if not _in_cache(name)]
    wrong = next(iter(watch.faults), None) or outcome.wrong or _left_wrong(left, one, is_refused=outcome.is_refused)
    return "found" if wrong else "refused" if outcome.is_refused else "answered", wrong


class _Outcome:
    """What became of an input.

    Attributes:
        wrong: with its words and status.
        is_refused: it ended with an error.
    """

    def __init__(self, one: Input) -> None:
        self._input = one
        self.wrong: str | None = None
        self.is_refused = False

    def run(self, folder: Path) -> None:
        try:
            with _limited():
                if self._input.call is None:
                    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", **self._input.environment}
                    self._judge(fcp(*self._input.words, cwd=folder, **environment))
                else:
                    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                        self._input.call(folder)
        except StartedError:
            pass  # `Watch` says whether it may
        except FcpError as error:  # of a call
            self.is_refused = True
            self.wrong = _words_wrong(f"error: {error}")
        except BaseException as error:  # whatever reaches the user as a traceback
            if isinstance(error, KeyboardInterrupt):
                raise
            self.is_refused, self.wrong = True, _described(error)

    def _judge(self, result: subprocess.CompletedProcess[str]) -> None:
        words, errors = self._input.words, _errors(result.stderr)
        self.is_refused = result.returncode != 0
        if result.returncode not in (0, 1, 2) or (result.returncode == 2 and not errors):
            self.wrong = f"status {result.returncode}: {result.stderr[-300:]}"
        elif len(errors) > 1 and words[0] != "check":
            self.wrong = f"{len(errors)} errors: {errors[:3]}"
        elif errors and result.returncode == 0:
            self.wrong = f"status 0 in spite of {errors}"
        elif result.returncode and not result.stderr.strip() and not result.stdout.strip():
            self.wrong = f"status {result.returncode} without a word"
        else:
            self.wrong = _words_wrong(result.stderr)
        if self.wrong is None and result.returncode == 0 and "--json" in words:
            try:
                json.loads(result.stdout, parse_constant=_refuse)
            except ValueError as error:
                self.wrong = f"no JSON on standard output: {error}: {result.stdout[:100]!r}"


def _errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


def _words_wrong(text: str) -> str | None:
    lines = text.splitlines()
    if "Traceback (most recent call last)" in text:
        return f"a traceback: {text[-300:]}"
    if "not enough memory" in text:
        return f"it runs out of memory: {text[-200:]}"
    if any(len(line) > MOST_CHARACTERS for line in lines):
        return f"a line of {max(map(len, lines))} characters: {text[:300]}"
    if any(character in text for character in "\x1b\x00\x07\x08"):
        return f"control characters in {text[:300]!r}"
    return None


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = [at for at in frames if "fcp_cli" in at.filename][-1:] or frames[-1:]
    return f"{type(error).__name__}: {str(error)[:200]} at {where[0].filename}:{where[0].lineno} {where[0].line}"


def _in_cache(name: str) -> bool:
    return "__pycache__" in name


def _left_wrong(changed: list[str], one: Input, *, is_refused: bool) -> str | None:
    """Return which path a command changed that it may not: outputs begin with out, and none stays after an error."""
    for name in changed:
        if any(fnmatch(name, pattern) for pattern in one.writes):
            continue
        if name.endswith(".partial"):
            return f"it left {name}"
        if not name.startswith("out"):
            return f"it changed {name}"
        if is_refused and one.words[:1] != ("check",):
            return f"an output in spite of an error: {name}"
    return None


def _refuse(name: str) -> Any:
    raise ValueError(name)


@contextmanager
def _limited() -> Iterator[None]:
    """Limit time and memory of this process; memory counts from what it holds now."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = [signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, MOST_WALL_SECONDS)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)
