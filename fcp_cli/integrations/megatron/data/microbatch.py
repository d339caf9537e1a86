"""One micro-batch of the plan as a Megatron script sees it, and which one is running its forward."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcp_cli.integrations.megatron.data.ahead import Ahead
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.ring_attention.ring import Ring


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMicroBatch:
    """A rank's shard of one row of the plan.

    Attributes:
        row: the row in the plan.
        batch: the batch for the script's data iterator: tensors [1, tokens], and placeholders for the rest.
        ring: the ring on which its attention runs.
        positions: [tokens] int64, of each token within its own sequence.
        is_planned: [tokens] bool; padding is not.
        longest_tokens: the tokens of the row's longest sequence, with its padding; 1 if there is none.
        lengths: tokens of each sequence, without padding.
        owners: [tokens] int64, which of the sequences a token belongs to, and their number for padding; None if no
            loss is made of them.
        ahead: the tokens after each token, if the model predicts several.
        packed: the same for Transformer Engine, where that attends: Megatron's PackedSeqParams with a process group.
    """

    row: MicroBatch
    batch: Mapping[str, Any]
    ring: Ring
    positions: Tensor
    is_planned: Tensor
    longest_tokens: int
    lengths: tuple[int, ...] = ()
    owners: Tensor | None = None
    ahead: Ahead | None = None
    packed: Any = None

    @property
    def tokens(self) -> int:
        """Return the tokens of the shard, with padding."""
        return self.positions.shape[0]


current_microbatch: ContextVar[PlannedMicroBatch | None] = ContextVar("current_microbatch", default=None)
"""Set only while the script's forward step runs: backward functions were bound at forward."""
