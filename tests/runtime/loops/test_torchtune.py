"""torchtune's models train under a plan as alone; its own recipes, and torchtitan's own Trainer, are refused at once."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata.plan_metadata import Sync
from tests.patience import PATIENCE_SECONDS
from tests.runtime.launch import ROOT, torchrun
from tests.runtime.loops.cases import NUM_RANKS, SYNCS, Trained, worst_difference, write_plans

pytestmark = pytest.mark.loops
pytest.importorskip("torchtune", reason="torchtune is not installed")

_CONFIG = """
model: {_component_: torchtune.models.llama3.llama3}
device: cpu
dtype: fp32
"""


@pytest.mark.parametrize("sync", SYNCS)
def test_the_example_trains_as_torchtune_does_alone(sync: Sync, tmp_path: Path) -> None:
    write_plans(tmp_path)
    torchrun(
        "-m",
        "tests.runtime.workers.torchtune_worker",
        str(ROOT / "examples" / "torchtune" / "train.py"),
        str(tmp_path),
        num_ranks=NUM_RANKS,
        FCP_PLAN=str(tmp_path / f"{sync}.parquet"),
    )
    planned, alone = (pickle.loads((tmp_path / f"{name}.pickle").read_bytes()) for name in ("planned", "alone"))
    assert isinstance(planned, Trained)
    assert len(planned.norms) == 3
    assert worst_difference(planned, alone) <= 2e-6


def launched(folder: Path, *script: str) -> list[str]:
    """Return what the ranks of a script wrote on standard error."""
    write_plans(folder)
    command = [
        sys.executable,
        "-m",
        "fcp_cli",
        "launch",
        "--plan",
        "iteration.parquet",
        "--device",
        "cpu",
        "--",
        *script,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if "would train without the plan" in line]


@pytest.mark.parametrize("recipe", ["full_finetune_distributed.py", "lora_dpo_distributed.py"])
def test_a_recipe_of_torchtune_is_refused_before_it_reads_weights(recipe: str, tmp_path: Path) -> None:
    spec = find_spec("torchtune")
    assert spec is not None and spec.origin is not None
    (tmp_path / "recipe.yaml").write_text(_CONFIG)
    shipped = Path(spec.origin).parents[1] / "recipes" / recipe
    said = launched(tmp_path, str(shipped), "--config", "recipe.yaml")
    assert f"torchtune's recipe {recipe} takes an optimizer step after every gradient_accumulation_steps" in said[0]
    assert "put a loop over the plan's steps into a copy of it (docs/how-to/training-loop.md, torchtune)" in said[0]


def test_torchtitans_own_trainer_is_refused_before_it_makes_a_model(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    said = launched(tmp_path, "-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")
    assert "torchtitan's Trainer reads a stream of text in pieces of one length, which are no rows of a" in said[0]


def test_a_subclass_of_torchtitans_trainer_with_a_loop_of_its_own_is_left_alone() -> None:
    from fcp_cli.integrations.own_loops import refuse_torchtitan

    class Trainer:
        def train(self) -> None: ...
        def train_step(self) -> None: ...

    class Planned(Trainer):
        def train_step(self) -> None: ...

    module = ModuleType("torchtitan.trainer")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    refuse_torchtitan(module)
    assert isinstance(Planned(), Trainer)
    with pytest.raises(RunError, match=r"^torchtitan's Trainer reads"):
        Trainer()


@pytest.mark.parametrize("framework", ["torchtitan", "torchtune"])
def test_a_framework_without_what_is_hooked_is_named(framework: str) -> None:
    from fcp_cli.integrations import own_loops

    with pytest.raises(RunError, match=rf"^this {framework} has no other\.\w+"):
        getattr(own_loops, f"refuse_{framework}")(ModuleType("other"))
