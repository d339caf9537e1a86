"""Attention sinks: a learned logit per head in the softmax's denominator, to which no key and no value belong.

Kernels need not know of them. With s of a head and the lse and output of its keys alone,

    lse' = logaddexp(lse, s),    out' = out exp(lse - lse'),

and a backward that is given lse' and out' computes with the weights P' = exp(scores - lse') and sum(dout out') of each
row, as it should: dq, dk and dv are exact. The gradient of s is that of a key whose weight is exp(s - lse') and whose
value is zero: - exp(s - lse') sum(dout out'), summed over rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H] with sinks [H] among what each row attends to; `out` may be changed."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    kept = (lse - total).exp_().unsqueeze(-1)
    return (out.mul_(kept) if out.dtype == lse.dtype else (out * kept).to(out.dtype)), total


def sink_gradients(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return [H] the gradient of sinks, in the type of `lse`, from what `with_sinks` returned.

    Args:
        grad_out, out: [T, H, D].
        lse: [T, H].
        sinks: [H].
    """
    delta = (grad_out.to(lse.dtype) * out).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp_() * delta).sum(0)
