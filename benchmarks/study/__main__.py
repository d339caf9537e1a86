"""The FCP and DHP papers' study by simulation: `python -m benchmarks.study`, a page and its pictures.

Six text and six vision models, three data sets each, encoder trained and frozen, on both papers' clusters; plans that
know the encoder; 8 to 4,096 ranks; one long sequence among short ones. Modelled throughout: nothing is measured but the
planner's own time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import picture
from benchmarks.study.page import fill
from benchmarks.study.parts import QUICK, Scope, Study, run_study
from benchmarks.study.pictures import specs

_DOCS = Path(__file__).parents[2] / "docs"
_PAGE = Path("research", "study.md")


def write(study: Study, folder: Path) -> None:
    """The page and its pictures, in a folder; the words are those of `docs/research/study.md`."""
    page = fill((_DOCS / _PAGE).read_text(encoding="utf-8"), study)
    drawn = {name: picture.svg(spec) for name, spec in specs(study).items()}
    for file in (folder / _PAGE, folder / "pictures" / "any"):
        file.parent.mkdir(parents=True, exist_ok=True)
    (folder / _PAGE).write_text(page, encoding="utf-8")
    for name, text in drawn.items():
        (folder / "pictures" / name).write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of everything; needs --to")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the page goes (docs)")
    parser.add_argument("--steps", type=int, help=f"averaged in every cell ({Scope().steps})")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (as many as cores)")
    options = parser.parse_args(arguments)
    if options.quick and options.to is None:
        parser.error("--quick leaves most of the study out: say where its page goes with --to FOLDER")
    scope = replace(QUICK if options.quick else Scope(), workers=options.workers)
    if options.steps is not None:
        if options.steps < 1:
            parser.error(f"--steps {options.steps}: at least one step is planned")
        scope = replace(scope, steps=options.steps)
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - started:5.0f} s  {what}", file=sys.stderr, flush=True)

    folder = options.to or _DOCS
    write(run_study(scope, say), folder)
    say(f"wrote {folder / _PAGE} and its pictures")


if __name__ == "__main__":
    main()
