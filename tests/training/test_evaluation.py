"""A run of one rank that evaluates held-out rows, whose plan it makes itself, and logs its curves."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.text import TextTree
from fcp_cli.manifest.tokenizer import open_tokenizer
from fcp_cli.plan.file import PlanReader
from fcp_cli.runs.metrics_reader import open_run
from fcp_cli.training.train import main
from fcp_cli.util.files import shipped
from tests.runs.records import read_metrics
from tests.training.small_runs import write_manifest, write_small_plan, write_text

pytestmark = [pytest.mark.torch, pytest.mark.hf]

PROFILE = shipped("profiles") / "cost" / "qwen3-8b-example-8x8.yaml"


class FakeWandb:
    """What the trainer asks of wandb."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.is_finished = False

    def init(self, **settings: Any) -> FakeWandb:
        self.settings = settings
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        assert name.startswith("fcp/")

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.is_finished = True


def install_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake, module = FakeWandb(), types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.init = fake.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return fake


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    manifest = write_manifest(folder)
    profile = PROFILE.read_text(encoding="utf-8")
    write_small_plan(folder / "plan.parquet", manifest, steps=4, num_ranks=1, cost_profile=profile)
    write_small_plan(folder / "bare.parquet", manifest, steps=4, num_ranks=1)
    fewer = TextTree(root=write_text(folder / "fewer", files=5).resolve(), tokenizer=open_tokenizer("bytes"))
    build_manifest(fewer, folder / "fewer.parquet")
    write_small_plan(folder / "other.parquet", folder / "fewer.parquet", steps=1, num_ranks=1)
    return folder


def run(folder: Path, name: str, *words: str, plan: str = "plan.parquet") -> int:
    arguments = ["--plan", str(folder / plan), "--run-dir", str(folder / name), "--model", "qwen3-tiny"]
    arguments += ["--manifest", str(folder / "lengths.parquet"), "--device", "cpu"]
    return main([*arguments, *words])


def test_a_run_plans_its_held_out_rows_once_and_logs_their_losses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install_wandb(monkeypatch)
    words = ("--eval-manifest", str(folder / "lengths.parquet"), "--eval-every", "1", "--wandb", "tests")
    assert run(folder, "run", *words, "--steps", "2") == 0
    assert "evaluation 1/2  loss " in capsys.readouterr().err
    plan = folder / "run" / "eval-plan.parquet"
    made = plan.stat().st_mtime_ns
    assert PlanReader(plan).metadata.manifest.rows == 24
    assert run(folder, "run", *words, "--steps", "3", "--resume") == 0
    assert plan.stat().st_mtime_ns == made
    records = read_metrics(folder / "run" / "metrics.jsonl")
    found = [(one["kind"], one["step"]) for one in records if one["kind"] != "run"]
    assert found == [(kind, step) for step in range(3) for kind in ("step", "eval")]
    steps = [one for one in records if one["kind"] == "step"]
    assert all(one["mfu"] is None and one["peak_memory_bytes"] > 50e6 for one in steps)
    assert all(one["tokens_per_second"] == one["tokens"] / one["seconds"] for one in steps)
    assert len(list(open_run(folder / "run").steps())) == 3
    assert fake.is_finished
    assert (fake.settings["project"], fake.settings["name"], fake.settings["resume"]) == ("tests", "run", "allow")
    assert [one["fcp/step"] for one in fake.logged] == [0, 0, 1, 1, 2, 2]
    assert fake.logged[1]["fcp/eval_loss"] == records[2]["loss"]


def test_a_resumed_run_drops_evaluations_that_it_makes_again(folder: Path) -> None:
    words = ("--eval-manifest", str(folder / "lengths.parquet"), "--eval-every", "1")
    assert run(folder, "again", *words, "--steps", "2", "--checkpoint-every", "1") == 0
    metrics, checkpoints = folder / "again" / "metrics.jsonl", folder / "again" / "checkpoints"
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    (checkpoints / "step-00000002").rename(folder / "gone")
    assert run(folder, "again", *words, "--steps", "2", "--resume") == 0
    after = [one for one in read_metrics(metrics) if one["kind"] == "eval"]
    assert [(one["step"], one["loss"]) for one in after] == [
        (one["step"], one["loss"]) for one in before if one["kind"] == "eval"
    ]


MISSING: dict[str, tuple[tuple[str, ...], str]] = {
    "a plan without a cost profile": (("--eval-manifest", "HERE/lengths.parquet"), "bare.parquet"),
    "a plan of other rows": (
        ("--eval-manifest", "HERE/lengths.parquet", "--eval-plan", "HERE/other.parquet"),
        "plan.parquet",
    ),
    "nothing to evaluate": (("--eval-every", "5"), "plan.parquet"),
    "wandb": (("--wandb", "tests"), "plan.parquet"),
    "peft": (("--lora", "r=4"), "plan.parquet"),
}
MISSING_MESSAGES = snapshot(
    {
        "a plan without a cost profile": "error: HERE/bare.parquet has no cost profile to plan HERE/lengths.parquet with; give its plan by --eval-plan",
        "a plan of other rows": "error: HERE/other.parquet was not made from HERE/lengths.parquet; plan again with 'fcp plan HERE/lengths.parquet --ranks 1', or drop --eval-plan",
        "nothing to evaluate": "error: --eval-every needs --eval-manifest, the held-out rows",
        "wandb": "error: --wandb needs wandb, which is not installed; run: pip install wandb",
        "peft": "error: --lora needs peft, which is not installed; run: pip install 'peft>=0.18'",
    }
)


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words, plan = MISSING[case]
    monkeypatch.setattr("fcp_cli.training.settings.importlib.util.find_spec", lambda name: None)
    assert (
        run(folder, f"refused {len(words)} {plan}", *(word.replace("HERE", str(folder)) for word in words), plan=plan)
        > 0
    )
    assert capsys.readouterr().err.splitlines()[-1].replace(str(folder), "HERE") == MISSING_MESSAGES[case]
