"""Hands changed files of every kind to the commands that read them, in this process, and judges what comes back.

`python -m tests.fuzz.campaign KIND FIRST COUNT` prints the number of each input before it runs and what is wrong with it;
whoever starts it ends it where a number stands for too long.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.commands.planning_folder import fcp
from tests.fuzz import mutations
from tests.fuzz.seeds import write_seeds

MOST_SECONDS = 20.0
MOST_CHARACTERS = 1300

_PLAN = ("--ranks", "4", "--ranks-per-node", "2", "--tokens-per-rank", "8192", "--global-batch-size", "16")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Files of one kind.

    Attributes:
        file: the sound one, in the folder of seeds.
        change: makes the bytes of a changed one.
        commands: that read it, of which one is drawn; FILE stands for it.
    """

    file: str
    change: Callable[[random.Random, bytes], bytes]
    commands: tuple[str, ...]


def _parquet(draw: random.Random, content: bytes) -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".parquet") as scratch:
        return mutations.of_parquet(draw, content, Path(scratch.name))


_PLANNED = ("plan FILE --solver static PLAN -o out.parquet", "manifest show FILE --json", "compare FILE PLAN --json")
_SHOWN = "inspect FILE --json|check FILE|check FILE --manifest dataset.parquet|trace FILE -o out.json --json"
_LAUNCHED = "launch --plan FILE --model qwen3-tiny --synthetic --dry-run --json"
_BUILT = "manifest build FILE -o out.parquet"
_ANALYTIC = "profile --analytic --model qwen3-8b --cluster example-8x8 -o out.yaml --json"
KINDS = {
    "manifest": Kind(file="dataset.parquet", change=_parquet, commands=_PLANNED),
    "built manifest": Kind(file="built.parquet", change=_parquet, commands=_PLANNED),
    "arrow": Kind(file="dataset.arrow", change=mutations.of_bytes, commands=_PLANNED[:2]),
    "lengths in lines": Kind(file="dataset.jsonl", change=mutations.of_lines, commands=_PLANNED[:2]),
    "lengths in csv": Kind(file="dataset.csv", change=mutations.of_bytes, commands=_PLANNED[:2]),
    "plan": Kind(file="plan.parquet", change=_parquet, commands=(*_SHOWN.split("|"), _LAUNCHED)),
    "plan of the micro-batch sync": Kind(file="waves.parquet", change=_parquet, commands=tuple(_SHOWN.split("|"))),
    "cost profile": Kind(
        file="profile.yaml",
        change=mutations.of_yaml,
        commands=(
            "profile show FILE --json",
            "plan dataset.parquet --solver static --profile FILE PLAN -o out.parquet",
            "plan dataset.parquet --profile FILE --sync microbatch PLAN -o out.parquet",
            "plan dataset.parquet --profile FILE PLAN -o out.parquet",
            "profile diff FILE other.yaml --json",
        ),
    ),
    "config": Kind(
        file="fcp.yaml", change=mutations.of_yaml, commands=("--config FILE plan dataset.parquet -o out.parquet",)
    ),
    "hf config": Kind(
        file="hf/config.json",
        change=mutations.of_json,
        commands=(_ANALYTIC.replace("qwen3-8b", "FILE"), _ANALYTIC.replace("--model qwen3-8b", "--hf-config FILE")),
    ),
    "model": Kind(file="model.yaml", change=mutations.of_yaml, commands=(_ANALYTIC.replace("qwen3-8b", "FILE"),)),
    "cluster": Kind(
        file="cluster.yaml", change=mutations.of_yaml, commands=(_ANALYTIC.replace("example-8x8", "FILE"),)
    ),
    "samples": Kind(
        file="samples.jsonl",
        change=mutations.of_lines,
        commands=("profile --from-samples FILE -o out.yaml --json",),
    ),
    "metrics": Kind(
        file="runs/tiny-001/metrics.jsonl",
        change=mutations.of_lines,
        commands=(
            "watch runs/tiny-001 --json",
            "watch runs/tiny-001 --once",
            "profile fit FILE --plan plan.parquet --skip-steps 0 -o out.yaml",
            "trace plan.parquet FILE -o out.json",
        ),
    ),
    "launch record": Kind(
        file="runs/tiny-001/launch.json",
        change=mutations.of_json,
        commands=(
            "watch runs/tiny-001 --json",
            "jobs --json",
            "launch --resume --run-dir runs/tiny-001 --dry-run --json",
            "plan dataset.parquet --continue-from runs/tiny-001 --ranks 6 -o out.parquet",
        ),
    ),
    "heartbeat": Kind(
        file="runs/tiny-001/heartbeat.json",
        change=mutations.of_json,
        commands=("watch runs/tiny-001 --json", "jobs --json"),
    ),
    "checkpoint": Kind(
        file="runs/tiny-001/checkpoints/step-000001/checkpoint.json",
        change=mutations.of_json,
        commands=(
            "launch --resume --run-dir runs/tiny-001 --dry-run --json",
            "plan dataset.parquet --continue-from runs/tiny-001 --ranks 6 -o out.parquet",
        ),
    ),
    "texts": Kind(file="texts.jsonl", change=mutations.of_lines, commands=(_BUILT,)),
    "text table": Kind(file="texts.parquet", change=_parquet, commands=(_BUILT,)),
    "tokenizer": Kind(
        file="tokenizer.json",
        change=mutations.of_json,
        commands=("manifest build texts.jsonl --tokenizer FILE -o out.parquet",),
    ),
    "media of a table": Kind(
        file="media.parquet", change=_parquet, commands=(f"{_BUILT} --kind media --processor qwen3-vl",)
    ),
    "media": Kind(
        file="media.jsonl", change=mutations.of_lines, commands=(f"{_BUILT} --kind media --processor qwen3-vl",)
    ),
    "media list": Kind(
        file="media.json",
        change=mutations.of_json,
        commands=(f"{_BUILT} --kind media --processor qwen3-vl --tokenizer tokenizer.json",),
    ),
    "media table": Kind(
        file="media.csv", change=mutations.of_bytes, commands=(f"{_BUILT} --kind media --processor qwen2.5-vl",)
    ),
    "tar": Kind(file="media.tar", change=mutations.of_bytes, commands=(f"{_BUILT} --processor internvl",)),
    "megatron": Kind(file="megatron.idx", change=mutations.of_bytes, commands=(_BUILT,)),
    "processor": Kind(
        file="processor/preprocessor_config.json",
        change=mutations.of_json,
        commands=("manifest build media.jsonl --kind media --processor processor -o out.parquet",),
    ),
}


def inputs(kind: str, seeds: Path, first: int, count: int) -> Iterator[tuple[int, str | None]]:
    """Yield the number of each input before it runs, and again with what is wrong with it, in words, or None.

    Args:
        kind: one of `KINDS`.
        seeds: of `write_seeds`; files in it are changed and put back.
        first, count: the inputs follow from their numbers.
    """
    chosen = KINDS[kind]
    target = seeds / chosen.file
    sound = target.read_bytes()
    try:
        for number in range(first, first + count):
            yield number, None
            draw = random.Random(f"{kind} {number}")
            target.write_bytes(chosen.change(draw, sound))
            words = words_of(draw.choice(chosen.commands), chosen.file)
            wrong = judged(words, seeds)
            if wrong:
                yield number, f"fcp {' '.join(words)}: {wrong}"
    finally:
        target.write_bytes(sound)


def words_of(command: str, file: str) -> list[str]:
    """Return the words of a command of `KINDS` for a file."""
    return command.replace("PLAN", " ".join(_PLAN)).replace("FILE", file).split()


def judged(words: list[str], folder: Path) -> str | None:
    """Run a command and say how it broke the rule: status 0, or one short line and a status of 1 or 2."""
    before = {path.name for path in folder.iterdir()}
    try:
        with _limited():
            result = fcp(*words, cwd=folder)
    except BaseException as error:  # whatever reaches the user as a traceback
        if isinstance(error, KeyboardInterrupt):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        inner = [at for at in traceback.extract_tb(error.__traceback__) if "fcp_cli" in at.filename]
        where = inner[-1] if inner else place
        return f"{type(error).__name__}: {str(error)[:200]} at {where.filename}:{where.lineno} {where.line}"
    left = {path.name for path in folder.iterdir()} - before
    for name in left:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if result.returncode not in (0, 1, 2) or (result.returncode == 2 and not errors):
        return f"status {result.returncode}: {result.stderr[-300:]}"
    if len(errors) > 1 and words[0] != "check":
        return f"{len(errors)} errors: {errors[:3]}"
    if "not enough memory" in result.stderr:
        return f"it runs out of memory: {result.stderr[-200:]}"
    if any(len(line) > MOST_CHARACTERS for line in result.stderr.splitlines()):
        return f"a line of {max(map(len, result.stderr.splitlines()))} characters: {result.stderr[:300]}"
    if errors and any(name.startswith("out.") for name in left):
        return f"an output in spite of {errors}"
    if result.returncode and not result.stderr.strip() and not result.stdout.strip():
        return f"status {result.returncode} without a word"
    if result.returncode == 0 and "--json" in words:
        try:
            json.loads(result.stdout, parse_constant=_refuse)
        except ValueError as error:
            return f"no JSON on standard output: {error}: {result.stdout[:100]!r}"
    return None


def _refuse(name: str) -> Any:
    raise ValueError(name)


class TooLongError(BaseException):
    """An input took longer than it may."""


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    kind, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        seeds = write_seeds(Path(folder))
        for number, wrong in inputs(kind, seeds, first, count):
            print(json.dumps([number, wrong]), flush=True)


if __name__ == "__main__":
    main()
