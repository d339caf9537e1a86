"""The bundled trainer under recipes that change memory and time, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.fitting import JobRanks
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime import loss, recompute
from fcp_cli.training.sharding import describe_offload, tokens_without_offload
from fcp_cli.training.train import main
from fcp_cli.util.files import shipped
from tests.training.small_runs import write_manifest, write_small_plan

pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_small_plan(folder / "plan.parquet", write_manifest(folder), steps=2, num_ranks=1)
    return folder


def run(folder: Path, name: str, *words: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step of a run of one rank, in this process."""
    arguments = ["--plan", str(folder / "plan.parquet"), "--run-dir", str(folder / name), "--model", "qwen3-tiny"]
    assert main([*arguments, "--device", "cpu", "--precision", "fp64", "--checkpoint-every", "0", *words]) == 0
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if record["kind"] == "step"]


@pytest.mark.full
def test_recomputation_chunked_loss_and_offload_train_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(folder, "plain", "--loss", "plain", "--recompute", "none")
    monkeypatch.setattr(loss, "LOGITS_BYTES", 4 * 256 * 100)
    monkeypatch.setattr(recompute, "LEAST_BYTES", 1)
    capsys.readouterr()
    for one, other in zip(run(folder, "activation", "--recompute", "activation"), plain, strict=True):
        assert one == pytest.approx(other, rel=1e-12, abs=1e-12)
    for how in ("elementwise", "selective", "full"):
        found = run(folder, how, "--recompute", how, "--offload", "activations")
        assert len(found) == 2
        for one, other in zip(found, plain, strict=True):
            assert one == pytest.approx(other, rel=1e-12, abs=1e-12)
        assert "layer inputs are offloaded to host memory in micro-batches" in capsys.readouterr().err


def test_the_run_says_what_offloading_costs(folder: Path) -> None:
    metadata = PlanReader(folder / "plan.parquet").metadata
    profile = (shipped("profiles") / "cost" / "qwen3-8b-example-8x8.yaml").read_text(encoding="utf-8")
    recipe = Recipe(recompute="full", offload="activations")
    planned = replace(metadata, cost_profile=profile, tokens_per_rank=16_384)
    assert describe_offload(12_000, recipe, "qwen3-8b", planned) == snapshot(
        "layer inputs are offloaded to host memory in micro-batches of more than 12000 tokens per rank; with 16384 tokens they are 4.8 GB each way, and layers hide 0.38 of 0.38 s (estimate, 25 GB/s)"
    )


def test_what_fits_without_is_not_offloaded(folder: Path) -> None:
    metadata = replace(PlanReader(folder / "plan.parquet").metadata, num_ranks=8, ranks_per_node=8)
    place = JobRanks(num_ranks=8, ranks_per_node=8, capacity_bytes=74e9)
    recipe = Recipe(zero_stage=2, recompute="full", offload="activations")
    everything = place.memory(load_model("qwen3-8b"), recipe, metadata.sync).tokens(place.capacity_bytes)
    assert 0 < tokens_without_offload(recipe, "qwen3-8b", metadata, place) < everything
