"""Batches of a plan in a Megatron script: a rank's planned samples, from the data set behind its data iterator.

Every data-parallel rank of Megatron has a DataLoader over the whole data set, with a sampler that knows the number of
consumed samples. The iterator itself is not advanced: each rank reads its planned rows from the data set and keeps the
tokens of its shard. The step of the plan follows from the consumed samples, so Megatron's own checkpoint is enough to
resume.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import pad

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import require
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.setup import held_tokens, padded_tokens, padding_multiple
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.cursor import PlanCursor, Prefetched, RankMicroBatches, note_follower, require_length
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.loader import load_steps, pinned, require_same
from fcp_cli.runtime.ring import Ring
from fcp_cli.util.masks import CAUSAL, Mask, MaskRows, segments

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
_STEPS_AHEAD = 2  # that are prefetched


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
        of_pack = torch.arange(count, device="cpu").repeat_interleave(
            torch.tensor(self.layout.lengths, dtype=torch.int64, device="cpu")
        )
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


LocalMicroBatches: TypeAlias = RankMicroBatches[LocalShard]


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
    shard[ATTENTION_MASK] = torch.zeros(1, 1, 1, dtype=torch.bool, device="cpu")
    return LocalShard(
        row=row,
        member=member,
        layout=layout,
        batch=samples.collate([shard]),
        positions=positions,
        is_planned=shard_of([torch.ones(item[TOKENS].shape[-1], dtype=torch.bool, device="cpu") for item in items]),
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
    tensors = {
        name: torch.as_tensor(value, device="cpu")
        for name, value in found.items()
        if name not in (ATTENTION_MASK, MASK)
    }
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
    return _spans_by(torch.as_tensor(item.get(ATTENTION_MASK, ()), device="cpu"), at, tokens) if mask is None else mask


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
            f"other; give the item a mask of fcp_cli.util.masks as {MASK!r}"
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
    mask, positions = (torch.as_tensor(item.get(name, ()), device="cpu") for name in (ATTENTION_MASK, POSITIONS))
    ends = [length]
    if packed is not None:
        ends = _ends_in(torch.as_tensor(packed, device="cpu").flatten().tolist(), at, length)
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


def padding_report(plan: Path, metadata: PlanMetadata, *, tensor_parallel: int) -> str:
    """Return the share of padding in a plan, for the start-up log line; reads the whole plan.

    Args:
        plan: plan file.
        metadata: metadata of the plan.
        tensor_parallel: devices over which sequence parallelism divides a rank's tokens; 1 without it.
    """
    needed = padding_multiple(tensor_parallel)
    tokens = held = 0
    for step in PlanReader(plan).steps():
        tokens += int(step.tokens.sum())
        held += int(held_tokens(step, needed).sum())
    share = f"{held / max(tokens, 1) - 1:.1%} padding"
    if metadata.padding_multiple is not None and metadata.padding_multiple % needed == 0:
        return f"{share}, which the plan counts"
    devices = f" --tensor-parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    return f"{share}, which the plan does not count ('fcp plan --padded-rings{devices}' does)"


# Following tokens of a shard, for multi-token prediction.
#
# At the end of a chunk, the following tokens belong to other ranks. Every rank reads whole sequences, so it takes
# them from there, without communication.


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """A shard's per-token values 1, 2, ... places ahead in their sequence; 0 beyond its end.

    Attributes:
        values: values by name, [places, ..., tokens].
        ratio: [places, tokens], per sequence: (tokens with a loss) / (tokens with a loss that many places ahead).
        counts: mean tokens with a loss 0, 1, 2, ... places ahead, per sequence of the row.
    """

    values: Mapping[str, Tensor]
    ratio: Tensor
    counts: tuple[float, ...]

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Ahead:
        """Apply a function (pin, or move to a device) to every tensor."""
        values = {name: function(tensor) for name, tensor in self.values.items()}
        return replace(self, values=values, ratio=function(self.ratio))


def look_ahead(
    items: Sequence[Mapping[str, Tensor]],
    names: Sequence[str],
    mask: str,
    places: int,
    shard_of: Callable[[Sequence[Tensor]], Tensor],
) -> Ahead:
    """Return the tokens after those of a shard.

    Args:
        items: whole sequences of the row.
        names: names of the wanted values; missing ones are skipped.
        mask: name of the loss mask; without one, every token has a loss.
        places: number of places to look ahead.
        shard_of: slices the shard out of whole sequences.
    """
    masks = [
        item[mask] if mask in item else torch.ones(next(iter(item.values())).shape[-1], device="cpu") for item in items
    ]
    counts = [[float(_moved(one, place).sum()) for one in masks] for place in range(places + 1)]
    # At least 1, for sequences too short to have a loss that far ahead; their weight is unused.
    ratios = [
        [one.new_full(one.shape, own / max(ahead, 1.0)) for one, own, ahead in zip(masks, counts[0], row, strict=True)]
        for row in counts[1:]
    ]
    values = {
        name: torch.stack([shard_of([_moved(item[name], place + 1) for item in items]) for place in range(places)])
        for name in names
        if name in items[0]
    }
    ratio = torch.stack([shard_of(row) for row in ratios])
    return Ahead(values=values, ratio=ratio, counts=tuple(sum(row) / len(items) for row in counts))


def _moved(tensor: Tensor, places: int) -> Tensor:
    """Shift per-token values towards the beginning of the sequence, padding with zeros."""
    return pad(tensor[..., places:], (0, min(places, tensor.shape[-1])))


class PlannedData:
    """Planned steps of this process. Every process of a replica uses it, even if its script reads no data.

    Args:
        plan, metadata: plan file and its metadata.
        load: `load_shard`, bound to this rank.
        rank: rank of the plan.
        device: device of this process.
        ascending: whether to keep the ranks of groups in ascending order.
    """

    def __init__(
        self,
        plan: Path,
        metadata: PlanMetadata,
        load: Callable[[MicroBatch, Samples], LocalShard],
        *,
        rank: int,
        device: torch.device,
        ascending: bool,
    ) -> None:
        self._plan, self._metadata, self._load = plan, metadata, load
        self._rank, self._device, self._ascending = rank, device, ascending
        self._replica = parallel_state.get_model_parallel_group()
        self._shares_data: bool | None = None
        self._iterator: Any = None
        self._steps: Prefetched[LocalMicroBatches] | None = None
        self._current: LocalMicroBatches | None = None
        self._next_step = 0

    def next_step(self, data_iterator: Any) -> LocalMicroBatches:
        """Return the next step, read here, or broadcast by the process of this replica that reads data."""
        if self._shares_data is None:
            self._shares_data = shares_data(data_iterator, self._replica, self._device)
        read = partial(self._read, data_iterator)
        if not self._shares_data:
            return read()
        note_follower(self._plan)  # processes that receive the step never read the plan file
        step = share(read, self._replica)
        return pinned(step) if self._device.type == "cuda" else step

    def _read(self, data_iterator: Any) -> LocalMicroBatches:
        if data_iterator is not self._iterator or self._steps is None:
            self._open(data_iterator)
        assert self._steps is not None
        # Megatron's rerun state machine repeats a step to detect hardware faults.
        if getattr(data_iterator, "replaying", False) and self._current is not None:
            return self._current
        step = next(self._steps, None)
        if step is None:
            raise RunError(
                f"the plan {self._plan} ends after {self._metadata.steps} steps, but the script trains on; plan more "
                "with --epochs"
            )
        self._current, self._next_step = step, step.step + 1
        return step

    def _open(self, data_iterator: Any) -> None:
        """Start reading at the step after the samples that the script's sampler has consumed."""
        planned, manifest = self._metadata.masks, self._metadata.manifest
        masks = None if planned is None else planned.of_rows(manifest.rows)
        samples = replace(find_samples(data_iterator), masks=masks, manifest=manifest.name)
        step = self._first_step(samples)
        if len(samples.dataset) < manifest.rows:
            raise RunError(
                f"the script's data set has {len(samples.dataset)} samples, but the plan's manifest "
                f"{manifest.name} has {manifest.rows} rows; build the manifest from this data set"
            )
        if self._steps is not None:
            self._steps.close()
        # ahead=0: the loader thread below prefetches.
        cursor = PlanCursor(self._plan, self._rank, first_step=step, ahead=0, ascending=self._ascending)

        def begin(row: MicroBatch, _: Sequence[MicroBatch]) -> Callable[[], LocalShard]:
            return partial(self._load, row, samples)

        loaded = load_steps(cursor, begin, device=self._device)
        self._steps = Prefetched(loaded, depth=_STEPS_AHEAD, name="fcp-loader")
        self._iterator, self._next_step = data_iterator, step

    def _first_step(self, samples: Samples) -> int:
        """Return the step of the plan after the consumed samples; raise RunError if they are not whole steps."""
        size = self._metadata.global_batch_size
        step, rest = divmod(samples.consumed, size)
        if rest:
            raise RunError(
                f"{samples.consumed} samples were consumed, not a multiple of the plan's global batch of {size}; "
                "resume from a checkpoint that was trained under this plan"
            )
        if self._iterator is not None and step != self._next_step:
            raise RunError(
                f"the script's new data loader starts at sample {samples.consumed} (step {step} of the plan), but step "
                f"{self._next_step} comes next; a plan's epochs are one sequence of steps, so keep counting samples"
            )
        return step


# Batches of scripts that read data on one process of a replica only, e.g. Megatron-LM's `pretrain_gpt.py`.
#
# There, the first tensor-parallel process broadcasts batches of a static length; middle stages of a pipeline read
# none. Under a plan, lengths differ, so the first process of a replica broadcasts its whole step, from which each
# process takes its batches.

_HOOKED = "get_batch_on_this_tp_rank"
# Up to 0.18, it reads from an iterator; from 0.19 on, it gets the first process's batch.
_MODULES = ("megatron.training.utils", "megatron.core.utils")
# In the order in which scripts unpack the batch.
_ENTRIES = (TOKENS, "labels", LOSS_MASK, ATTENTION_MASK, POSITIONS)
_hooked: list[Callable[..., Any]] = []


def hook_batches(utils: ModuleType) -> None:
    """Hook one of `_MODULES` right after its import, before other modules import from it by name.

    In a planned micro-batch, each process reads its own batch; elsewhere, e.g. in evaluation, the first process
    broadcasts as usual.
    """
    get_batch: Callable[..., Any] | None = getattr(utils, _HOOKED, None)
    if get_batch is None:
        return
    reads = "data_iterator" in inspect.signature(get_batch).parameters

    @wraps(get_batch)
    def get_planned_batch(*args: Any, **kwargs: Any) -> Any:
        microbatch = current_microbatch.get()
        if microbatch is None or parallel_state.get_tensor_model_parallel_world_size() == 1:
            return get_batch(*args, **kwargs)
        batch = next(args[0] if args else kwargs["data_iterator"]) if reads else microbatch.batch
        device = microbatch.positions.device
        return _ScriptBatch((name, batch[name].to(device, non_blocking=True)) for name in _ENTRIES)

    setattr(utils, _HOOKED, get_planned_batch)
    _hooked.append(get_planned_batch)


class _ScriptBatch(dict[str, Any]):
    """A batch whose missing entries are None: scripts from 0.19 on also read e.g. packing and groups."""

    def __missing__(self, name: str) -> None:
        return None


def shares_data(data_iterator: Any, replica: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a process that reads data must broadcast its step within this replica. Collective over it.

    False if the script broadcasts batches with an unhooked function of its own, which expects the static length.

    Args:
        data_iterator: data iterator of this process; None if it reads no data.
        replica: processes of one rank of the plan.
        device: device for the collective.
    """
    found = {getattr(sys.modules.get(module), _HOOKED, None) for module in _MODULES}
    if dist.get_world_size(replica) == 1 or not found.intersection(_hooked):
        return False
    lacking = torch.tensor(int(data_iterator is None), device=device)
    dist.all_reduce(lacking, op=dist.ReduceOp.MAX, group=replica)
    return bool(lacking)


def share(read: Callable[[], LocalMicroBatches], replica: dist.ProcessGroup) -> LocalMicroBatches:
    """Read a step on the first process of a replica, and broadcast it to all. Collective."""
    first = dist.get_process_group_ranks(replica)[0]
    found: list[Any] = [read() if dist.get_rank() == first else None]
    dist.broadcast_object_list(found, src=first, group=replica)
    step: LocalMicroBatches = found[0]
    return step


# Megatron-Bridge's loader of global batches (`dataloader_type="batch"`), used by its fine-tuning recipes.
#
# Its training step draws a rank's share of the global batch and splits it before it calls the schedule. Under a plan,
# the split is skipped: the schedule gets the loader's own iterator, behind which the data set is found.

_SPLITS = "prepare_finetuning_batch"
_CYCLES = "cyclic_iter"
_BRIDGE_ADVICE = 'versions 0.3.1 to 0.7.0 have it; set dataset.dataloader_type="single"'


def hook_splitting(module: ModuleType) -> None:
    """Skip the split in training steps, detected by enabled gradients; evaluation is unchanged."""
    require(
        module,
        {_SPLITS: ("data_iterator", "num_microbatches", "default_seq_length")},
        found="Megatron-Bridge",
        advice=_BRIDGE_ADVICE,
    )
    split = getattr(module, _SPLITS)

    @wraps(split)
    def split_by_plan(data_iterator: Any, num_microbatches: int, default_seq_length: int, **more: Any) -> Any:
        if torch.is_grad_enabled():
            return data_iterator, default_seq_length
        return split(data_iterator, num_microbatches, default_seq_length, **more)

    setattr(module, _SPLITS, split_by_plan)


def hook_cycling(module: ModuleType) -> None:
    """Replace Bridge's endless loader, a generator, with one that exposes its data set."""
    require(module, {_CYCLES: ()}, found="Megatron-Bridge", advice=_BRIDGE_ADVICE)
    setattr(module, _CYCLES, Cycle)


class Cycle:
    """Yields a loader's batches in an endless loop: Bridge's generator, with the loader as an attribute."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self._rows = self._again_and_again()

    def _again_and_again(self) -> Iterator[Any]:
        while True:
            yield from self.iterable

    def __iter__(self) -> Cycle:
        return self

    def __next__(self) -> Any:
        return next(self._rows)
