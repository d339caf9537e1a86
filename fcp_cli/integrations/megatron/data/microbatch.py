"""A planned micro-batch in a Megatron script, and the current one."""

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
        row: row of the plan.
        batch: batch for the script's data iterator: tensors [1, tokens], and placeholders for the rest.
        ring: ring for its attention.
        positions: [tokens] int64, position of each token in its sequence.
        is_planned: [tokens] bool, False for padding.
        longest_tokens: length of the longest sequence, with padding; 1 if there is none.
        lengths: tokens of each sequence, without padding.
        owners: [tokens] int64, sequence index of each token, and the number of sequences for padding; None unless the
            router has a loss.
        ahead: tokens after each token, for multi-token prediction.
        packed: PackedSeqParams with a process group, if Transformer Engine computes attention.
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
        """Number of tokens in the shard, with padding."""
        return self.positions.shape[0]


current_microbatch: ContextVar[PlannedMicroBatch | None] = ContextVar("current_microbatch", default=None)
"""Set only while the script's forward step runs: backward functions were bound at forward."""
