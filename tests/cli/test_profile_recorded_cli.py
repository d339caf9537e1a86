"""`fcp profile --from-samples` and `fcp plan` after it, on what 8 H100 would have recorded."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.profile import load_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader
from tests.cli.test_profile_cli import Fcp, fcp
from tests.profiling.recorded import truth, write_samples

__all__ = ["fcp"]


@pytest.mark.lengthy
def test_what_8_h100_recorded_becomes_a_profile_even_of_a_recipe_that_does_not_fit(tmp_path: Path, fcp: Fcp) -> None:
    """Ten minutes of measuring are never lost: the profile is written, and the warning's own command mends it."""
    path = tmp_path / "h100.samples.jsonl"
    write_samples(path, Recipe(zero_stage=0, recompute="selective"))
    before = path.read_bytes()
    done = fcp("profile", "--from-samples", "h100.samples.jsonl", "-o", "h100.yaml")
    assert path.read_bytes() == before
    (warning,) = (line for line in done.err.splitlines() if line.startswith("warning: "))
    assert "qwen3-8b does not fit under ZeRO-0, bf16, selective recomputation, chunked loss: it takes " in warning
    assert load_cost_profile(tmp_path / "h100.yaml").recipe == Recipe(zero_stage=0, recompute="selective")
    assert "Token budget: none, since " in done.out

    command = warning[warning.index("fcp profile") :]
    assert command.startswith("fcp profile --from-samples h100.samples.jsonl --zero ")
    done = fcp(*shlex.split(command)[1:], "-o", "h100.yaml")
    assert "warning" not in done.err
    profile = load_cost_profile(tmp_path / "h100.yaml")
    assert profile.recipe is not None and profile.recipe.zero_stage >= 2
    assert (profile.memory.tokens_per_rank() or 0) >= 16_384
    held = rank_memory(load_model("qwen3-8b"), profile.recipe, sync=profile.sync or "iteration", ranks=8, peers=7)
    assert held.total_bytes(16_384) <= profile.memory.capacity_bytes

    lengths = [min(20_000, int(random.Random(row).lognormvariate(7.5, 1.2)) + 1) for row in range(256)]
    pq.write_table(pa.table({"length": lengths}), tmp_path / "lengths.parquet")
    words = ["--profile", "h100.yaml", "--ranks", "8", "--ranks-per-node", "8", "--sync", profile.sync or "iteration"]
    fcp("plan", "lengths.parquet", *words, "--global-batch-size", "128")
    metadata = PlanReader(tmp_path / "plan.parquet").metadata
    assert metadata.tokens_per_rank >= 16_384


@pytest.mark.lengthy
def test_recorded_times_are_met_although_clocks_and_runs_vary(tmp_path: Path, fcp: Fcp) -> None:
    recipe = Recipe(zero_stage=3, recompute="selective")
    write_samples(tmp_path / "h100.samples.jsonl", recipe)
    done = fcp("profile", "--from-samples", "h100.samples.jsonl", "--json")
    measurement = json.loads(done.out)["profile"]["measurement"]
    assert measurement["held_out_error_percent"] < 3
    found, wanted = load_cost_profile(tmp_path / "profile.yaml").coefficients, truth(recipe).coefficients
    assert found.linear_seconds_per_token == pytest.approx(wanted.linear_seconds_per_token, rel=0.03)
    assert found.attention_seconds_per_token2 == pytest.approx(wanted.attention_seconds_per_token2, rel=0.03)
    shown = fcp("profile", "show").out
    lines = [line for line in shown.splitlines() if line.startswith(("Times and", "Messages", "First", "Clocks"))]
    assert lines == snapshot(
        [
            "Times and memory are of ZeRO-3, bf16, selective recomputation, chunked loss, sync microbatch: --zero 3 --precision bf16 --recompute selective.",
            "Messages inside a node: 371 GB/s, 30.1 us each.",
            "First contact of two ranks inside a node: 393 ms and 470 MB of device memory a peer.",
            "Clocks of the devices: 1,980 to 1,980 MHz before, 1,755 to 1,860 MHz after.",
        ]
    )


def test_a_measurement_that_ended_early_is_fitted_all_the_same(tmp_path: Path, fcp: Fcp) -> None:
    path = tmp_path / "h100.samples.jsonl"
    write_samples(path, Recipe(zero_stage=3, recompute="selective"), finished=False)
    kept = [line for line in path.read_text().splitlines() if '"memory"' not in line]
    few = [line for line in kept if '"observation"' in line][:6]
    path.write_text("\n".join([line for line in kept if '"observation"' not in line] + few) + "\n")
    done = fcp("profile", "--from-samples", "h100.samples.jsonl")
    assert "warning: 3 samples are too few: a fit needs at least 5" in done.err
    profile = load_cost_profile(tmp_path / "profile.yaml")
    assert "memory.bytes_per_token: from the model's figures" in profile.measurement["assumed"]
    assert (profile.memory.tokens_per_rank() or 0) >= 16_384
