"""The memory model against what the trainer allocates, on one rank of a job of fake devices."""

from __future__ import annotations

from typing import Any

import pytest

from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.recipe import Recipe
from fcp_cli.verification.fake_devices import FakeJob, tracked_step

pytestmark = [pytest.mark.torch, pytest.mark.hf]

# (model, sync, tokens, ranks, recipe): every setting with each value, not every pair of them.
CASES: list[tuple[str, Sync, int, int, dict[str, Any]]] = [
    ("qwen3-tiny", "iteration", 4096, 64, {"zero_stage": 2, "loss": "plain"}),
    ("qwen3-tiny", "iteration", 4096, 8, {"zero_stage": 1, "recompute": "full"}),
    ("qwen3-tiny", "microbatch", 16_384, 8, {"zero_stage": 3, "recompute": "full", "loss": "plain"}),
    ("qwen3-tiny", "microbatch", 4096, 64, {"zero_stage": 3, "recompute": "selective", "reduce": "step"}),
    ("qwen3-tiny", "iteration", 4096, 8, {"zero_stage": 0, "precision": "fp32"}),
    ("qwen3-tiny", "microbatch", 4096, 8, {"zero_stage": 2, "precision": "amp", "recompute": "full"}),
    ("qwen3-vl-tiny", "iteration", 4096, 8, {"zero_stage": 2, "shard_ranks": 4}),
]


@pytest.mark.parametrize(("model", "sync", "tokens", "ranks", "settings"), CASES)
def test_the_estimate_is_the_tracked_peak(
    model: str, sync: Sync, tokens: int, ranks: int, settings: dict[str, Any]
) -> None:
    recipe = Recipe(**settings)
    job = FakeJob(model=model, recipe=recipe, sync=sync, tokens=tokens, ranks=ranks, on_cpu=recipe.precision == "fp32")
    # The links between devices are no tensors, and the sequences are text: nothing tracks these here.
    memory = rank_memory(load_model(model), recipe, sync=sync, ranks=ranks)
    memory = memory.without("communicators", "visual tokens", "encoder block")
    assert memory.total_bytes(tokens) == pytest.approx(tracked_step(job).peak_bytes, rel=0.05)
