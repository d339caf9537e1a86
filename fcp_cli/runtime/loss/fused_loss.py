"""Cross entropy of a linear head by kernels of other libraries, if installed and applicable.

Like `chunked_loss`, the fallback, they do not materialize logits, but they are faster on GPUs. Cut cross entropy runs
in its exact variant, since the default skips small gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from fcp_cli.runtime.loss.chunked_loss import chunked_token_loss_sum, product_dtype
from fcp_cli.runtime.loss.labels import IGNORED

FusedLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""From hidden [n, W], weight [V, W], bias [V] and labels [n] to the sum of the labelled tokens' losses."""


_HOSTS = frozenset({"cpu"})  # devices without kernels in any library


def linear_token_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Compute `chunked_token_loss_sum`, on accelerators by the best installed kernel that works there.

    Weighted losses do not use the libraries, whose kernels only return sums.
    """
    dtype = product_dtype(hidden)
    # For fp32 the kernels use TF32, and none of them supports a rank without labelled tokens.
    is_for_kernels = dtype in (torch.bfloat16, torch.float16) and len(labels) and weights is None
    if hidden.device.type not in _HOSTS and is_for_kernels:
        cast = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        for name in list(_installed()):
            found = _attempt(name, *cast, labels)
            if found is not None:
                return found
    return chunked_token_loss_sum(hidden, weight, bias, labels, weights)


def _attempt(name: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor | None:
    """Return a library's sum in fp32; if it fails (device, version or compiler), return None and never try it again."""
    try:
        return _installed()[name](hidden, weight, bias, labels).float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        warnings.warn(f"the loss is computed without {name}, which failed: {reason}", stacklevel=2)
        del _installed()[name]
        return None


@cache
def _installed() -> dict[str, FusedLoss]:
    """Return the libraries that can be imported, best first."""
    makers = {"cut_cross_entropy": _cut_cross_entropy, "liger_kernel": _liger}
    return {name: loss for name, make in makers.items() if (loss := _import(make)) is not None}


def _import(make: Callable[[], FusedLoss]) -> FusedLoss | None:
    try:
        return make()
    except Exception:  # absent, without its driver, or incompatible with another library
        return None


def _cut_cross_entropy() -> FusedLoss:
    from cut_cross_entropy import linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        each: Tensor = linear_cross_entropy(
            hidden, weight, labels, bias=bias, ignore_index=IGNORED, reduction="none", impl="cce_exact"
        )
        return each.float().sum()

    return loss


def _liger() -> FusedLoss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    kernel = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32)

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        total: Tensor = kernel(weight, hidden, labels, bias)
        return total

    return loss
