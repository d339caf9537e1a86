"""Attention whose scores have a soft cap, all members in one process: softcap * tanh(score / softcap), as in Gemma 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, Mask, segments
from fcp_cli.runtime.kernels.select import capped_kernel
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.ring_attention.attention import attention
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.session.outside import outside
from tests.runtime.emulation import run_emulated
from tests.runtime.reference import absolute_error, make_example

pytestmark = pytest.mark.torch

MASKS: dict[str, tuple[Mask, ...]] = {"causal": (), "images": (segments([(3, 20), (30, 57)]), CAUSAL, CAUSAL)}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("window", [None, 9])
def test_any_group_computes_capped_attention_in_fp64(window: int | None, masks: str) -> None:
    example = make_example((57, 13, 1), (4, 2), head_dim=8, window=window, softcap=0.7, masks=MASKS[masks])
    plain = make_example((57, 13, 1), (4, 2), head_dim=8, window=window, masks=MASKS[masks])
    assert absolute_error(example.dq, plain.dq) > 0.1, "the cap is felt"
    for degree, shared in ((1, 1), (2, 1), (5, 1), (4, 2)):
        for found, expected in zip(run_emulated(example, degree, torch.float64, shared), example.results, strict=True):
            assert absolute_error(found, expected) <= 1e-12, (degree, shared)


@pytest.mark.parametrize("how", ["plain", "recomputed", pytest.param("compiled", marks=pytest.mark.full), "outside"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_autograd_gives_gradients_of_capped_attention_however_the_layer_runs(how: str, has_sinks: bool) -> None:
    example = make_example((40,), (4, 2), window=12, softcap=0.7, has_sinks=has_sinks)
    ring = None if how == "outside" else Ring(shard_layout((40,), 1))
    leaves = [tensor.transpose(0, 1)[None].clone().requires_grad_() for tensor in (example.q, example.k, example.v)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, ring=ring, window=12, sinks=example.sinks, softcap=0.7) * 1.0

    if how == "recomputed":
        out = checkpoint(layer, *leaves, use_reentrant=False)
    elif how == "compiled":
        out = torch.compile(layer, backend="aot_eager", fullgraph=True)(*leaves)
    else:
        with outside():
            out = layer(*leaves)
    found = torch.autograd.grad(out, leaves, example.grad_out.transpose(0, 1)[None])
    for one, expected in zip((out.detach(), *found), example.results, strict=True):
        assert absolute_error(one[0].transpose(0, 1), expected) <= 1e-12


def test_kernels_without_soft_caps_say_so() -> None:
    with pytest.raises(
        RunError, match=r"no attention kernel .*bfloat16 on cuda has soft caps on scores \(softcap=50.0\)"
    ):
        capped_kernel("cuda", torch.bfloat16, 50.0)
    with pytest.raises(RunError, match=r"softcap=0\.0; scores are capped at a number above 0"):
        capped_kernel("cpu", torch.float32, 0.0)
