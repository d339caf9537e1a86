"""axolotl's SFT, and DPO of LLaMA-Factory and ms-swift, unmodified: losses, norms and weights of their commands alone.

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
from tests.runtime.loops.frameworks import EVALUATED, FRAMEWORKS, LORA, Framework, write_pairs, write_plugin

pytestmark = pytest.mark.loops


@dataclass(frozen=True, slots=True)
class Job:
    """A framework, and the folder of its model, its data and its plan."""

    framework: Framework
    folder: Path

    def alone(self, name: str, **changes: Any) -> None:
        alone("-m", self.framework.started, *self.framework.words(self.folder, name, **changes), folder=self.folder)

    def typed(self, name: str, **changes: Any) -> tuple[str, ...]:
        return (*self.framework.typed, *self.framework.words(self.folder, name, **changes))

    def assert_equal(self, found: str, expected: str, most: float = 2e-6) -> None:
        one, other = (read_checkpoint(self.folder / name / "checkpoint-3") for name in (found, expected))
        assert max(differences(one, other).values()) <= most
        for name in self.framework.logged:
            assert one.logged(name) == pytest.approx(other.logged(name), rel=1e-4, abs=1e-6)


def _require(name: str) -> Framework:
    framework = FRAMEWORKS[name]
    if importlib.util.find_spec(framework.package) is None:
        pytest.skip(f"{name} is not installed (make test-frameworks)")
    return framework


@pytest.fixture(scope="module", params=["axolotl"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The model, conversations, and a plan in which the longer ones need both ranks."""
    framework = _require(request.param)
    folder = tmp_path_factory.mktemp("framework")
    write_model(folder / "model")
    (folder / "rows").mkdir()
    write_conversations(folder / "rows" / "train.jsonl")
    write_plugin(folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in framework.variables.items():
            patch.setenv(name, value)
        write_plan(folder, *framework.source)
        yield Job(framework, folder)


def test_full_fine_tuning_with_evaluation_is_that_of_the_framework_alone_and_its_packing_is_replaced(job: Job) -> None:
    job.alone("alone", **EVALUATED)
    written = planned(*job.typed("full", sample_packing=True, **EVALUATED), folder=job.folder)
    assert "fcp: axolotl's sample_packing is off: the plan packs, and batch sizes count sequences" in written
    assert "; AxolotlTrainer, rows in the plan's order" in written
    job.assert_equal("full", "alone")
    # It evaluates before training, too.
    assert len(read_checkpoint(job.folder / "full" / "checkpoint-3").logged("eval_loss")) == 4
    fcp("report", "run", "-o", "report.html", folder=job.folder)
    assert (job.folder / "report.html").stat().st_size > 10_000


def test_lora_is_that_of_the_framework_alone(job: Job) -> None:
    job.alone("lora-alone", **LORA)
    planned(*job.typed("lora", **LORA), folder=job.folder)
    job.assert_equal("lora", "lora-alone")


def test_ctrl_c_ends_the_step_and_the_last_line_continues(job: Job) -> None:
    folder = job.folder
    status, written = interrupted(*job.typed("stopped"), folder=folder, after=folder / "stopped" / "checkpoint-1")
    assert status == 130, written[-3000:]
    last = written.strip().splitlines()[-1]
    found = re.fullmatch(
        r"error: interrupted; (\d) steps saved in stopped/checkpoint-\1, continue with: fcp launch --plan "
        r"stopped-run/plan.parquet --run-dir stopped-run -- -m axolotl.cli.train stopped.yaml",
        last,
    )
    assert found is not None, last
    assert (folder / "stopped" / f"checkpoint-{found[1]}" / "trainer_state.json").exists()


@pytest.mark.parametrize("name", ["llama_factory", "ms_swift"])
def test_preferences_are_those_of_the_framework_alone(name: str, tmp_path: Path) -> None:
    framework = _require(name)
    write_model(tmp_path / "model")
    write_pairs(tmp_path)
    write_plan(tmp_path, *framework.source, tokens=400)
    job = Job(framework, tmp_path)
    job.alone("alone")
    assert f"; {framework.trainer}, rows in the plan's order" in planned(*job.typed("full"), folder=tmp_path)
    job.assert_equal("full", "alone", most=5e-6)
