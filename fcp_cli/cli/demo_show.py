"""The parts of `fcp demo`, and the text between them.

Plans and the picture need no extra. Paced ranks need PyTorch, training needs transformers, and the page needs
vl-convert-python. For a part with missing libraries, the install command is printed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fcp_cli.cli.paced import (
    RANKS_PER_NODE,
    PacedWork,
    library_table,
    metrics_of,
    run,
    typical_step,
    without_settings,
    write_plans,
)
from fcp_cli.errors import RunError, UsageError
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.step import StepPlan
from fcp_cli.util.files import shipped, write_text_atomically
from fcp_cli.util.inputs import decode_json, read_object
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.processes import torchrun_argv

RANKS, STEPS = 16, 3
TRAINED_RANKS = 2
TOLERANCE, LOSS_TOLERANCE = 1e-12, 1e-4
_STATIC, _FCP = "static", "fcp"
_MARK = ".fcp-demo"  # marks a demo folder
_WIDEST = 100
_BUSY = 1.15  # measured / predicted; above it, the machine had other load
_MODULES = {
    "torch": ("torch", "scipy"),
    "finetune": ("transformers", "accelerate", "datasets"),
    "report": ("vl_convert",),
}
_SKIPPED = {
    "torch": "the same steps in wall time, the proof of the gradients, and a training script",
    "finetune": "a training script with and without fcp",
    "report": "the page",
}

_SHOWN = (
    "The gain is wall time: an unmodified script trains the same batches in less of it, and the ranks of part 2 are "
    "processes that change rings with every micro-batch and wait for each other's messages.",
    "Training stays the same: losses are those of the script alone, and gradients those of one process.",
)
_NOT_SHOWN = (
    "No GPU computed anything: part 2 slept 1.5 times the seconds that data sheets give for Qwen3-8B on H200s.",
    "Messages went over gloo. No ring has run over NCCL or HCCL yet; run fcp selftest on the first such node.",
    "The gain is of these lengths on these ranks. For yours: fcp compare LENGTHS --model qwen3-8b --cluster h200-8x8",
)


@dataclass(kw_only=True)
class Demo:
    """A run of the demo.

    Attributes:
        folder: folder for its files.
        console: output console.
        figures: results for `--json`.
    """

    folder: Path
    console: Console
    figures: dict[str, Any] = field(default_factory=dict)

    def show(self) -> None:
        """Run all parts whose libraries are installed."""
        began = time.monotonic()
        prepare(self.folder)
        missing = [extra for extra, modules in _MODULES.items() if not all(map(find_spec, modules))]
        self.figures |= {"folder": str(self.folder), "missing": missing}
        self._say(f"Flexible Context Parallelism in a few minutes. Its files are in {self.folder}/.")
        plans = self._plan()
        if "torch" not in missing:
            self._pace(plans)
            self._prove(plans[_FCP])
            if "finetune" not in missing:
                self._train()
        if "report" not in missing:
            self._write_page(plans[_FCP])
        self._close(missing)
        self.figures["seconds"] = time.monotonic() - began
        self._say(f"\nAll of it took {self.figures['seconds']:.0f} s.")

    @property
    def passed(self) -> bool:
        """Whether gradients match a single process, and losses the script alone, within the tolerances."""
        most = {"gradient_difference": TOLERANCE, "loss_difference": LOSS_TOLERANCE}
        return all(float(self.figures.get(name, 0.0)) <= tolerance for name, tolerance in most.items())

    def _plan(self) -> dict[str, Path]:
        """Plan with the best static degree and with fcp, and draw a step of each; return the plans by strategy."""
        table = library_table()
        # Slowdown 1.5, without the longest files: steps take seconds and hops milliseconds.
        work = PacedWork(table=table, steps=STEPS, tokens_per_rank=4096, max_length=32_768, slower=1.5)
        plans = write_plans(self.folder, work, num_ranks=RANKS, strategies=(_STATIC, _FCP))
        static, ours = (list(PlanReader(plans[name]).steps()) for name in (_STATIC, _FCP))
        seconds = [[step.makespan_seconds for step in steps] for steps in (static, ours)]
        at = typical_step(*seconds)
        self.figures["predicted_speedup"] = sum(seconds[0]) / sum(seconds[1])
        self._title("1. One step, before and after")
        self._say(
            f"{len(table):,} files of Python's standard library, a token per byte, train Qwen3-8B on {RANKS} H200s in "
            f"nodes of {RANKS_PER_NODE}. Each row is a rank: a number is the degree of a ring, the line behind it its "
            "time, and dots are waiting."
        )
        degree = int(static[at].degrees.max())
        steps = {f"static, degree {degree} for all, as the longest needs it": static[at], "fcp": ours[at]}
        longest = max(step.makespan_seconds for step in steps.values())
        for title, step in steps.items():
            self._say(f"\n{title}: {step.makespan_seconds:.1f} s")
            for row in step_picture(
                step, RANKS, columns=self._width, seconds=longest, ascii_only=self.console.options.ascii_only
            ):
                self.console.print(row, no_wrap=True)
        return plans

    def _pace(self, plans: dict[str, Path]) -> None:
        """Run both plans on paced ranks, and compare the times."""
        self._title("2. The same steps in wall time")
        self._say(
            f"{RANKS} processes follow both plans: they sleep instead of computing; rings, messages and waiting are "
            "real. It takes about half a minute."
        )
        outcomes = run(plans, num_ranks=RANKS)
        static, ours = outcomes[_STATIC], outcomes[_FCP]
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in ("mean step", "predicted", "measured"):
            table.add_column(heading, justify="left" if heading == "mean step" else "right")
        for name, one in outcomes.items():
            table.add_row(name, f"{one.predicted_seconds:.2f} s", f"{one.measured_seconds:.2f} s")
        predicted = static.predicted_seconds / ours.predicted_seconds
        measured = static.measured_seconds / ours.measured_seconds
        table.add_row("fcp is quicker by", f"{predicted:.2f}x", f"{measured:.2f}x", style="bold")
        self.console.print(table)
        self.figures |= {"predicted_speedup": predicted, "measured_speedup": measured}
        if max(one.measured_seconds / one.predicted_seconds for one in outcomes.values()) > _BUSY:
            self._say(
                "This machine was busy: the processes waited for a core, too. On two free cores both columns agree."
            )

    def _prove(self, plan: Path) -> None:
        """Compare the gradients of the paced plan with a single process."""
        self._title("3. The same gradients")
        self._say("The plan of part 2 on a small model in fp64, lengths scaled down, against one process:")
        words = ("verify", "--plan", plan.name, "--steps", str(STEPS))
        self._command(f"fcp {' '.join(words)}")
        document = decode_json(run_fcp(self.folder, *words, "--json"))
        difference = max(float(step["gradient_difference"]) for step in document["steps"])
        self._say(f"Largest difference of a gradient from one process: {difference:.1e} (allowed: {TOLERANCE:.0e}).")
        self.figures["gradient_difference"] = difference

    def _train(self) -> None:
        """Train an unmodified script alone and under a plan."""
        self._title("4. The same training")
        self._say(
            f"train.py uses transformers' Trainer and knows nothing of fcp: a small Qwen3 learns functions of the "
            f"library on {TRAINED_RANKS} CPU ranks, each computing for real. It takes about a minute."
        )
        shutil.copyfile(shipped("examples") / "hugging_face" / "code_model.py", self.folder / "train.py")
        self._command(f"torchrun --nproc-per-node {TRAINED_RANKS} train.py alone.json")
        run_quietly(self.folder, *torchrun_argv(TRAINED_RANKS), "train.py", "alone.json")
        words = ("launch", "--ranks", str(TRAINED_RANKS), "--run-dir", "run", "--", "train.py", "planned.json")
        self._command(f"fcp {' '.join(words)}")
        run_fcp(self.folder, *words)
        alone, ours = (read_object(self.folder / f"{name}.json", error=RunError) for name in ("alone", "planned"))
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for heading in ("", "training", "first loss", "last loss", "evaluation"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, one in (("torchrun, padded batches", alone), ("fcp launch", ours)):
            losses = (*one["losses"][:: len(one["losses"]) - 1], one["eval_loss"])
            table.add_row(name, f"{one['seconds']:.1f} s", *(f"{loss:.5f}" for loss in losses))
        speedup = alone["seconds"] / ours["seconds"]
        table.add_row("fcp is quicker by", f"{speedup:.2f}x", style="bold")
        self.console.print(table)
        pairs = zip((*alone["losses"], alone["eval_loss"]), (*ours["losses"], ours["eval_loss"]), strict=True)
        difference = max(abs(one - other) / abs(one) for one, other in pairs)
        self._say(f"Largest relative difference of a loss: {difference:.0e} (allowed in fp32: {LOSS_TOLERANCE:.0e}).")
        self.figures |= {"training_speedup": speedup, "loss_difference": difference}

    def _write_page(self, plan: Path) -> None:
        metrics = metrics_of(plan)
        measured = ("--metrics", metrics.name) if metrics.exists() else ()
        run_fcp(self.folder, "report", plan.name, *measured, "-o", "report.html")
        self.figures["page"] = str(self.folder / "report.html")
        self._title("The page")
        self._say(f"{self.figures['page']}: plan and run for any browser, planned next to measured times.")

    def _close(self, missing: list[str]) -> None:
        if "torch" in missing:
            self._say(f"\nPredicted by the cost model: fcp is {self.figures['predicted_speedup']:.2f}x as fast.")
        else:
            self._title("Shown")
            self._list(_SHOWN)
            self._title("Not shown")
            self._list(_NOT_SHOWN)
        if missing:
            self._title("Skipped, since its libraries are not installed here")
            self._list(f"{_SKIPPED[extra]}: {pip_install(extra)}" for extra in missing)

    @property
    def _width(self) -> int:
        return min(self.console.width, _WIDEST)

    def _title(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/]")

    def _say(self, text: str) -> None:
        for line in text.split("\n"):
            self._print(textwrap.fill(line, self._width))

    def _list(self, items: Iterable[str]) -> None:
        for item in items:
            self._print(textwrap.fill(item, self._width, initial_indent="- ", subsequent_indent="  "))

    def _command(self, words: str) -> None:
        """Print a command in a form that can be typed, over several lines if it is long."""
        lines = textwrap.wrap(words, self._width - 4, break_long_words=False, break_on_hyphens=False)
        self._print("$ " + " \\\n    ".join(lines), style="dim")

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)


def prepare(folder: Path) -> None:
    """Create the demo folder, or empty an earlier demo's folder."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise UsageError(f"--output {folder} holds other files; name a folder for the demo alone")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder} is a file; name a folder for the demo alone")
    if folder.is_dir():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_text_atomically(folder / _MARK, "made by fcp demo, which replaces this folder\n")


def run_fcp(folder: Path, *words: str) -> str:
    """Run `fcp` quietly in a folder, without settings of fcp.yaml; return its standard output."""
    return run_quietly(folder, sys.executable, "-m", "fcp_cli", "--no-config", "-q", *words)


def run_quietly(folder: Path, *command: str) -> str:
    """Run a command in a folder, without FCP_ settings; return its standard output."""
    environment = without_settings(os.environ)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"{shlex.join(command[2:])} ended with status {done.returncode}, in {folder}: {done.stderr.strip()[-2000:]}"
        )
    return done.stdout


_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")  # by ascending degree, repeated


def step_picture(
    step: StepPlan, num_ranks: int, *, columns: int, seconds: float, ascii_only: bool = False
) -> Iterator[Text]:
    """Yield a line per rank: a bar per micro-batch, which begins with its degree, and dots while idle.

    Args:
        step: the step to draw.
        num_ranks: number of ranks of the plan.
        columns: width of a line, including 3 for the rank number.
        seconds: time span of the other columns; pictures with equal spans have the same scale.
        ascii_only: draw only with - and .
    """
    line, dot = ("-", ".") if ascii_only else ("━", "·")
    scale = (columns - 3) / seconds
    colours = {int(degree): _COLOURS[i % len(_COLOURS)] for i, degree in enumerate(np.unique(step.degrees))}
    end = round(step.makespan_seconds * scale)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]  # start, end and degree
    for microbatch in step.microbatches():
        if not microbatch.is_idle:
            begin = round(microbatch.start_seconds * scale)
            until = round((microbatch.start_seconds + microbatch.seconds) * scale)
            for rank in microbatch.ranks:
                rows[rank].append((begin, until, microbatch.degree))
    for rank, strokes in enumerate(rows):
        row, at = Text(f"{rank:2} ", style="dim"), 0
        for begin, until, degree in sorted(strokes):
            row.append(dot * (begin - at), style="dim")
            row.append(f"{degree}".ljust(until - begin, line)[: until - begin], style=colours[degree])
            at = until
        row.append(dot * (end - at), style="dim")
        yield row
