"""Unmodified scripts of Lightning's Trainer, optimising automatically, compute under a plan what they compute without."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from tests.runtime.trainer_outcomes import Outcomes, outcomes_of, require_equal, require_refused, require_repeatable

pytestmark = pytest.mark.loops
pytest.importorskip("lightning", reason="Lightning is not installed")

outcomes = outcomes_of("lightning_fit_worker")

_REFUSALS = {
    "own loss": "backward was called on a loss that the micro-batch did not make",
    "head": "Module trains head.weight outside its Qwen3ForCausalLM, which a rank's part of a sequence would train wrong",
    "other batch": "the script trains on 4 sequences a step (batch_size 2 x accumulate_grad_batches 1 x 2 ranks), but the "
    "plan on 8; plan with 'fcp plan --global-batch-size 4', or give the script the plan's",
    "more epochs": "the script trains 6 steps (max_epochs 2), but the plan",
    "fsdp2": "the trainer's strategy is ModelParallelStrategy, with which automatic optimisation cannot follow a plan; use "
    "strategy='ddp', or a loop on Fabric (docs/how-to/training-loop.md)",
    "changing data module": "row 13 of the training data has other tokens than in the epochs before; the plan was made of",
    "limited": "limit_train_batches and overfit_batches skip rows that the plan has; remove them",
}


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("fit", 3),
        ("fit waves", 3),
        ("accumulating fit", 3),
        ("resumed fit", 2),
        ("stopped fit", 2),
        ("unplanned fit", 6),
        ("repeated fit", 6),
        ("unplanned fit of a data module", 6),
    ],
)
def test_losses_norms_rates_and_weights_are_those_of_the_script_without_a_plan(
    outcomes: Outcomes, name: str, steps: int
) -> None:
    require_equal(outcomes, name, steps=steps)
    plain, planned = (outcomes(phase, name)[0]["log"] for phase in ("plain", "planned"))
    assert [entry.get("lr") for entry in planned] == [entry.get("lr") for entry in plain]


def test_a_script_without_a_plan_follows_one_of_its_lengths_and_epochs_which_repeats_it(outcomes: Outcomes) -> None:
    require_repeatable("unplanned-loop.parquet", outcomes, "fit")


@pytest.mark.parametrize("name", _REFUSALS)
def test_what_cannot_be_followed_is_refused_on_every_rank_before_the_first_step(outcomes: Outcomes, name: str) -> None:
    require_refused(outcomes, name, _REFUSALS[name])


@pytest.mark.parametrize("kind", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_shards_is_refused_before_a_plan_is_read(kind: str) -> None:
    """Lightning makes the first two on accelerators only."""
    from lightning.pytorch import strategies

    from fcp_cli.integrations.lightning.fit import LightningFit

    strategy = object.__new__(getattr(strategies, kind))
    trainer = SimpleNamespace(strategy=strategy)
    with pytest.raises(RunError) as refused:
        LightningFit(trainer, loader=None)
    assert str(refused.value) == _REFUSALS["fsdp2"].replace("ModelParallelStrategy", kind)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("fit_loop", "_process_dataloader"),
        ("fit_loop", "_FitLoop.teardown"),
        ("optimization.automatic", "Closure"),
        ("optimization.automatic", "_AutomaticOptimization._make_closure"),
        ("optimization.automatic", "_AutomaticOptimization._training_step"),
    ],
)
def test_a_lightning_without_a_function_that_is_hooked_is_refused(
    module: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.integrations.lightning.hooks import hook_fit_loop

    owner: Any = importlib.import_module(f"lightning.pytorch.loops.{module}")
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    inherited = f"{path} takes no|has no .*{path}"  # a method taken away may leave that of a base
    monkeypatch.delattr(owner, name)
    fit_loop: ModuleType = importlib.import_module("lightning.pytorch.loops.fit_loop")
    with pytest.raises(RunError, match=inherited):
        hook_fit_loop(fit_loop)


def test_the_hooks_are_there_once_a_script_under_a_plan_has_imported_lightning(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from lightning.pytorch.loops import fit_loop\nprint(hasattr(fit_loop._process_dataloader, '__wrapped__'))\n"
    )
    command = [sys.executable, "-m", "fcp_cli.runtime", "--", str(script)]
    done = subprocess.run(
        command, env={**os.environ, "FCP_PLAN": "plan.parquet"}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr
