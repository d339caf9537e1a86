"""Plan-independent loss: the sum of token losses / number of trained tokens of the global batch.

Every rank adds its own tokens' share and gradients are summed over ranks, so the loss does not depend on how sequences
are distributed. A mean per group or per rank would weigh tokens by how the plan packed them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.runtime.choices import IGNORED

_GATHERED_SHARE = 0.9  # fraction of tokens with labels, up to which gathering their rows pays off


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labels:
    """Labels of one rank's tokens.

    Attributes:
        values: [1, tokens] int64, `IGNORED` if there is nothing to predict.
        rows: [labelled] int64 indices of tokens with labels; None if nearly all have one.
        weights: [1, tokens] factors on the tokens' losses, or None for 1.
    """

    values: Tensor
    rows: Tensor | None = None
    weights: Tensor | None = None


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the labelled tokens' cross entropies, in at least fp32; 0 (with zero gradients) without labels.

    Args:
        logits: [1, tokens, vocabulary].
        labels: [1, tokens] int64, `IGNORED` if there is nothing to predict.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(precise.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def head_loss_sum(hidden: Tensor, head: nn.Linear | Tensor, labels: Labels) -> Tensor:
    """Return the weighted `token_loss_sum` of a head's logits without materializing all of them.

    Args:
        hidden: [1, tokens, width], input of the head.
        head: a linear layer, or its weight [vocabulary, width]; it may be frozen, or tied to the embedding.
        labels: labels of the tokens.
    """
    weight, bias = (head, None) if isinstance(head, Tensor) else (head.weight, head.bias)
    if hasattr(weight, "device_mesh"):
        raise RunError(
            "the head's weight is sharded outside the model's forward; for a model of transformers, pass "
            "labels=microbatch.labels to the model and its loss to microbatch.normalised, else call loss_of inside the "
            "model's forward"
        )
    rows, values = hidden.flatten(0, 1), labels.values.flatten()
    weights = None if labels.weights is None else labels.weights.flatten()
    if labels.rows is not None:
        rows, values = rows.index_select(0, labels.rows), values.index_select(0, labels.rows)
        weights = None if weights is None else weights.index_select(0, labels.rows)
    return linear_token_loss_sum(rows, weight, bias, values, weights)


def labelled_rows(labels: Tensor) -> Tensor | None:
    """Return the indices [labelled] of tokens with labels, or None if skipping the others does not pay off."""
    rows = (labels[0] != IGNORED).nonzero().squeeze(1)
    return rows if len(rows) <= _GATHERED_SHARE * labels.shape[1] else None


def next_token_labels(tokens: Tensor) -> Tensor:
    """Return the next-token labels [n] of one sequence: the next token, `IGNORED` at the end."""
    return torch.cat((tokens[1:], tokens.new_full((1,), IGNORED)))


# Cross entropy of a linear head that materializes only some columns of the logits at a time.
#
# The logits of a large vocabulary are the largest tensor of a step: with fp32 copies for softmax and gradient some 2
# MB a token at 152k entries. Here the vocabulary is cut into blocks. Forward saves the log-sum-exp of each token, and
# backward recomputes a block's logits. With n labelled tokens, width W, vocabulary V and B columns per block:
#
#     forward    lse = logsumexp over blocks of hidden weight[block]^T;  loss = sum of lse - logit of the label
#     backward   g = (softmax - onehot) of the block [n, B];  dhidden += g weight[block];  dweight[block] = g^T hidden
#
# The alternative, both gradients in forward by chunks of tokens, saves recomputing the logits (a fourth of the head's
# arithmetic). But every chunk would add to a gradient of the whole weight: at 152k x 4,096 in fp32, 5 GB read and
# written per chunk, which takes an H100 about as long as that product (1.5 ms of memory traffic, 0.55 TFLOP). The
# gradient would also be held in fp32 from forward to backward. With vocabulary blocks each row of dweight is one
# product over all tokens, summed in fp32 inside it and written once in the weight's own type. Repeated additions only
# go to the far smaller dhidden. The order is that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language
# Models", without their kernels.

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


# Cross entropy of a linear head by kernels of other libraries, if installed and applicable.
#
# Like `chunked_token_loss_sum`, the fallback, they do not materialize logits, but they are faster on GPUs. Cut cross
# entropy runs in its exact variant, since the default skips small gradients.

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
