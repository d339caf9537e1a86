"""Plans made by several processes, interrupted and resumed: always the plan that one undisturbed process makes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fcp_cli.errors import FcpError, Interrupted
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import steps_from_arrow, steps_to_arrow
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning import journal
from fcp_cli.planning import make_plan as making
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.journal import PlanJournal
from fcp_cli.planning.make_plan import PlanResult, make_plan
from fcp_cli.planning.problem import Batch, Problem, Solver
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.util.records import read_records, table_content, table_of_content, write_record
from tests.planning.examples import example_problem


def make(
    path: Path, *, seed: int = 0, stop_after: int | None = None, workers: int = 1, resume: bool = False
) -> PlanResult:
    """A plan of 32 steps of 32 sequences; Ctrl-C arrives after `stop_after` steps."""
    drawn = np.random.default_rng(1).lognormal(7.0, 1.2, 1024).clip(1, 60_000).astype(np.int64)

    def on_step(step: StepPlan) -> None:
        if step.step + 1 == stop_after:
            raise KeyboardInterrupt

    return make_plan(
        path,
        PlanInputs(
            table=LengthTable(name="lengths", length_tokens=drawn),
            problem=example_problem(num_ranks=8, tokens_per_rank=8192),
            settings=BatchSettings(global_batch_size=32, seed=seed),
        ),
        on_step=on_step,
        workers=workers,
        resume=resume,
    )


@pytest.fixture
def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a journal of every plan, in windows of a few steps."""
    monkeypatch.setattr(making, "_JOURNAL_FROM_STEPS", 1)
    monkeypatch.setattr(journal, "_ROWS_PER_WINDOW", 50)


@pytest.fixture
def interrupted(small_journal: None, tmp_path: Path) -> Path:
    """Where a plan was to be, of which a journal holds most of 24 steps."""
    path = tmp_path / "plan.parquet"
    with pytest.raises(
        Interrupted, match=r"interrupted after step 2\d of 32; no plan was written; continue with --resume"
    ):
        make(path, stop_after=24)
    return path


@pytest.mark.processes
def test_two_processes_make_the_plan_that_one_makes(tmp_path: Path) -> None:
    alone = make(tmp_path / "one.parquet")
    together = make(tmp_path / "two.parquet", workers=2)
    assert together.metadata.plan_hash == alone.metadata.plan_hash
    assert together.summary.makespan_seconds == alone.summary.makespan_seconds


def test_a_plan_interrupted_twice_leaves_no_file_and_goes_on_to_the_same_plan(interrupted: Path) -> None:
    with pytest.raises(Interrupted):
        make(interrupted, stop_after=28, resume=True)
    assert not interrupted.exists()
    resumed = make(interrupted, resume=True)
    other = interrupted.with_name("other.parquet")
    assert resumed.metadata.plan_hash == make(other).metadata.plan_hash
    assert sorted(interrupted.parent.iterdir()) == [other, interrupted]


@pytest.mark.usefixtures("small_journal")
def test_a_plan_interrupted_as_its_first_steps_reach_the_disk_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: Callable[..., None] = PlanJournal._append

    def interrupted_behind(self: PlanJournal, *tables: pa.Table) -> None:
        kept(self, *tables)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PlanJournal, "_append", interrupted_behind)
        with pytest.raises(Interrupted, match=r"continue with --resume$"):
            make(tmp_path / "plan.parquet")
    resumed = make(tmp_path / "plan.parquet", resume=True)
    assert resumed.metadata.plan_hash == make(tmp_path / "other.parquet").metadata.plan_hash


def test_resuming_takes_kept_steps_from_the_journal(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    all_steps = making.plan_steps

    def counting(
        batches: Iterator[Batch], problem: Problem, solver: Solver, *, workers: int
    ) -> Generator[StepPlan, None, None]:
        for step in all_steps(batches, problem, solver, workers=workers):
            planned.append(step.step)
            yield step

    monkeypatch.setattr(making, "plan_steps", counting)
    make(interrupted, resume=True)
    assert 0 < planned[0] <= 24
    assert planned == list(range(planned[0], 32))


def test_a_journal_of_other_inputs_or_that_is_damaged_is_refused(interrupted: Path) -> None:
    with pytest.raises(FcpError, match="begun with another manifest, cost profile or options"):
        make(interrupted, seed=1, resume=True)
    (interrupted.parent / ".plan.parquet.journal" / "000000.steps").write_bytes(9 * b"and then nothing")
    with pytest.raises(FcpError, match=r"000000\.steps is damaged: its record 1 is damaged; run without"):
        make(interrupted, resume=True)


def test_a_window_that_a_kill_cut_off_is_planned_again(interrupted: Path) -> None:
    part = interrupted.parent / ".plan.parquet.journal" / "000000.steps"
    part.write_bytes(part.read_bytes()[:-100])
    resumed = make(interrupted, resume=True)
    assert resumed.metadata.plan_hash == make(interrupted.with_name("other.parquet")).metadata.plan_hash


def forge(folder: Path, change: Callable[[StepPlan], StepPlan]) -> None:
    """Change the first step that a journal holds, and give it the digest of the result."""
    part = folder / "000000.steps"
    begins, window, *windows = read_records(part)
    first, *others = steps_from_arrow(table_of_content(window))
    with part.open("wb") as file:
        for content in (begins, table_content(steps_to_arrow([change(first), *others])), *windows):
            write_record(file, content)


def without_first_pack(step: StepPlan) -> StepPlan:
    """The step whose first micro-batch trains the second sequence of the batch in place of its first."""
    sequences = step.sequences.copy()
    sequences[0] = sequences[1]
    return replace(step, sequences=sequences)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step: replace(step, seconds=2 * step.seconds), r"step 0: order 0: .* s, but its cost profile gives"),
        (lambda step: replace(step, bound_seconds=2 * step.makespan_seconds), "step 0: its lower bound of"),
        (lambda step: replace(step, lengths=step.lengths + 1), "step 0 does not hold the sequences of its batch"),
        (without_first_pack, "step 0 does not hold the sequences of its batch"),
    ],
)
def test_a_kept_step_that_its_batch_cannot_have_is_refused_before_anything_is_written(
    interrupted: Path, change: Callable[[StepPlan], StepPlan], message: str
) -> None:
    forge(interrupted.parent / ".plan.parquet.journal", change)
    with pytest.raises(FcpError, match=rf"cannot resume: .*journal is damaged: {message}.*; run without --resume"):
        make(interrupted, resume=True)
    assert [entry.name for entry in interrupted.parent.iterdir()] == [".plan.parquet.journal"]


def test_resuming_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FcpError, match="nothing to resume"):
        make(tmp_path / "plan.parquet", resume=True)


def test_a_short_interrupted_plan_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"interrupted after step 3 of 32; no plan was written$"):
        make(tmp_path / "plan.parquet", stop_after=3)
    assert list(tmp_path.iterdir()) == []
