"""Cross entropy of a linear head that materializes only some columns of the logits at a time.

The logits of a large vocabulary are the largest tensor of a step: with fp32 copies for softmax and gradient some 2 MB a
token at 152k entries. Here the vocabulary is cut into blocks. Forward saves the log-sum-exp of each token, and backward
recomputes a block's logits. With n labelled tokens, width W, vocabulary V and B columns per block:

    forward    lse = logsumexp over blocks of hidden weight[block]^T;  loss = sum of lse - logit of the label
    backward   g = (softmax - onehot) of the block [n, B];  dhidden += g weight[block];  dweight[block] = g^T hidden

The alternative, both gradients in forward by chunks of tokens, saves recomputing the logits (a fourth of the head's
arithmetic). But every chunk would add to a gradient of the whole weight: at 152k x 4,096 in fp32, 5 GB read and written
per chunk, which takes an H100 about as long as that product (1.5 ms of memory traffic, 0.55 TFLOP). The gradient would
also be held in fp32 from forward to backward.
With vocabulary blocks each row of dweight is one product over all tokens, summed in fp32 inside it and written once in
the weight's own type. Repeated additions only go to the far smaller dhidden. The order is that of Wijmans et al., "Cut
Your Losses in Large-Vocabulary Language Models", without their kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fcp_cli.runtime.loss.labels import IGNORED

LOGITS_BYTES = 256 << 20
"""Most bytes of a block of logits in fp32; in bf16 a second block of half the size exists for a moment."""

_COLUMNS = 256  # blocks are multiples of this, the tile size of matrix product kernels


def chunked_token_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the sum of cross entropies of hidden weight^T + bias, 0-d in at least fp32; 0 without labels.

    Its gradient equals that of the loss over whole logits. Under autocast the products use its data type.

    Args:
        hidden: [n, W].
        weight: [V, W]; may be frozen.
        bias: [V] or None.
        labels: [n] int64, `IGNORED` if there is nothing to predict.
        weights: [n] factors on the cross entropies, or None for 1.
    """
    dtype = product_dtype(hidden)
    counted: Tensor = labels != IGNORED
    factors = counted if weights is None else counted * weights.to(torch.promote_types(dtype, torch.float32))
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden.to(dtype), weight, bias, labels, factors)  # type: ignore[no-untyped-call]
    return loss


def block_columns(tokens: int, vocabulary: int) -> int:
    """Return the number of columns of the logits to materialize at a time."""
    fitting = max(LOGITS_BYTES // (4 * max(tokens, 1)), 1)
    return min(fitting if fitting < _COLUMNS else fitting // _COLUMNS * _COLUMNS, vocabulary)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, factors: Tensor
    ) -> Tensor:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        lse = hidden.new_full(labels.shape, -torch.inf, dtype=precise)
        label_logits = hidden.new_zeros(labels.shape, dtype=precise)
        with _without_autocast(hidden):
            for block in _blocks(hidden, weight):
                logits = _logits(hidden, weight, bias, block).to(precise)
                column, inside = _place_of_labels(labels, block)
                label_logits += torch.where(inside, logits.gather(1, column).squeeze(1), 0.0)
                lse = torch.logaddexp(lse, _logsumexp_(logits))
                del logits  # free it before the next block's is allocated
        ctx.save_for_backward(hidden, weight, bias, labels, factors, lse)
        return ((lse - label_logits) * factors).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, factors, lse = ctx.saved_tensors
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        dhidden = torch.zeros_like(hidden, dtype=lse.dtype) if for_hidden else None
        dweight = torch.empty_like(weight) if for_weight else None
        dbias = torch.empty_like(bias) if for_bias else None
        share = (grad * factors).unsqueeze(1)
        with _without_autocast(hidden):
            for block in _blocks(hidden, weight):
                dlogits = _logits(hidden, weight, bias, block).to(lse.dtype).sub_(lse.unsqueeze(1)).exp_()
                column, inside = _place_of_labels(labels, block)
                dlogits.scatter_add_(1, column, -inside.to(lse.dtype).unsqueeze(1)).mul_(share)
                if dbias is not None:
                    dbias[block] = dlogits.sum(0)
                dlogits = dlogits.to(hidden.dtype)
                if dhidden is not None:
                    _add_product_(dhidden, dlogits, weight[block].to(hidden.dtype))
                if dweight is not None:
                    dweight[block] = dlogits.T @ hidden
                del dlogits
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias, None, None


def _blocks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    step = block_columns(len(hidden), len(weight))
    return (slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    """Return the logits [n, B]; casts the weight block by block to avoid a copy of all of it."""
    return functional.linear(
        hidden, weight[block].to(hidden.dtype), None if bias is None else bias[block].to(hidden.dtype)
    )


def _place_of_labels(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Return each label's column in the block, [n, 1] (any column if it is outside), and whether it is inside, [n]."""
    inside = (labels >= block.start) & (labels < block.stop)
    return (labels - block.start).clamp(0, block.stop - block.start - 1).unsqueeze(1), inside


def _logsumexp_(logits: Tensor) -> Tensor:
    """Return the log-sum-exp [n] of each row; overwrites the logits to avoid torch.logsumexp's copy."""
    if not logits.numel():
        return logits.sum(1)
    highest = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)  # rows of -inf, from a bias, must not give NaN
    return logits.sub_(highest.unsqueeze(1)).exp_().sum(1).log_().add_(highest)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """Return the data type of the products: that of autocast if enabled, except for fp64."""
    device_type = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return hidden.dtype
    return torch.get_autocast_dtype(device_type)


def _without_autocast(hidden: Tensor) -> AbstractContextManager[Any]:
    device_type = hidden.device.type
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)
