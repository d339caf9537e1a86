"""Several sequences in one row of the manifest, for losses that compare sequences of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fcp_cli.runtime.loss.token_loss import next_token_labels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedSequences:
    """Sequences that `fetch` returns for one row, e.g. a preferred and a rejected answer.

    They do not attend to each other: to the ring they are separate sequences of a pack. The row's length is their sum.

    Attributes:
        tokens: [n] all sequences, concatenated.
        labels: [n] label of each token itself, not of the next one; -100 for tokens that are not trained.
        lengths: tokens of each sequence; their sum is n.
    """

    tokens: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def next_labels(self) -> Tensor:
        """Return the next-token labels [n], each within its own sequence."""
        return torch.cat([next_token_labels(part) for part in torch.split(self.labels, list(self.lengths))])
