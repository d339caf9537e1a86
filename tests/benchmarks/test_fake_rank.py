"""The memory model against what the trainer allocates, on one rank of a job of fake devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.fake_devices import estimated_bytes, with_levels
from benchmarks.fake_rank import FakeJob, tracked_step
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.cost.recipe import Recipe, Recompute
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from tests.runtime.launch import torchrun
from tests.verification import real_cases

pytestmark = [pytest.mark.torch, pytest.mark.hf]

# (model, sync, tokens, ranks, recipe): every setting with each value, not every pair of them.
CASES: list[tuple[str, Sync, int, int, dict[str, Any]]] = [
    ("qwen3-tiny", "iteration", 4096, 64, {"zero_stage": 2, "loss": "plain"}),
    ("qwen3-tiny", "iteration", 4096, 8, {"zero_stage": 1, "recompute": "full"}),
    ("qwen3-tiny", "microbatch", 16_384, 8, {"zero_stage": 3, "recompute": "full", "loss": "plain"}),
    ("qwen3-tiny", "microbatch", 4096, 64, {"zero_stage": 3, "recompute": "selective", "reduce": "step"}),
    ("qwen3-tiny", "iteration", 16_384, 8, {"zero_stage": 2, "recompute": "activation"}),
    ("qwen3-tiny", "iteration", 16_384, 8, {"zero_stage": 2, "recompute": "elementwise"}),
    ("qwen3-tiny", "microbatch", 16_384, 8, {"zero_stage": 3, "precision": "amp", "recompute": "elementwise"}),
    ("qwen3-tiny", "iteration", 4096, 8, {"zero_stage": 0, "precision": "fp32"}),
    ("qwen3-tiny", "microbatch", 4096, 8, {"zero_stage": 2, "precision": "amp", "recompute": "full"}),
    ("qwen3-vl-tiny", "iteration", 4096, 8, {"zero_stage": 2, "shard_ranks": 4}),
]


@pytest.mark.examples(4)
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


@pytest.mark.parametrize(("degree", "shared"), [(2, 1), (4, 1), (4, 2)])
def test_values_that_are_kept_beside_those_of_a_ring_are_counted(degree: int, shared: int) -> None:
    """Recomputation keeps the product of the rank's own values, and the ring saves those of another rank."""
    recipe, tokens = Recipe(zero_stage=2, recompute="elementwise"), 16_384
    job = FakeJob(
        model="qwen3-tiny",
        recipe=recipe,
        sync="iteration",
        tokens=tokens,
        ranks=8,
        degree=degree,
        heads_degree=shared,
    )
    memory = rank_memory(load_model("qwen3-tiny"), recipe, sync="iteration", ranks=8).without("communicators")
    assert memory.total_bytes(tokens) == pytest.approx(tracked_step(job).peak_bytes, rel=0.01)


@pytest.fixture(autouse=True)
def _every_warning() -> Iterator[None]:
    """Let PyTorch repeat warnings that it gives once a process: what a test meets does not depend on those before."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


_WINDOWS = """\
format: fcp-model/1
name: windows-tiny
architecture: gemma3_text
text:
  num_layers: 4
  hidden_size: 512
  num_heads: 8
  num_kv_heads: 8
  head_dim: 64
  ffn_size: 512
  vocab_size: 1024
  tied_embeddings: true
  qk_norm: true
  attention: [window]
  window_tokens: 512
"""


@pytest.mark.examples(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_estimate_of_layers_whose_halos_travel_is_the_tracked_peak(tmp_path: Path, recompute: Recompute) -> None:
    path, recipe = tmp_path / "windows-tiny.yaml", Recipe(zero_stage=2, recompute=recompute)
    path.write_text(_WINDOWS, encoding="utf-8")
    job = FakeJob(model=str(path), recipe=recipe, sync="iteration", tokens=8192, ranks=8, degree=4)
    memory = rank_memory(load_model(path), recipe, sync="iteration", ranks=8).without("communicators")
    assert memory.total_bytes(8192) == pytest.approx(tracked_step(job).peak_bytes, rel=0.01)
    if recompute == "full":  # layers keep little else
        assert memory.items(8192)["halo buffers"] > 0.2 * memory.total_bytes(8192)


_DEEP = """\
format: fcp-model/1
name: deep-tiny
architecture: qwen3
text: {num_layers: 4, hidden_size: 128, num_heads: 4, num_kv_heads: 2, head_dim: 32, ffn_size: 384, vocab_size: 256, \
tied_embeddings: true, qk_norm: true}
"""


def test_layers_that_recompute_as_needed_fill_the_memory_and_no_more(tmp_path: Path) -> None:
    """From a little more than fits without recomputation up to what fits with all of it, level by level."""
    path, recipe = tmp_path / "deep-tiny.yaml", Recipe(zero_stage=3, recompute="as-needed")
    path.write_text(_DEEP, encoding="utf-8")
    memory, room = rank_memory(load_model(path), recipe, sync="microbatch", ranks=8), 0.4e9
    job = with_levels(
        FakeJob(model=str(path), recipe=recipe, sync="microbatch", tokens=8, ranks=8),
        capacity_bytes=memory.total_bytes(1) + room,
    )
    levels = parse_cost_profile(job.cost_profile, name="levels").recompute_levels
    assert len(levels) > 1
    places = [levels[-1].tokens, *((2 * low.tokens + high.tokens) // 3 for low, high in pairwise(levels))]
    for tokens in (tokens // 8 * 8 for tokens in places):
        there = replace(job, tokens=tokens)
        peak = tracked_step(there).peak_bytes
        assert estimated_bytes(there) == pytest.approx(peak, rel=0.05)
        assert peak < memory.without("communicators").total_bytes(1) + room


_EXPERTS = """\
format: fcp-model/1
name: experts-tiny
architecture: qwen3_moe
text:
  num_layers: 2
  hidden_size: 128
  num_heads: 4
  num_kv_heads: 2
  head_dim: 32
  vocab_size: 256
  tied_embeddings: true
  qk_norm: true
  experts: {count: 8, active: 2, ffn_size: 96}
"""


@pytest.mark.parametrize("recompute", ["activation", "elementwise"])
def test_the_estimate_of_experts_that_keep_their_products_is_the_tracked_peak(
    tmp_path: Path, recompute: Recompute
) -> None:
    path, recipe = tmp_path / "experts-tiny.yaml", Recipe(zero_stage=2, recompute=recompute)
    path.write_text(_EXPERTS, encoding="utf-8")
    job = FakeJob(model=str(path), recipe=recipe, sync="iteration", tokens=16_384, ranks=8)
    memory = rank_memory(load_model(path), recipe, sync="iteration", ranks=8).without("communicators")
    assert memory.total_bytes(16_384) == pytest.approx(tracked_step(job).peak_bytes, rel=0.05)


SHARED: list[Any] = [
    ((4, 2), {"recompute": "selective"}),  # two copies of each key/value head
    *(
        pytest.param(group, settings, marks=pytest.mark.full)
        for group in ((2, 2), (4, 1))
        for settings in ({}, {"recompute": "selective"}, {"recompute": "full"})
    ),
]


@pytest.mark.parametrize(("group", "settings"), SHARED)
def test_the_estimate_where_ranks_share_heads_is_hardly_less_than_the_tracked_peak(
    group: tuple[int, int], settings: dict[str, Any]
) -> None:
    (shared, ring), recipe = group, Recipe(zero_stage=2, **settings)
    job = FakeJob(
        model="qwen3-tiny",
        recipe=recipe,
        sync="iteration",
        tokens=4096,
        ranks=8,
        degree=shared * ring,
        heads_degree=shared,
    )
    memory = rank_memory(load_model("qwen3-tiny"), recipe, sync="iteration", ranks=8, sharing=shared)
    memory = memory.without("communicators", "visual tokens", "encoder block")
    assert 0.98 <= memory.total_bytes(4096) / tracked_step(job).peak_bytes <= 1.08


def test_the_estimate_of_adapters_is_a_bound() -> None:
    """What frozen matrices would keep for their own gradients counts, although autograd keeps less of it."""
    recipe = Recipe(zero_stage=2, lora="r=16")
    job = FakeJob(model="qwen3-tiny", recipe=recipe, sync="iteration", tokens=4096, ranks=8, on_cpu=False)
    memory = rank_memory(load_model("qwen3-tiny"), recipe, sync="iteration", ranks=8).without("communicators")
    assert 1.0 <= memory.total_bytes(4096) / tracked_step(job).peak_bytes <= 1.2


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.distributed
def test_the_estimate_is_what_real_ranks_allocate(tmp_path: Path) -> None:
    """On two gloo ranks, tensors and all; the CPU's kernels answer as those of a device do."""
    torchrun("-m", "tests.verification.workers.memory_worker", str(tmp_path), num_ranks=2)
    for name, (sync, recipe) in real_cases.CASES.items():
        job = FakeJob(model="qwen3-tiny", recipe=recipe, sync=sync, tokens=real_cases.TOKENS, ranks=2, on_cpu=True)
        levels = real_cases.LEVELS if recipe.recompute == "as-needed" else ""
        estimate = estimated_bytes(replace(job, cost_profile=levels))
        for rank in range(2):
            measured = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            assert estimate == pytest.approx(measured, rel=0.1), name
