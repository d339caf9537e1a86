"""Plan-independent loss: the sum of token losses / number of trained tokens of the global batch.

Every rank adds its own tokens' share and gradients are summed over ranks, so the loss does not depend on how sequences
are distributed. A mean per group or per rank would weigh tokens by how the plan packed them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.runtime.loss.fused_loss import linear_token_loss_sum
from fcp_cli.runtime.loss.labels import IGNORED

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
