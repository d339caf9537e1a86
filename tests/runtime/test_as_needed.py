"""Layers that recompute as needed: which do, their gradients, what travels, and what torch.compile makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import RunError
from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.plan_agreement import require_training
from fcp_cli.runtime.recompute import LayerLevels
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.ring_attention import attention
from tests.runtime.models import LEVELS
from tests.runtime.plans import Row, write_plan
from tests.runtime.sharded_layers import WIDTH, Passes, train_layers

pytestmark = pytest.mark.torch

HEADS, LAYERS = 3, 5


class Block(nn.Module):
    """Attention between matrices and a gate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.levels: list[str] = []
        self.double()

    def forward(self, hidden: Tensor, ring: Ring) -> Tensor:
        self.levels.append("activation" if LayerLevels.recomputes_activation() else "other")
        q, k, v = self.first(hidden).tanh().unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        out: Tensor = hidden + self.last(attention(q, k, v, ring=ring).transpose(1, 2).flatten(2)).tanh()
        return out


def train(levels: tuple[RecomputeLevel, ...], packs: tuple[tuple[int, ...], ...], *, frozen: int = 0) -> list[Passes]:
    """Layers over some packs on a ring of two, the first `frozen` without gradients."""
    built = [[Block() for _ in range(LAYERS)] for _ in range(2)]
    for block in (block for blocks in built for block in blocks[:frozen]):
        block.requires_grad_(False)
    return train_layers(built, packs, lambda rank: LayerLevels(levels, layers=LAYERS).run)


NEVER = (RecomputeLevel(recompute="none", tokens=1 << 20),)


@pytest.mark.parametrize("frozen", [0, 2])
def test_micro_batches_of_any_levels_have_the_gradients_and_messages_of_none(frozen: int) -> None:
    """Of 3 to 40 tokens a rank; an odd token lets the ranks of one ring choose other numbers of layers."""
    packs = ((6,), (13,), (21, 2), (39,), (80,))
    for found, expected in zip(train(LEVELS, packs, frozen=frozen), train(NEVER, packs, frozen=frozen), strict=True):
        assert len(found.grads) == 4 * (LAYERS - frozen)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found.grads, expected.grads, strict=True))
        assert found.sent == expected.sent


def test_the_first_layers_have_the_dearer_level() -> None:
    chosen = LayerLevels(LEVELS, layers=LAYERS)
    assert [chosen.level(index, 3) for index in range(LAYERS)] == ["none"] * LAYERS
    assert [chosen.level(index, 7) for index in range(LAYERS)] == ["activation"] * LAYERS
    mixed = [chosen.level(index, 16) for index in range(LAYERS)]
    assert mixed == ["selective"] * 2 + ["elementwise"] * 3
    assert {chosen.level(index, 99) for index in range(LAYERS)} == {"selective"}  # more than was planned for


def test_a_layer_of_another_micro_batch_changes_none_that_waits_for_its_backward() -> None:
    block, ring = Block(), Ring(shard_layout((30,), 1))
    chosen = LayerLevels(LEVELS, layers=1)
    first = chosen.run(0, block, torch.ones(1, 30, WIDTH, dtype=torch.float64), ring)
    chosen.run(0, block, torch.ones(1, 6, WIDTH, dtype=torch.float64), Ring(shard_layout((6,), 1)))
    torch.autograd.backward(first.sum())
    assert block.levels == ["other", "activation", "other"]  # the last is the first one's, computed again


def test_compiled_layers_are_compiled_for_no_number_of_layers() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = hidden + self.down(torch.relu(self.up(hidden)))
            return out

    torch._dynamo.reset()
    counter, levels = CompileCounter(), tuple(level for level in LEVELS if level.recompute in ("none", "selective"))
    blocks = [torch.compile(Plain(), backend=counter, dynamic=True) for _ in range(LAYERS)]
    chosen, frames = LayerLevels(levels, layers=LAYERS), []
    for tokens in (3, 40, *range(4, 40)):
        hidden = torch.ones(1, tokens, WIDTH, requires_grad=True)
        for index, block in enumerate(blocks):
            hidden = chosen.run(index, block, hidden)
        torch.autograd.backward(hidden.sum())
        frames.append(counter.frame_count)
    assert {chosen.level(0, tokens) for tokens in range(3, 40)} == {"none", "selective"}
    assert frames[1] == frames[-1] <= 2 * LAYERS


def test_loops_that_recompute_all_alike_refuse_a_plan_that_counts_on_less(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "p.parquet", [[Row([0], [4])]], num_ranks=1, recipe=Recipe(recompute="as-needed"))
    metadata = PlanReader(path).metadata
    with pytest.raises(RunError, match=r"--recompute as-needed, which Megatron cannot .*; plan with --recompute sel"):
        require_training(metadata, path, "Megatron")
    require_training(replace(metadata, recipe=Recipe(recompute="selective")), path, "Megatron")
    require_training(replace(metadata, recipe=None), path, "Megatron")


@pytest.mark.hf
def test_models_without_levels_or_layers_of_their_own_are_one_line() -> None:
    pytest.importorskip("transformers")
    from fcp_cli.integrations.transformers import recompute_layers
    from tests.runtime.models import hugging_face

    model = hugging_face("qwen3", torch.float32)
    with pytest.raises(RunError, match="this one has none; plan with 'fcp plan --recompute as-needed'"):
        recompute_layers(model, "as-needed")
    model.config.num_hidden_layers = 3
    with pytest.raises(RunError, match="has 3 layers, and 2 of its modules can be recomputed one by one"):
        recompute_layers(model, "as-needed", LEVELS)


@pytest.mark.hf
def test_models_of_scripts_recompute_by_the_levels_of_the_plan_alone() -> None:
    pytest.importorskip("transformers")
    from fcp_cli.integrations.hugging_face.loops import PlannedModel
    from tests.runtime.models import hugging_face

    model = hugging_face("qwen3", torch.float32)
    planned, layers = PlannedModel(model), list(model.model.layers)
    planned.recompute_by(())
    assert not any(layer.gradient_checkpointing for layer in layers)
    planned.recompute_by(LEVELS)
    assert all(layer.gradient_checkpointing for layer in layers)
    assert [layer._gradient_checkpointing_func.args for layer in layers] == [(0,), (1,)]
