"""Fine-tuning and DPO of frameworks, unmodified: losses, norms and weights of their commands alone.

Each needs an environment of its own (`make test-frameworks`); those that the environment lacks are skipped.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.loops.framework_jobs import (
    RANKS,
    alone,
    differences,
    fcp,
    interrupted,
    planned,
    read_checkpoint,
    write_conversations,
    write_model,
    write_plan,
)
from tests.runtime.loops.frameworks import (
    FINE_TUNING,
    PREFERENCES,
    Framework,
    write_dataset_info,
    write_pairs,
    write_plugin,
)

pytestmark = pytest.mark.loops


@dataclass(frozen=True, slots=True)
class Job:
    """A framework, and the folder of its model, its data and its plan."""

    framework: Framework
    folder: Path

    def alone(self, name: str, *, ranks: int = RANKS, **changes: Any) -> None:
        words = self.framework.words(self.folder, name, **changes)
        alone("-m", self.framework.started, *words, folder=self.folder, ranks=ranks)

    def typed(self, name: str, **changes: Any) -> tuple[str, ...]:
        return (*self.framework.typed, *self.framework.words(self.folder, name, **changes))

    def planned(self, name: str, options: tuple[str, ...] = (), **changes: Any) -> str:
        written = planned(*self.typed(name, **changes), folder=self.folder, options=options)
        assert f"{self.framework.trainer}, rows in the plan's order" in written
        return written

    def assert_equal(self, found: str, expected: str, most: float = 2e-6, *, is_resumed: bool = False) -> None:
        one, other = (read_checkpoint(self.folder / name / "checkpoint-3") for name in (found, expected))
        assert max(differences(one, other).values()) <= most
        logged = {} if is_resumed else self.framework.logged  # TRL counts tokens anew
        for name, close in logged.items():
            assert one.logged(name) == pytest.approx(other.logged(name), rel=close, abs=close / 100)


def job_in(folder: Path, framework: Framework) -> Job:
    """The framework's model in a folder, and what it is told of data there."""
    if importlib.util.find_spec(framework.package) is None:
        pytest.skip(f"{framework.package} is not installed (make test-frameworks)")
    write_model(folder / "model")
    write_plugin(folder)
    write_dataset_info(folder)
    return Job(framework, folder)


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The model, conversations, and a plan in which the longer ones need both ranks."""
    framework = FINE_TUNING[request.param]
    made = job_in(tmp_path_factory.mktemp("framework"), framework)
    (made.folder / "rows").mkdir()
    write_conversations(made.folder / "rows" / "train.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in framework.variables.items():
            patch.setenv(name, value)
        if framework.prepared:
            made.alone("tokens", ranks=1, **framework.prepared)
        write_plan(made.folder, *framework.source)
        yield made


@pytest.mark.parametrize("job", FINE_TUNING, indirect=True)
def test_full_fine_tuning_with_evaluation_is_that_of_the_framework_alone_and_its_packing_is_replaced(job: Job) -> None:
    (evaluated, evaluations), (packed, line) = job.framework.evaluated, job.framework.packed
    job.alone("alone", **evaluated)
    assert f"fcp: {line}" in job.planned("full", ("--accept-other-batches",), **{packed: True}, **evaluated)
    job.assert_equal("full", "alone")
    assert len(read_checkpoint(job.folder / "full" / "checkpoint-3").logged("eval_loss")) == evaluations
    fcp("report", "run", "-o", "report.html", folder=job.folder)
    assert (job.folder / "report.html").stat().st_size > 10_000
    if job.framework.resumes:
        assert "from step 2 of 3" in job.planned("resumed", resume_from_checkpoint="full/checkpoint-2", **evaluated)
        job.assert_equal("resumed", "alone", is_resumed=True)


@pytest.mark.parametrize("job", [name for name, one in FINE_TUNING.items() if one.lora], indirect=True)
def test_lora_is_that_of_the_framework_alone(job: Job) -> None:
    job.alone("lora-alone", **job.framework.lora)
    job.planned("lora", **job.framework.lora)
    job.assert_equal("lora", "lora-alone")


@pytest.mark.parametrize("job", ["axolotl", "llama_factory"], indirect=True)
def test_ctrl_c_ends_the_step_and_the_last_line_continues(job: Job) -> None:
    folder = job.folder
    status, written = interrupted(*job.typed("stopped"), folder=folder, after=folder / "stopped" / "checkpoint-1")
    assert status == 130, written[-3000:]
    last = written.strip().splitlines()[-1]
    found = re.fullmatch(
        r"error: interrupted; (\d) steps saved in stopped/checkpoint-\1, continue with: fcp launch --plan "
        rf"stopped-run/plan.parquet --run-dir stopped-run -- -m {re.escape(job.framework.started)} stopped.yaml",
        last,
    )
    assert found is not None, last
    assert (folder / "stopped" / f"checkpoint-{found[1]}" / "trainer_state.json").exists()


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_the_framework_alone(name: str, tmp_path: Path) -> None:
    job = job_in(tmp_path, PREFERENCES[name])
    write_pairs(tmp_path)
    job.alone("alone")
    if job.framework.source:
        write_plan(tmp_path, *job.framework.source, tokens=400)
        job.planned("full")
    else:
        started = ("launch", "--ranks", str(RANKS), "--device", "cpu", "--run-dir", "run", "--", *job.typed("full"))
        assert "fcp: no plan was given: DPOTrainer trains 24 rows" in fcp(*started, folder=tmp_path)
    job.assert_equal("full", "alone", most=5e-6)
