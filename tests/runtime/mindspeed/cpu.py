"""Lets MindSpeed and Megatron run on the CPU: a `torch_npu` whose attention is written out in fp64.

For tests alone. Import it before mindspeed.megatron_adaptor.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import MagicMock

import mindspeed  # noqa: F401  before Megatron, as its adaptor is: by that fcp tells that a job is MindSpeed's

import tests.runtime.megatron.cpu_shim as megatron_on_cpu  # isort: skip
import torch
from megatron.core.fusions import fused_layer_norm

from fcp_cli.runtime.inject import after_import
from tests.runtime.fake_npu import FakeNpu

# Devices and kernels, and numbers in 8 bits, of which 26.1 imports `megatron.training`: that is not on PyPI.
_LEFT_OUT = ("torch_npu", "torch_npu.contrib", "torch_npu.npu", "torchair", "torchair.ge",
             "mindspeed.ops.triton.l2norm", "mindspeed.core.ssm.chunk_gated_delta_rule",
             "mindspeed.te.pytorch.fp8.tensor.float8_tensor",
             "mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.weight_grad_store")  # fmt: skip


def _sum_doubles(requirements: Any) -> None:
    """MindSpeed sums an fp32 copy of an fp64 tensor, which NPUs cannot sum, and leaves the tensor as it was."""

    def exact_wrapper(all_reduce: Any) -> Any:
        return all_reduce

    requirements.torch_all_reduce_double_dtype_bypass_wrapper = exact_wrapper


def _plain_norms(megatron_basic: Any) -> None:
    """On megatron-core 0.18 they are those of TransformerEngineNPU, before that Apex's."""
    megatron_basic.PTNorm.__new__ = lambda _, *args, **kwargs: megatron_on_cpu._layer_norm(*args, **kwargs)


def _pretend_engine_version(utils: Any) -> None:
    """MindSpeed on megatron-core 0.18 imports parts of Megatron that ask for it, and needs TransformerEngineNPU."""
    if hasattr(utils, "PkgVersion"):
        utils._te_version = utils.PkgVersion("2.20.0")


def _install() -> None:
    attention = FakeNpu(head_major=True, stats_dtype=torch.float64)
    for name in _LEFT_OUT:
        sys.modules[name] = MagicMock(__file__=__file__)
    torch_npu: Any = sys.modules["torch_npu"]
    torch_npu.npu_fusion_attention = attention.npu_fusion_attention
    torch_npu.npu_fusion_attention_grad = attention.npu_fusion_attention_grad
    after_import(
        {
            "mindspeed.core.megatron_basic.requirements_basic": _sum_doubles,
            "mindspeed.core.megatron_basic.megatron_basic": _plain_norms,
            "megatron.core.utils": _pretend_engine_version,
        }
    )
    # Apex's, which MindSpeed wants.
    fused_layer_norm.FusedLayerNorm.__new__ = lambda _, *args, **kwargs: megatron_on_cpu._layer_norm(*args, **kwargs)
    npu = MagicMock()
    npu.current_device = lambda: torch.device("cpu")
    setattr(torch, "npu", npu)  # noqa: B010


_install()
