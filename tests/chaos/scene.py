"""One run: a job, a moment, what is seen of its end, and the resumed run."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos import checker, system
from tests.chaos.checker import Layout, Reference
from tests.chaos.jobs import Job
from tests.patience import PATIENCE_SECONDS

RUN_DIR = "R"
RANKS = 4
STEPS = 12
EVERY = 3
# Ranks that wait for one that is stopped give up after so long, and torchrun then gives it 30 seconds.
SETTINGS = (
    *("--model", "qwen3-tiny", "--learning-rate", "3e-3", "--log-every", "1", "--keep", str(STEPS)),
    *("--checkpoint-every", str(EVERY), "--rank-timeout", "20"),
)
# Exit statuses that fcp documents.
_STATUSES = (1, 129, 130, 143)
_LEAST_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What all runs share.

    Attributes:
        folder: texts, manifest and plans, which every run gets a copy of.
        reference: the undisturbed run.
        start_seconds, step_seconds, seconds: of it: to its first step, of a step, and to its end.
    """

    folder: Path
    reference: Reference
    start_seconds: float
    step_seconds: float
    seconds: float

    @classmethod
    def of(cls, job: Job, folder: Path, layouts: Callable[[], Sequence[Layout]], *, may_lose: int = 0) -> Ground:
        """Let a job go straight to its end; `layouts` are those of its plan, which it may make while it trains."""
        job.wait_for(lambda: job.steps() > 0, PATIENCE_SECONDS)
        start = time.monotonic() - job.began
        job.wait_gone(PATIENCE_SECONDS)
        seconds = time.monotonic() - job.began
        assert job.status == 0, job.lines
        reference = checker.read_reference(job.run_dir, layouts(), may_lose=may_lose)
        assert reference.steps == STEPS and reference.states
        return cls(
            folder=folder,
            reference=reference,
            start_seconds=start,
            step_seconds=(seconds - start) / STEPS,
            seconds=seconds,
        )

    @property
    def most_seconds(self) -> float:
        """From a fault to the end: a minute, or longer on a machine where an undisturbed job takes long."""
        return max(_LEAST_SECONDS, 6 * self.seconds)


@dataclass(kw_only=True)
class Scene:
    """A run in its own folder.

    Attributes:
        draw: all that is chosen comes from it.
        first_words, next_words: of `fcp launch`, for a new run and for one that goes on.
        what: what was done, in words.
        struck: when, in seconds of `time.monotonic`; None until it was.
        problems: broken invariants.
    """

    ground: Ground
    folder: Path
    mark: str
    draw: random.Random
    first_words: Sequence[str] = (*SETTINGS, "--run-dir", RUN_DIR)
    next_words: Sequence[str] = ("--resume", "--run-dir", RUN_DIR)
    what: list[str] = field(default_factory=list)
    struck: float | None = None
    seconds: float = 0.0
    resumed: bool = False
    problems: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / RUN_DIR

    def launch(self, *words: str, preexec: Callable[[], None] | None = None, run_dir: Path | None = None) -> Job:
        """Start a job of this run, which is ended with it."""
        job = Job(
            *words,
            folder=self.folder,
            run_dir=run_dir or self.run_dir,
            mark=f"{self.mark}-{len(self.jobs)}",
            preexec=preexec,
        )
        self.jobs.append(job)
        return job

    def wait_for_moment(self, job: Job, *, before_step: int = STEPS - 1) -> None:
        """Wait for a moment that is drawn: while the job starts, while it saves, or some time into a step."""
        kind = self.draw.choice(("starting", "saving", "in a step", "in a step", "in a step"))
        step, share = self.draw.randrange(1, before_step), self.draw.random()
        patience = 10 * self.ground.seconds
        if kind == "starting":
            self.what.append(f"at {share:.0%} of the start")
            time.sleep(share * self.ground.start_seconds)
        elif kind == "saving":
            step = max(EVERY, step // EVERY * EVERY)
            self.what.append(f"while it saves after step {step}")
            job.wait_for(lambda: job.steps() >= step, patience)
            job.wait_for(job.is_saving, 2 * self.ground.step_seconds)
        else:
            self.what.append(f"at {share:.0%} of step {step}")
            job.wait_for(lambda: job.steps() >= step, patience)
            time.sleep(share * self.ground.step_seconds)

    def strike(self, what: str) -> None:
        """Note that the fault is there from now on."""
        self.what.append(what)
        self.struck = time.monotonic()

    def broken(self, problem: str) -> None:
        self.problems.append(problem)

    def has_ended(self, job: Job, *, since: float | None = None) -> bool:
        """Wait until a job and all of its processes are gone; end it where that takes too long, which is broken."""
        since = job.began + self.ground.seconds if since is None else since
        left = job.wait_gone(max(1.0, since + self.ground.most_seconds - time.monotonic()))
        if not job.is_running() and not left:
            return True
        names = ", ".join(job.name_of(pid) for pid in left)
        self.broken(f"after {time.monotonic() - since:.0f} s there are still {names}; last line: {job.last_line}")
        job.tell_stacks()
        job.kill()
        return False

    def see_end(self, job: Job, *, wanted: str | None, fails: bool = True) -> None:
        """Wait until a job is gone, and judge how it ended.

        Args:
            job: struck or not.
            wanted: pattern of the last line; None: nobody is left to print it.
            fails: it must not end well.
        """
        since = self.struck or job.began
        ended = self.has_ended(job, since=since)
        self.seconds = max(self.seconds, time.monotonic() - since)
        if not ended or wanted is None:
            return
        if fails and job.status == 0 and job.newest() < STEPS:
            self.broken(f"it ended with status 0 after step {job.steps()}; last line: {job.last_line}")
        elif fails and job.status not in (0, *_STATUSES):
            self.broken(f"status {job.status}; last line: {job.last_line}")
        elif not fails and job.status != 0:
            self.broken(f"status {job.status}, although nothing was wrong with it; last line: {job.last_line}")
        if job.status and fails and not re.search(wanted, job.last_line):
            self.broken(f"the last line does not match {wanted!r}: {job.last_line}")
        self.check_printed(job)
        if job.reported_steps() > job.steps():
            self.broken(f"step {job.reported_steps()} was reported, {job.steps()} are recorded")

    def check_printed(self, job: Job) -> None:
        if any("Traceback (most" in line for line in job.lines):
            self.broken(f"a traceback; last line: {job.last_line}")

    def check_stopped(self, *, exact_steps: int | None = None) -> None:
        """Check the records of a run that has stopped somewhere."""
        self.problems += checker.problems_of(
            self.run_dir, self.ground.reference, finished=False, exact_steps=exact_steps
        )

    def see_refused(self, wanted: str, *words: str, unchanged: bool = True) -> None:
        """Launch what must be refused, with a last line of this pattern; `unchanged`: and leave the run as it is."""
        before = _content(self.run_dir)
        job = self.launch(*words)
        if not self.has_ended(job):
            return
        if job.status == 0:
            self.broken(f"{' '.join(words)} was not refused: {job.last_line}")
        elif not re.search(wanted, job.last_line):
            self.broken(f"{' '.join(words)}: the last line does not match {wanted!r}: {job.last_line}")
        if unchanged and _content(self.run_dir) != before:
            self.broken(f"{' '.join(words)} was refused and changed the run")
        self.check_printed(job)

    def resume(self, *words: str, rounding: float = 0.0, exact_steps: int | None = None) -> None:
        """Resume the run, unless it is whole, and check its records against the undisturbed run's."""
        if not self.run_is_whole:
            step = self.jobs[0].newest()
            job = self.launch(*(self.next_words if self.run_dir.exists() else self.first_words), *words)
            if self.has_ended(job) and job.status:
                self.broken(f"resuming from step {step}: status {job.status}: {job.last_line}")
        found = checker.problems_of(
            self.run_dir, self.ground.reference, finished=True, rounding=rounding, exact_steps=exact_steps
        )
        self.resumed = not found
        self.problems += found

    def see_whole_plan(self) -> None:
        """Check the plan of a job that made it while it trained; a killed planner left its journal, which completes it."""
        plan = self.run_dir / "plan.parquet"
        if not plan.is_file():
            self.what.append("its plan is completed")
            self.see_done("plan", "--resume", "-o", str(plan))
        self.see_done("check", str(plan))
        if layouts_of(plan) != self.ground.reference.layouts:
            self.broken("its plan is not the undisturbed run's")

    def see_done(self, *words: str) -> None:
        """Run a command of fcp that must succeed."""
        done = system.run_fcp(*words, folder=self.folder)
        if done.returncode:
            self.broken(f"fcp {' '.join(words)}: {done.stderr.splitlines()[-1:]}")

    @property
    def run_is_whole(self) -> bool:
        """Return whether the last checkpoint is there: it ended before it was struck, or just then."""
        return bool(self.jobs) and self.jobs[0].newest() >= STEPS


def _content(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what of a run folder a refused launch must not touch: metrics and checkpoints."""
    kept = [folder / "metrics.jsonl", folder / "plan.parquet", *folder.glob("checkpoints/**/*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in kept if path.is_file()}


def layouts_of(plan: Path) -> list[Layout]:
    """Return order, degree and tokens of every rank's micro-batches, by step; an idle row trains nothing."""
    from fcp_cli.plan.file import PlanReader

    found: list[Layout] = []
    for step in PlanReader(plan).steps():
        ranks: dict[str, list[Sequence[int]]] = {}
        for order in range(len(step.rank_offsets) - 1):
            members = step.ranks[step.rank_offsets[order] : step.rank_offsets[order + 1]].tolist()
            lengths = step.lengths[step.sequence_offsets[order] : step.sequence_offsets[order + 1]]
            for rank in members:
                ranks.setdefault(str(rank), []).append([order, len(members), int(lengths.sum())])
        found.append(ranks)
    return found
