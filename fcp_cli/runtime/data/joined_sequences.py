"""Several sequences in one row of the manifest, for losses that compare sequences of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fcp_cli.runtime.loss.token_loss import next_token_labels


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JoinedSequences:
    """Sequences that `fetch` returns for one row, as an answer that is preferred and one that is not.

    They do not see each other: to the ring they are sequences of a pack. The row's length is their sum.

    Attributes:
        tokens: [n] of all of them, one after the other.
        labels: [n], each belonging to its token; -100 if it is not to be learned.
        lengths: tokens of each; their sum is n.
    """

    tokens: Tensor
    labels: Tensor
    lengths: tuple[int, ...]

    def next_labels(self) -> Tensor:
        """Return [n] the label after each token within its own sequence."""
        return torch.cat([next_token_labels(part) for part in torch.split(self.labels, list(self.lengths))])
