"""Hands changed inputs of a kind to what reads them, one after the other, and judges what comes back.

`python -m tests.fuzz.campaign FOLDER` reads lines `[KIND, FIRST, COUNT]` of JSON and answers each input with a line before it
runs and one with what became of it; whoever starts it ends it where a number stands for too long.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import growth_kinds, model_kinds, option_kinds, planning_kinds, run_kinds, source_kinds, training_kinds
from tests.fuzz.folder import SeedFolder
from tests.fuzz.judgement import judged
from tests.fuzz.kind import Input, Kind

KINDS: dict[str, Kind] = {
    **planning_kinds.KINDS,
    **run_kinds.KINDS,
    **model_kinds.KINDS,
    **source_kinds.KINDS,
    **growth_kinds.KINDS,
    **training_kinds.KINDS,
    **option_kinds.KINDS,
}


Found = tuple[int, str | None, str, str | None]
"""Number, "answered", "refused" or "found", the input in words, and what is wrong with it."""


def inputs(kind: str, seeds: SeedFolder, first: int, count: int) -> Iterator[Found]:
    """Yield each input before it runs, without what became of it, and again afterwards.

    The inputs follow from their kind and numbers.
    """
    for number in range(first, first + count):
        one = KINDS[kind].draw(random.Random(f"{kind} {number}"), seeds.contents)
        yield number, None, one.name, None
        yield number, *_became(one, seeds)


def _became(one: Input, seeds: SeedFolder) -> tuple[str, str, str | None]:
    became, wrong = judged(one, seeds)
    return became, one.name, wrong


def main() -> None:
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    seeds = SeedFolder(Path(sys.argv[1]))
    for line in sys.stdin:
        kind, first, count = json.loads(line)
        for one in inputs(kind, seeds, first, count):
            print(json.dumps(one), flush=True)
        print("null", flush=True)


if __name__ == "__main__":
    main()
