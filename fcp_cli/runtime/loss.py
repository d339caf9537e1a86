"""The loss whose gradient no plan can change: the sum of token losses / tokens of the global batch.

Every rank adds its own tokens' share and gradients are summed over ranks, so it does not matter which rank ran which
sequence with whom. A mean per group or per rank would weigh tokens by how the plan happened to pack them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fcp_cli.runtime.followed_step import IGNORED


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the labelled tokens' cross entropies, in at least fp32; 0 (with zero gradients) where none is.

    Args:
        logits: [1, tokens, vocabulary].
        labels: [1, tokens] int64, `IGNORED` where there is nothing to predict.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(precise.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_labels(tokens: Tensor) -> Tensor:
    """Return [n] the label of each token of one sequence: the next token, `IGNORED` at the end."""
    return torch.cat((tokens[1:], tokens.new_full((1,), IGNORED)))
