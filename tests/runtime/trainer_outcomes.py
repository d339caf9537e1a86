"""What the workers of trainers left, and how far a script under a plan is from the same script without."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from fcp_cli.plan.file import PlanReader
from tests.runs.records import read_metrics
from tests.runtime.launch import torchrun
from tests.runtime.trainer_plans import GLOBAL_BATCH, LOOP_LENGTHS, write_plans

_FP32 = 2e-6
BF16_LOSS = 2**-7  # FSDP2 in bf16 also rounds the loss


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What each rank of a worker's job found, by phase (`plain` or `planned`) and case; `folder` has the plans."""

    folder: Path
    num_ranks: int = 2

    def __call__(self, phase: str, name: str) -> list[Any]:
        own = self.folder / phase / name
        found = [pickle.loads((own / f"{rank}.pickle").read_bytes()) for rank in range(self.num_ranks)]
        # The first half of such a loop is left in its midst, in the same process.
        if phase == "planned" and not isinstance(found[0], str) and name not in ("resumed loop", "stopped loop"):
            most = BF16_LOSS if name.startswith("fsdp, bf16") else 2e-3
            _require_measured(own, [entry for entry in found[0]["log"] if "grad_norm" in entry], self.num_ranks, most)
        return found


def run_scripts(folder: Path, worker: str, *words: str) -> Outcomes:
    """Run a worker of `tests/runtime/workers` on two ranks, its scripts alone and under the plans."""
    write_plans(folder)
    (folder / "planning.json").write_text("{}")
    torchrun("-m", f"tests.runtime.workers.{worker}", str(folder), *words, num_ranks=2)
    return Outcomes(folder)


def outcomes_of(worker: str, *words: str) -> Any:
    """A fixture of a module: the outcomes of a worker's cases."""

    @pytest.fixture(scope="module")
    def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
        return run_scripts(tmp_path_factory.mktemp(worker), worker, *words)

    return outcomes


def _require_measured(folder: Path, entries: list[dict[str, float]], num_ranks: int, most: float) -> None:
    """The run's metrics have the steps that the script logged, with the losses it knew, and what every rank ran."""
    steps = [one for one in read_metrics(folder / "metrics.jsonl") if one["kind"] == "step"][-len(entries) :]
    assert len(steps) == len(entries)
    for step, entry in zip(steps, entries, strict=True):
        assert step["loss"] == pytest.approx(entry.get("loss", step["loss"]), rel=most)
        assert len(step["ranks"]) == num_ranks and all(rank["micro_batches"] for rank in step["ranks"])


def differences(plain: dict[str, Any], planned: dict[str, Any]) -> dict[str, float]:
    """The largest relative difference of losses and gradient norms, and absolute one of weights."""
    found = {}
    for key in ("loss", "grad_norm", "eval_loss"):
        pairs = [(one[key], other[key]) for one, other in zip(plain["log"], planned["log"], strict=True) if key in one]
        found[key] = max((abs(other - one) / abs(one) for one, other in pairs), default=0.0)
    assert plain["weights"].keys() == planned["weights"].keys()
    found["weights"] = max(
        float((planned["weights"][name] - value).abs().max()) for name, value in plain["weights"].items()
    )
    return found


def require_equal(outcomes: Outcomes, name: str, *, most: float = _FP32, steps: int = 3) -> None:
    plain, planned = outcomes("plain", name), outcomes("planned", name)
    for rank in range(len(planned)):
        assert not isinstance(planned[rank], str), planned[rank]
        assert sum("grad_norm" in entry for entry in planned[rank]["log"]) == steps
        found = differences(plain[rank], planned[rank])
        assert max(found.values()) <= most, (name, rank, found)
    for weight, value in planned[0]["weights"].items():
        assert torch.equal(value, planned[1]["weights"][weight]), weight


def require_refused(outcomes: Outcomes, name: str, message: str, *, begins: bool = False) -> None:
    """Require one line with this message on every rank, or one that begins with it."""
    for found in outcomes("planned", name):
        assert found.startswith(message) if begins else message in found, (name, found)
        assert "\n" not in found


def require_repeated(outcomes: Outcomes, case: str) -> None:
    """Require the run under the plan that `unplanned CASE` made to repeat its losses and weights bit for bit."""
    made, repeated = (outcomes("planned", f"{how} {case}".strip())[0] for how in ("unplanned", "repeated"))
    assert [entry.get("loss") for entry in made["log"]] == [entry.get("loss") for entry in repeated["log"]]
    for weight, value in made["weights"].items():
        assert torch.equal(value, repeated["weights"][weight]), weight


def require_repeatable(plan: str, outcomes: Outcomes, loop: str) -> None:
    """Require a loop's own plan to be of its lengths and epochs, and the loop under that plan to repeat itself."""
    path = outcomes.folder / plan
    lengths = pq.read_table(path.with_suffix(".lengths.parquet"))["length"]
    metadata = PlanReader(path).metadata
    assert tuple(lengths.to_pylist()) == LOOP_LENGTHS
    assert (metadata.global_batch_size, metadata.steps, metadata.epochs) == (GLOBAL_BATCH, 6, 2)
    require_repeated(outcomes, loop)
