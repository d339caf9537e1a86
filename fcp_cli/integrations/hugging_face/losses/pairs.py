"""Preference pairs (chosen and rejected answers) on a ring, for TRL's unmodified loss code.

TRL calls its models with the same padded batch as without a plan. Hooks replace it with this rank's tokens, and gather
the fused head's results of all ranks back into the shape of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fcp_cli.runtime.communication.transport import drive
from fcp_cli.runtime.loss.labels import IGNORED
from fcp_cli.runtime.ring_attention.ring import Ring
from fcp_cli.runtime.session.microbatch import LocalMicroBatch

# Per-token outputs of the fused head; only the first has a gradient.
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
_current: ContextVar[PairPack | None] = ContextVar("pairs", default=None)


class PairPack:
    """A micro-batch of pairs: its sequences alternate between chosen and rejected answers.

    Attributes:
        pairs: number of pairs.
    """

    def __init__(self, microbatch: LocalMicroBatch) -> None:
        self.microbatch = microbatch
        self._ring: Ring = microbatch.ring
        lengths = np.asarray(self._ring.layout.lengths, dtype=np.int64)
        self.pairs = len(lengths) // 2
        self._longest = int(lengths.max(initial=1))
        # TRL's batch has all chosen answers first. The last token of a sequence predicts nothing.
        rows = np.arange(len(lengths)) // 2 + self.pairs * (np.arange(len(lengths)) % 2)
        self._lengths = np.empty_like(lengths)
        self._lengths[rows] = lengths
        places = np.concatenate([np.arange(length) for length in lengths]) if len(lengths) else lengths
        predicts = places < np.repeat(lengths, lengths) - 1
        flat = np.repeat(rows, lengths) * (self._longest - 1) + places
        self._read = torch.from_numpy(np.flatnonzero(predicts))
        self._written = torch.from_numpy(flat[predicts])
        self._mask: Tensor | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the pack that the model hooks use."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def inputs(self) -> dict[str, Tensor]:
        """Return the batch [2 * pairs, tokens] for TRL's loss, with placeholder tokens."""
        device = self.microbatch.input_ids.device
        size = (2 * self.pairs, self._longest)
        lengths = torch.from_numpy(self._lengths).to(device)
        attention = (torch.arange(self._longest, device=device) < lengths[:, None]).long()
        # From the loader, not gathered: a gather before a step's first forward, in which DDP broadcasts buffers, could
        # deadlock.
        assert self.microbatch.pack_labels is not None
        completion = torch.zeros(size, dtype=torch.int64)
        completion[:, 1:] = self._placed((self.microbatch.pack_labels != -100).long())
        return {
            "input_ids": torch.zeros(size, dtype=torch.int64, device=device),
            "attention_mask": attention,
            "completion_mask": completion.to(device),
        }

    def whole(self, output: Any) -> Any:
        """Convert a fused head's output from fields [1, own tokens] to fields [2 * pairs, tokens - 1]."""
        if not self.pairs:
            return output
        names = [name for name in _FIELDS if getattr(output, name) is not None]
        own = [getattr(output, name) for name in names]
        found = {
            name: self._placed(values).to(part.dtype)
            for name, part, values in zip(names, own, self._gathered(own), strict=True)
        }
        return replace(output, loss=None, **found)

    def labels(self) -> Tensor:
        """Return labels [2 * pairs, tokens] for `two_way_logits`: 0 for each labeled token, else ignored."""
        labels = self.inputs()["completion_mask"] - 1
        return labels.masked_fill(labels < 0, IGNORED)

    def two_way_logits(self, log_probs: Tensor) -> Tensor:
        """Return logits [2 * pairs, tokens, 2]: one for each token's label and one for all other tokens together.

        Their log-softmax is the log-probability of the label, with its gradient, for any vocabulary size.

        Args:
            log_probs: [1, own tokens], 0 for tokens without a label.
        """
        [whole] = self._gathered([log_probs])
        logits = two_way(self._placed(whole), self.labels()[:, 1:] != IGNORED)
        return torch.cat((logits, torch.zeros_like(logits[:, :1])), dim=1)

    def _placed(self, values: Tensor) -> Tensor:
        """Scatter values [tokens of the pack] into the shape of the batch."""
        read, written = self._read.to(values.device), self._written.to(values.device)
        size = (2 * self.pairs, self._longest - 1)
        return values.new_zeros(size).flatten().index_copy(0, written, values[read]).view(size)

    def _gathered(self, own: list[Tensor]) -> list[Tensor]:
        """Gather tensors [1, own tokens] over the ring to [tokens of the pack]; only own values have a gradient."""
        ring, layout = self._ring, self._ring.layout
        index = torch.from_numpy(layout.index(ring.index)).to(own[0].device)
        held = layout.tokens(ring.index)
        whole = own[0].new_zeros((len(own), layout.total_tokens))
        buffer = own[0].new_zeros((len(own), layout.most_tokens))
        for place, part in enumerate(own):
            buffer[place, :held] = part[0, :held].detach().to(buffer.dtype)
        for member, values in enumerate(drive(ring.channel.gather("rows", buffer))):
            if member != ring.index:
                places = torch.from_numpy(layout.index(member)).to(whole.device)
                whole[:, places] = values[:, : layout.tokens(member)]
        return [whole[place].index_copy(0, index, part[0, :held].to(whole.dtype)) for place, part in enumerate(own)]


def two_way(log_probs: Tensor, is_learned: Tensor) -> Tensor:
    """Return logits [..., 2] whose log-softmax at index 0 is the given log-probability, with its gradient."""
    others = torch.log((-torch.expm1(log_probs.masked_fill(~is_learned, -1.0))).clamp(min=1e-12))
    return torch.stack((log_probs, others), dim=-1).masked_fill(~is_learned[..., None], 0.0)


def current_pairs() -> PairPack | None:
    """Return the pack of pairs that a loss currently runs on, or None."""
    return _current.get()


def hook_pairs(model: nn.Module) -> None:
    """Make a model with TRL's fused head run on the current micro-batch of pairs, if any."""
    model.register_forward_pre_hook(_take_own_tokens, with_kwargs=True, prepend=True)
    model.register_forward_hook(_give_whole_batch)


def _take_own_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    pack = _current.get()
    if pack is None or not kwargs.get("fused_lm_head"):
        return None
    microbatch = pack.microbatch
    replaced = {"attention_mask": None, "labels": None, "shift_labels": microbatch.labels}
    own = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
    return (), {**kwargs, **replaced, **own}


def _give_whole_batch(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    pack = _current.get()
    return output if pack is None or getattr(output, "log_probs", None) is None else pack.whole(output)
