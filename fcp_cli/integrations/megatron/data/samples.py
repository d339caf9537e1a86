"""Reads a rank's planned samples from the data set behind the script's data iterator.

Every data-parallel rank of Megatron has a DataLoader over the whole data set, with a sampler that knows the number of
consumed samples. The iterator itself is not advanced: each rank reads its planned rows from the data set and keeps the
tokens of its shard. The step of the plan follows from the consumed samples, so Megatron's own checkpoint is enough to
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron.data.ahead import Ahead, look_ahead
from fcp_cli.masks import CAUSAL, Mask, MaskRows, segments
from fcp_cli.plan.pricing.padding import padded_tokens, padding_multiple
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.data.followed_step import require_length
from fcp_cli.runtime.data.planned_masks import require_same
from fcp_cli.runtime.data.steps import LoadedStep
from fcp_cli.runtime.layouts.layout import ShardLayout, shard_layout

TOKENS = "tokens"
LABELS = "labels"
LOSS_MASK = "loss_mask"
POSITIONS = "position_ids"
ATTENTION_MASK = "attention_mask"
MASK = "mask"
_ENDS = "cu_seqlens"
_AHEAD = (TOKENS, LABELS, LOSS_MASK, POSITIONS)
# Keys with the sequence ends of a pack, by data set; those that include padding first, since they index the tensors.
_ENDS_OF_PACKS = ("cu_seqlens_q_padded", "cu_seqlens_padded", "cu_seqlens_q", _ENDS)

# Random samplers use their own order, and count samples ahead of training.
_RANDOM_SAMPLER = "MegatronPretrainingRandomSampler"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """A script's data set and how far it is consumed.

    Attributes:
        dataset: data set indexed by manifest row; an item maps "tokens" and other names to tensors of equal length.
        collate: collate function of the data loader, from a list of items to a batch.
        consumed: number of samples trained before.
        masks: masks of all rows, if the plan records them.
        manifest: name of the plan's manifest, for messages.
    """

    dataset: Any
    collate: Callable[[Sequence[Mapping[str, Tensor]]], Mapping[str, Any]]
    consumed: int
    masks: MaskRows | None = None
    manifest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalShard:
    """One rank's shard of one row of the plan, in host memory.

    Attributes:
        row: row of the plan.
        member: index of this rank in its group.
        layout: assignment of tokens to members.
        batch: batch for the script's data iterator.
        positions: [tokens] int64, position of each token in its sequence.
        is_planned: [tokens] bool, False for padding.
        lengths: tokens of each sequence, without padding; an item of the data set may be a pack of several.
        ahead: tokens after each token, if requested.
    """

    row: MicroBatch
    member: int
    layout: ShardLayout
    batch: Mapping[str, Any]
    positions: Tensor
    is_planned: Tensor
    lengths: tuple[int, ...]
    ahead: Ahead | None = None

    @property
    def owners(self) -> Tensor:
        """Sequence index of each token, [tokens] int64; the number of sequences for padding."""
        count = len(self.lengths)
        of_pack = torch.arange(count).repeat_interleave(torch.tensor(self.layout.lengths, dtype=torch.int64))
        owners = torch.full_like(self.positions, count)
        held = of_pack[torch.from_numpy(self.layout.index(self.member))]
        owners[: held.shape[0]] = held
        return owners.masked_fill(~self.is_planned, count)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> LocalShard:
        return replace(
            self,
            batch={name: function(v) if isinstance(v, Tensor) else v for name, v in self.batch.items()},
            positions=function(self.positions),
            is_planned=function(self.is_planned),
            ahead=None if self.ahead is None else self.ahead.mapped(function),
        )


LocalStep: TypeAlias = LoadedStep[LocalShard]


def find_samples(data_iterator: Any) -> Samples:
    """Find the data set and the consumed samples of a data iterator; raise RunError if it hides them."""
    inner = source_of(data_iterator)
    dataset = getattr(inner, "_dataset", getattr(inner, "dataset", None))  # DataLoader or its iterator
    if dataset is None or not hasattr(dataset, "__getitem__"):
        raise RunError(
            f"the data iterator is a {type(inner).__name__}, behind which no data set with random access can be found; "
            "give Megatron iter(DataLoader(...)) on every rank, tensor-parallel ones too (--dataloader-type single)"
        )
    sampler = _sampler(inner)
    consumed = getattr(sampler, "consumed_samples", None)
    if consumed is None or type(sampler).__name__ == _RANDOM_SAMPLER:
        raise RunError(
            f"the data loader's sampler, a {type(sampler).__name__}, does not show where training resumes in the plan; "
            "use one with a fixed attribute consumed_samples, like MegatronPretrainingSampler"
        )
    collate: Any = getattr(inner, "_collate_fn", None) or inner.collate_fn
    first = dataset[0]
    if isinstance(first, Mapping) and TOKENS not in first and TOKENS in collate([first]):
        dataset, collate = _Collated(dataset, collate), _batch_of_one
    return Samples(dataset=dataset, collate=collate, consumed=int(consumed))


def source_of(data_iterator: Any) -> Any:
    """Unwrap Megatron's iterators: return the inner iterator or loader."""
    inner = data_iterator
    # Wrappers of megatron.core.rerun_state_machine, and of Bridge's virtual stages.
    while (wrapped := getattr(inner, "iterable", getattr(inner, "iterator", None))) is not None:
        inner = wrapped
    return inner


class _Collated:
    """A data set whose items only have tokens once collated, e.g. Megatron-Bridge's packed sequences."""

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Mapping[str, Any]]) -> None:
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        batch = self._collate([self._dataset[at]])
        return {name: value[0] for name, value in batch.items() if isinstance(value, Tensor) and len(value) == 1}


def _batch_of_one(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.unsqueeze(0) for name, tensor in items[0].items()}


def _sampler(iterator: Any) -> Any:
    """Return the custom batch sampler behind a DataLoader's iterator, else its sampler."""
    index_sampler = iterator._index_sampler
    if hasattr(index_sampler, "consumed_samples"):
        return index_sampler
    return getattr(index_sampler, "sampler", index_sampler)


def load_shard(
    row: MicroBatch,
    samples: Samples,
    *,
    rank: int,
    multiple: int = 1,
    even_chunks: bool = False,
    places_ahead: int = 0,
) -> LocalShard:
    """Load a rank's shard of one row, padded with zeros, which no planned token attends to and whose loss mask is 0.

    A rank without tokens gets padding only, so that it joins every forward and backward with weight zero.

    Args:
        row: row of the plan in which this rank is a member.
        samples: data set of its sequences.
        rank: rank of the plan.
        multiple: pad shards to a multiple of this many tokens, for sequence parallelism.
        even_chunks: pad each sequence to equal chunks of that multiple, for rings other than fcp's.
        places_ahead: number of following tokens to look up, for multi-token prediction.
    """
    member = row.ranks.index(rank)
    packs = [_sequences(samples, at, length) for at, length in zip(row.sequences, row.lengths, strict=True)]
    items = [sequence for pack, _ in packs for sequence in pack]
    lengths = padded = tuple(item[TOKENS].shape[-1] for item in items)
    if even_chunks:
        _require_no_mask(row, packs)
        multiple = padding_multiple(multiple)
        padded = tuple(padded_tokens(lengths, row.degree, multiple).tolist())
    masks = tuple(mask for pack, mask in packs for _ in pack)
    layout = shard_layout(padded, row.degree, row.heads_degree, masks)
    positions = torch.from_numpy(layout.position_ids(member))
    index = torch.from_numpy(layout.index(member)) if row.degree > 1 else None
    padding = max(-(-len(positions) // multiple), 1) * multiple - len(positions)
    ends = [most - length for most, length in zip(padded, lengths, strict=True)]
    if not items:  # idle row: an item cut to 0 tokens provides names and dtypes
        items, ends = _sequences(samples, 0, 0)[0], [0]

    def shard_of(whole: Sequence[Tensor]) -> Tensor:
        ended = [_ended(tensor, end) for tensor, end in zip(whole, ends, strict=True)]
        pack = ended[0] if len(ended) == 1 else torch.cat(ended, dim=-1)
        return _ended(pack if index is None else pack.index_select(-1, index), padding)

    shard = {name: shard_of([item[name] for item in items]) for name in items[0]}
    positions = _ended(positions, padding)
    # Keep the data set's positions if they have several axes (mRoPE), or in packs, where they may run on.
    if shard.get(POSITIONS, positions).dim() == 1 and len(items) <= max(len(packs), 1):
        shard[POSITIONS] = positions
    # Placeholder for scripts that pass a mask on; the plan's layout determines masking.
    shard[ATTENTION_MASK] = torch.zeros(1, 1, 1, dtype=torch.bool)
    return LocalShard(
        row=row,
        member=member,
        layout=layout,
        batch=samples.collate([shard]),
        positions=positions,
        is_planned=shard_of([torch.ones(item[TOKENS].shape[-1], dtype=torch.bool) for item in items]),
        lengths=lengths,
        ahead=look_ahead(items, _AHEAD, LOSS_MASK, places_ahead, shard_of) if places_ahead else None,
    )


def _require_no_mask(row: MicroBatch, packs: Sequence[tuple[list[dict[str, Tensor]], Mask]]) -> None:
    for at, (_, mask) in zip(row.sequences, packs, strict=True):
        if not mask.is_causal:
            raise RunError(
                f"row {at} of the data set has a mask, which rings of equal chunks do not follow; set "
                "FCP_ATTENTION=ring for fcp's own"
            )


def _ended(tensor: Tensor, end: int) -> Tensor:
    """Append `end` zeros to a tensor's last dimension; skips torch's slow pad if there are none."""
    return pad(tensor, (0, end)) if end else tensor


def _sequences(samples: Samples, at: int, length: int) -> tuple[list[dict[str, Tensor]], Mask]:
    """Return the per-token tensors of each sequence in an item, cut to the plan's length, and the item's mask.

    The mask is causal, unless an item of one sequence has its own.
    """
    found = samples.dataset[at]
    if not isinstance(found, Mapping) or TOKENS not in found:
        names = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise RunError(
            f"row {at} of the data set has no {TOKENS!r}, only {names}; its items must be dictionaries with it"
        )
    tokens = len(found[TOKENS])
    require_length(tokens, length, row=at)
    tensors = {name: torch.as_tensor(value) for name, value in found.items() if name not in (ATTENTION_MASK, MASK)}
    whole = {name: tensor for name, tensor in tensors.items() if tensor.dim() and tensor.shape[-1] == tokens}
    mask = mask_of(found, at, tokens)
    if samples.masks is not None:
        planned = samples.masks.mask(at)
        if not mask.is_causal:
            require_same(mask, planned, at, tokens, samples.manifest)
        mask = planned
    # Tokens beyond the plan's length may be padding, even if the mask cannot be cut.
    if length and (misfit := mask.misfit(tokens if mask.can_be_cut else length)):
        raise RunError(f"row {at} of the data set has {tokens} tokens, {length} in the plan, but {misfit}")
    ends = sequence_ends(found, at, tokens, length) if mask.is_causal else [length]
    cut = [{name: tensor[..., first:end] for name, tensor in whole.items()} for first, end in pairwise((0, *ends))]
    return cut, mask


def mask_of(item: Mapping[str, Any], at: int, tokens: int) -> Mask:
    """Return the mask of an item: its `mask`, else bidirectional spans in its attention mask, else causal."""
    mask: Mask | None = item.get(MASK)
    return _spans_by(torch.as_tensor(item.get(ATTENTION_MASK, ())), at, tokens) if mask is None else mask


def _spans_by(mask: Tensor, at: int, tokens: int) -> Mask:
    """Return the mask of bidirectional spans of an attention mask [tokens, tokens]; causal if there are none."""
    if mask.dtype != torch.bool or mask.shape[-2:] != (tokens, tokens) or mask.numel() != tokens * tokens:
        return CAUSAL
    hidden = mask.reshape(tokens, tokens)
    seen = hidden if bool(hidden[0, 0]) else ~hidden  # in some masks true means visible
    opened = seen.diagonal(1)
    if not opened.any():
        return CAUSAL
    turns = torch.cat((opened.new_zeros(1), opened, opened.new_zeros(1))).diff().nonzero().flatten().tolist()
    spans = [(first, last + 1) for first, last in zip(turns[::2], turns[1::2], strict=True)]
    expected = torch.ones_like(seen).tril()
    for first, stop in spans:
        expected[first:stop, first:stop] = True
    if not torch.equal(seen, expected):
        raise RunError(
            f"row {at} of the data set has an {ATTENTION_MASK} that is not causal, but for spans whose tokens see each "
            f"other; give the item a mask of fcp_cli.masks as {MASK!r}"
        )
    return segments(spans)


def sequence_ends(item: Mapping[str, Any], at: int, tokens: int, length: int) -> list[int]:
    """Return the ends of the sequences in an item, the last of which is the planned length.

    An item is a pack if it has `cu_seqlens` (e.g. conversations under `--sft`), or an attention mask that separates
    documents (`--reset-attention-mask`).
    """
    if not length:
        return [0]
    packed = next((item[name] for name in _ENDS_OF_PACKS if item.get(name) is not None), None)
    mask, positions = (torch.as_tensor(item.get(name, ())) for name in (ATTENTION_MASK, POSITIONS))
    ends = [length]
    if packed is not None:
        ends = _ends_in(torch.as_tensor(packed).flatten().tolist(), at, length)
    elif mask.dtype == torch.bool and mask.shape[-2:] == (tokens, tokens):
        ends = _ends_by(mask.reshape(tokens, tokens), at, length)
    if len(ends) == 1 and positions.shape == (tokens,) and int(positions[length - 1]) != length - 1:
        raise RunError(
            f"row {at} of the data set has {POSITIONS} that begin anew, but neither {_ENDS} nor an {ATTENTION_MASK} "
            "that say which tokens see each other; drop --reset-position-ids, or make each document an item, and "
            "a row of the manifest"
        )
    return ends


def _ends_in(ends: list[int], at: int, length: int) -> list[int]:
    """Return the sequence ends in `cu_seqlens`, which may have repeated ends or a tail of -1."""
    while ends and ends[-1] == -1:
        ends = ends[:-1]
    if ends[:1] != [0] or ends != sorted(ends):
        raise RunError(f"row {at} of the data set has {_ENDS} that do not ascend from 0; they begin {ends[:8]}")
    # Cut at the planned length; the set removes repeated ends.
    return sorted({min(end, length) for end in (*ends, length)} - {0})


def _ends_by(mask: Tensor, at: int, length: int) -> list[int]:
    """Return the document ends in an attention mask [tokens, tokens], in which True hides a token."""
    ends = [length]
    while True:
        hidden = mask[ends[-1] - 1, : ends[-1]]
        first = int(hidden.sum())  # start of the document: the first token that its last one sees
        if first in (0, len(hidden)):  # in some masks true means visible
            return ends[::-1]
        if not hidden[:first].all():
            raise RunError(
                f"row {at} of the data set has an {ATTENTION_MASK} by which token {ends[-1] - 1} does not see all "
                "tokens of one document up to itself; a plan's attention is causal, within documents"
            )
        ends.append(first)
