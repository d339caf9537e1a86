from __future__ import annotations

from typing import Any, get_args

import pytest

from fcp_cli.cost.recipe import Recipe, Recompute
from fcp_cli.memory.items import MemoryItem, Moment, RankMemory
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model


def memory_of(model: str = "qwen3-8b", *, ranks: int = 64, **settings: Any) -> RankMemory:
    sync = settings.pop("sync", "microbatch" if settings.get("zero_stage") == 3 else "iteration")
    return rank_memory(load_model(model), Recipe(**settings), sync=sync, ranks=ranks)


def test_items_add_up_to_the_peak() -> None:
    memory = memory_of(zero_stage=2, recompute="full")
    assert sum(memory.items(16_384).values()) == pytest.approx(memory.total_bytes(16_384))


def test_the_tokens_that_fit_are_the_most_that_do() -> None:
    memory = memory_of(zero_stage=2, recompute="full", loss="chunked")
    tokens = memory.tokens(80e9)
    assert memory.total_bytes(tokens) <= 80e9 < memory.total_bytes(tokens + 1)


def test_sharing_heads_takes_more_only_where_ranks_hold_copies_of_keys_and_values() -> None:
    """qwen3-8b has 32 query and 8 key/value heads of 128, in 36 layers."""

    def held(sharing: int, **settings: Any) -> float:
        recipe = Recipe(zero_stage=2, **settings)
        memory = rank_memory(load_model("qwen3-8b"), recipe, sync="iteration", ranks=64, sharing=sharing)
        return memory.total_bytes(16_384)

    assert held(1) == held(8)
    copies = 3 * 2 * 8 * 128 * 2  # of four, three more, of keys and values in bf16
    assert held(32) == held(64)
    buffers = copies * 2 * (2 + 4) / 2  # two, with fp32 gradients
    assert 1.0 <= (held(32) - held(8)) / (16_384 * (36 * copies + buffers)) < 1.05
    assert held(64, recompute="selective") - held(1, recompute="selective") >= 16_384 * (36 * copies + buffers)
    of_one_layer = held(64, recompute="full") - held(1, recompute="full")
    assert of_one_layer < 16_384 * (5 * copies + buffers)


def test_the_line_of_a_profile_gives_the_same_tokens() -> None:
    memory = memory_of(zero_stage=2, recompute="full")
    assert memory.as_profile_memory(80e9).tokens_per_rank() == memory.tokens(80e9)


def test_a_model_that_does_not_fit_leaves_no_tokens() -> None:
    memory = memory_of(zero_stage=0)
    assert memory.tokens(80e9) == 0
    assert (memory.as_profile_memory(80e9).tokens_per_rank() or 0) < 0


def test_the_peak_is_that_of_the_moment_which_needs_most() -> None:
    head = Moment(name="loss head", items=(MemoryItem(name="loss head", bytes_per_token=3.0),))
    update = Moment(name="optimizer step", items=(MemoryItem(name="update", fixed_bytes=100.0),))
    memory = RankMemory(moments=(head, update))
    assert memory.total_bytes(10) == 100.0
    assert memory.total_bytes(50) == 150.0
    assert memory.tokens(120.0) == 40
    assert memory.tokens(99.0) == 0


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_sharding_the_optimizer_and_the_weights_holds_less(recompute: str) -> None:
    nothing, optimizer, gradients, weights = (
        memory_of(zero_stage=stage, recompute=recompute).total_bytes(4096) for stage in range(4)
    )
    assert nothing > optimizer > weights
    # Until a step ends, its gradients are whole on every rank, whoever shares out their sums.
    assert gradients == pytest.approx(optimizer, rel=0.05)


@pytest.mark.parametrize("model", ["qwen3-8b", "llama3-70b", "qwen3-30b-a3b", "gemma3-27b", "qwen3-next-80b-a3b"])
def test_what_recomputes_more_holds_less(model: str) -> None:
    held = [
        memory_of(model, zero_stage=3, recompute=kind).as_profile_memory(80e9).bytes_per_token
        for kind in get_args(Recompute)
        if kind != "as-needed"
    ]
    assert held == sorted(held, reverse=True) and len(set(held)) == len(held)


def test_recomputation_the_chunked_loss_and_offload_each_hold_less() -> None:
    recipes: list[dict[str, Any]] = [
        {"loss": "plain"},
        {},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "offload": "activations"},
    ]
    sizes = [memory_of(zero_stage=2, **recipe).total_bytes(16_384) for recipe in recipes]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
