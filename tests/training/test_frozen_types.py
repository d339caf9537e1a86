"""What is frozen under bf16 is in bf16 alone, whichever way the rest is held."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fcp_cli.cost.recipe import Recipe
from fcp_cli.runtime.session import outside
from fcp_cli.runtime.transport import ProcessWorld
from fcp_cli.training.sharding import Replica, Shares, open_shares
from fcp_cli.training.weights import build_model, choose_trained, shard_model

pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def half_frozen() -> nn.Module:
    model: nn.Module = build_model("qwen3-tiny", seed=0, device=torch.device("cpu"))
    choose_trained(model, Recipe(freeze="embed_tokens.*,layers.0.*"), seed=0)
    return model


def test_a_replica_computes_with_and_saves_frozen_weights_of_bf16_and_masters_of_the_rest(alone: None) -> None:
    model = half_frozen()
    held = Replica(model, ProcessWorld(), Shares(), torch.bfloat16)
    parameters = dict(model.named_parameters())
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    for name, kept in held.weights.items():
        is_frozen = not parameters[name].requires_grad
        assert kept.dtype == (torch.bfloat16 if is_frozen else torch.float32)
        assert (kept.data_ptr() == parameters[name].data_ptr()) == is_frozen  # no second copy of what nothing updates
    assert {weight.dtype for weight in held.trained} == {torch.float32}


def test_shards_of_frozen_weights_are_of_bf16_and_train_the_rest(alone: None) -> None:
    model = half_frozen()
    mesh = open_shares(Recipe(zero_stage=2), rank=0, ranks=1, device_type="cpu").mesh
    assert mesh is not None
    shard_model(model, mesh, dtype=torch.bfloat16, keeps_weights=True)
    for parameter in model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)
    with outside():
        loss = model(input_ids=torch.arange(16)[None], use_cache=False).logits.float().logsumexp(-1).sum()
        loss.backward()
    for parameter in model.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
