"""Load exactly the tokens that one rank holds of its micro-batches, ahead of the training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import RankMicroBatches, require_length
from fcp_cli.runtime.layout import ShardLayout, shard_layout
from fcp_cli.runtime.loss import labelled_rows, next_token_labels
from fcp_cli.runtime.rank_agreement import PackDigest, digest
from fcp_cli.runtime.visuals import VisualPack, VisualShard, begin_visual_shard
from fcp_cli.util.masks import CAUSAL, Mask, MaskedSequence, described
from fcp_cli.vision.parts import VisualPart, VisualSequence

Fetch: TypeAlias = Callable[[int], Any]
"""From a manifest row to the sequence's tokens, or to (tokens, labels); arrays, tensors or lists of integers.

A sequence with images or videos is a `VisualSequence`, one with a mask a `MaskedSequence`; causal text in
the same data set may be either. A row that holds several sequences which do not see each other is a `JoinedSequences`.

Labels are as long as the tokens and belong to them one by one, as Hugging Face data sets have them (-100 where the
token is not to be learned, a prompt for example); shifting them to the next token is done here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's tokens of one micro-batch; tensors are [1, tokens] int64, positions possibly [axes, 1, tokens].

    A rank without tokens (an idle row, or a pack with fewer tokens than ranks) gets one pad token outside every
    sequence, with an ignored label, so that it takes part in every forward and backward with weight zero.

    Attributes:
        row: the micro-batch's row of the plan.
        member: this rank's index in the group.
        layout: tokens of each member.
        input_ids, position_ids: tokens, and their positions within their own sequences.
        labels: next token of each; -100 at the end of a sequence.
        labelled: [labelled] int64 indices of tokens with labels, for a loss that skips the others; None if nearly all
            tokens have one.
        visuals: this rank's part of the pack's images and videos, or None.
        digest: digest of the pack's sequences, or None if no other rank shares the pack.
        pack_labels: [tokens of the pack] labels of joined sequences, or None.
    """

    row: MicroBatch
    member: int
    layout: ShardLayout
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    labelled: Tensor | None = None
    visuals: VisualShard | None = None
    digest: PackDigest | None = None
    pack_labels: Tensor | None = None

    @property
    def labelled_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Shard:
        return replace(
            self,
            input_ids=function(self.input_ids),
            position_ids=function(self.position_ids),
            labels=function(self.labels),
            labelled=None if self.labelled is None else function(self.labelled),
            visuals=None if self.visuals is None else self.visuals.map_pixels(function),
        )

    def without(self, rows: Collection[int]) -> Shard:
        """Return the shard with the labels of the given manifest rows ignored."""
        bad = np.isin(self.row.sequences, list(rows))
        if not bad.any() or not self.layout.tokens(self.member):
            return self
        sequence_of = np.repeat(np.arange(len(bad)), self.layout.lengths)
        dropped = torch.from_numpy(bad[sequence_of[self.layout.index(self.member)]])
        labels = self.labels.masked_fill(dropped.unsqueeze(0), IGNORED)
        return replace(self, labels=labels, labelled=labelled_rows(labels))


def picture_problems(shards: Iterable[Shard]) -> dict[int, str]:
    """Return the decoding error of each manifest row whose images failed to decode on this rank; they are blank."""
    return {row: why for shard in shards if shard.visuals for row, why in shard.visuals.problems.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """One sequence, cut to the plan's length: ids and next-token labels [tokens], fields of `VisualSequence`."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    parts: tuple[VisualPart, ...] = ()
    lengths: tuple[int, ...] = ()
    mask: Mask = CAUSAL


def fetches_labels(steps: Iterable[StepPlan], fetch: Fetch) -> bool:
    """Return whether `fetch` returns labels, judged by the first sequence to train on; the same on every rank."""
    for step in steps:
        return _has_labels(fetch(int(step.sequences[0])))
    return False


def load_shard(row: MicroBatch, fetch: Fetch, *, rank: int, labelled: bool = False) -> Shard:
    """Load this rank's shard of one micro-batch."""
    return begin_shard(row, fetch=fetch, rank=rank, labelled=labelled)()


def begin_shard(
    row: MicroBatch,
    wave: Sequence[MicroBatch] = (),
    *,
    fetch: Fetch,
    rank: int,
    labelled: bool = False,
    encoders: Sequence[int] = (),
) -> Callable[[], Shard]:
    """Load this rank's shard of one micro-batch except pixels; the returned function waits for those.

    Args:
        row: the micro-batch.
        wave: all micro-batches whose ranks balance the encoder's work, including `row`; empty if only its own ranks do.
        fetch: returns the sequence of a manifest row.
        rank: global rank.
        labelled: whether `fetch` returns labels; the same on every rank.
        encoders: dedicated encoder ranks; empty if all ranks encode.
    """
    member = row.ranks.index(rank)
    sequences = [_sequence(fetch, at, length, labelled) for at, length in zip(row.sequences, row.lengths, strict=True)]
    lengths = tuple(length for sequence in sequences for length in sequence.lengths)
    masks = [sequence.mask for sequence in sequences for _ in sequence.lengths]
    layout = shard_layout(lengths, row.degree, row.heads_degree, tuple(masks))
    place = partial(Shard, row=row, member=member, layout=layout, digest=_digest(row, member, sequences))
    # Joined sequences have no images.
    own = VisualPack(
        parts=[sequence.parts for sequence in sequences for _ in sequence.lengths],
        rows=[at for at, sequence in zip(row.sequences, sequences, strict=True) for _ in sequence.lengths],
        layout=layout,
        ranks=row.ranks,
    )
    packs = [own if other.order == row.order else _pack_of_others(other, fetch) for other in wave] or [own]
    visuals = begin_visual_shard(packs, rank=rank, encoders=encoders)
    shard = _tokens_of_shard(place, sequences, layout, member)
    return lambda: shard if visuals is None else replace(shard, visuals=visuals())


def _pack_of_others(row: MicroBatch, fetch: Fetch) -> VisualPack:
    """Return the images of another ring's pack."""
    found = [fetch(at) for at in row.sequences]
    return VisualPack(
        parts=[one.parts if isinstance(one, VisualSequence) else () for one in found],
        rows=row.sequences,
        layout=shard_layout(
            row.lengths,
            row.degree,
            row.heads_degree,
            tuple(one.mask if isinstance(one, (VisualSequence, MaskedSequence)) else CAUSAL for one in found),
        ),
        ranks=row.ranks,
    )


def _tokens_of_shard(
    place: Callable[..., Shard], sequences: list[_Sequence], layout: ShardLayout, member: int
) -> Shard:
    if not layout.tokens(member):
        pad = torch.zeros((1, 1), dtype=torch.int64, device="cpu")
        none = torch.full_like(pad, IGNORED)
        return place(input_ids=pad, position_ids=pad.clone(), labels=none, labelled=labelled_rows(none))
    index = torch.from_numpy(layout.index(member))
    pack_labels = torch.cat([sequence.labels for sequence in sequences])
    labels = pack_labels[index].unsqueeze(0)
    return place(
        input_ids=torch.cat([sequence.tokens for sequence in sequences])[index].unsqueeze(0),
        position_ids=_position_ids(sequences, layout, member, index),
        labels=labels,
        # Computed in the loader's thread: on the device, their number would have to be waited for.
        labelled=labelled_rows(labels),
        pack_labels=pack_labels if len(layout.lengths) > len(sequences) else None,
    )


def _digest(row: MicroBatch, member: int, sequences: list[_Sequence]) -> PackDigest | None:
    if row.degree == 1:
        return None
    return PackDigest(
        order=row.order,
        member=member,
        degree=row.degree,
        rows=row.sequences,
        digests=[digest(_content(found)) for found in sequences],
    )


def _content(found: _Sequence) -> Iterator[Tensor]:
    yield from (found.tokens, found.labels)
    if found.position_ids is not None:
        yield found.position_ids
    if not found.mask.is_causal:
        yield torch.tensor(found.mask.numbers, device="cpu")


def _position_ids(sequences: list[_Sequence], layout: ShardLayout, member: int, index: Tensor) -> Tensor:
    """Return positions [1, tokens], or [axes, 1, tokens] if a sequence has its own; others count on all axes."""
    given = [sequence.position_ids for sequence in sequences if sequence.position_ids is not None]
    if not given:
        return torch.from_numpy(layout.position_ids(member)).unsqueeze(0)
    axes = len(given[0])
    whole = [
        torch.from_numpy(sequence.mask.position_ids(len(sequence.tokens))).expand(axes, -1)
        if sequence.position_ids is None
        else sequence.position_ids
        for sequence in sequences
    ]
    return torch.cat(whole, dim=1)[:, index].unsqueeze(1)


def _sequence(fetch: Fetch, at: int, length: int, labelled: bool) -> _Sequence:
    found = fetch(at)
    if _has_labels(found) != labelled:
        raise RunError(
            f"fetch returned {'no ' if labelled else ''}labels for row {at} of the data, unlike for the first"
        )
    if isinstance(found, JoinedSequences):
        return _joined(found, at, length)
    whole = found if isinstance(found, (VisualSequence, MaskedSequence)) else None
    given, given_labels = (whole.tokens, whole.labels) if whole else found if labelled else (found, None)
    tokens = _tokens(given)
    require_length(len(tokens), length, row=at)
    labels = tokens if given_labels is None else _tokens(given_labels)
    if len(labels) != len(tokens):
        raise RunError(
            f"row {at} of the data has {len(tokens)} tokens but {len(labels)} labels; fetch must return as many"
        )
    has_own = isinstance(found, MaskedSequence) and found.own_labels
    return _Sequence(
        tokens=tokens[:length],
        labels=labels[:length] if has_own else next_token_labels(labels[:length]),
        position_ids=_given_positions(whole, at, len(tokens), length),
        parts=found.parts if isinstance(found, VisualSequence) else (),
        lengths=(length,),
        mask=CAUSAL if whole is None else _fitting_mask(whole.mask, at, len(tokens), length),
    )


def _fitting_mask(mask: Mask, at: int, tokens: int, length: int) -> Mask:
    if misfit := mask.misfit(tokens) or ("" if mask.can_be_cut else mask.misfit(length)):
        raise RunError(f"row {at} of the data has {tokens} tokens, {length} in the plan, but {misfit}")
    return mask


def _joined(found: JoinedSequences, at: int, length: int) -> _Sequence:
    require_length(len(found.tokens), length, row=at)
    if not len(found.tokens) == len(found.labels) == sum(found.lengths) == length:
        raise RunError(
            f"row {at} of the data joins sequences of {sum(found.lengths)} tokens, with {len(found.labels)} labels, "
            f"but has {length} in the plan; sequences that are joined cannot be cut"
        )
    return _Sequence(tokens=found.tokens, labels=found.next_labels(), lengths=found.lengths)


def _given_positions(whole: VisualSequence | MaskedSequence | None, at: int, tokens: int, length: int) -> Tensor | None:
    if whole is None or whole.position_ids is None:
        return None
    positions = torch.from_numpy(whole.position_ids)
    if positions.dim() != 2 or positions.shape[1] != tokens:
        raise RunError(
            f"row {at} of the data has {tokens} tokens but position_ids of shape {tuple(positions.shape)}; "
            "fetch must return [axes, tokens]"
        )
    return positions[:, :length]


def _has_labels(found: Any) -> bool:
    if isinstance(found, JoinedSequences):
        return True
    has_fields = isinstance(found, (VisualSequence, MaskedSequence))
    return found.labels is not None if has_fields else isinstance(found, tuple)


def _tokens(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device="cpu")


# Load a rank's steps ahead of the training loop, for any kind of shard.


class HostShard(Protocol):
    """One rank's shard of a micro-batch, in host memory.

    Attributes:
        member: this rank's index in the group.
        layout: tokens of each member.
    """

    @property
    def member(self) -> int: ...

    @property
    def layout(self) -> ShardLayout: ...

    def mapped(self: ShardT, function: Callable[[Tensor], Tensor]) -> ShardT:
        """Return the shard with `function` applied to every tensor that goes to the device."""
        ...


ShardT = TypeVar("ShardT", bound=HostShard)
Begin: TypeAlias = Callable[[MicroBatch, Sequence[MicroBatch]], Callable[[], ShardT]]
"""Begins to load a micro-batch, given all micro-batches of its wave, and returns the function that ends it."""


def pinned(own: RankMicroBatches[ShardT]) -> RankMicroBatches[ShardT]:
    """Return a rank's micro-batches with shards in pinned memory, without which a copy to a GPU blocks the host."""
    return replace(own, shards=tuple(shard.mapped(Tensor.pin_memory) for shard in own.shards))


def load_steps(
    steps: Iterable[RankMicroBatches[Any]], begin: Begin[ShardT], *, device: torch.device, looks_ahead: bool = False
) -> Iterator[RankMicroBatches[ShardT]]:
    """Load a rank's shards step by step.

    Args:
        steps: the rank's micro-batches of each step, without shards.
        begin: starts to load a micro-batch; its errors are raised when the step would be yielded.
        device: device that the shards will be copied to; for CUDA they are pinned.
        looks_ahead: start the next step before the current one is finished, because other ranks read parts of it.
    """
    begun: deque[Callable[[], RankMicroBatches[ShardT]]] = deque()
    for step in steps:
        begun.append(_begin_step(step, begin, device))
        if len(begun) > 1 or not looks_ahead:
            yield begun.popleft()()
    yield from (finish() for finish in begun)


def _begin_step(
    step: RankMicroBatches[Any], begin: Begin[ShardT], device: torch.device
) -> Callable[[], RankMicroBatches[ShardT]]:
    try:
        waves = step.waves or [()] * len(step.rows)
        begun = [begin(row, wave) for row, wave in zip(step.rows, waves, strict=True)]
    except Exception as error:
        return partial(_raise, error)  # raised in its turn, after the previous steps

    def finish() -> RankMicroBatches[ShardT]:
        loaded: RankMicroBatches[ShardT] = replace(step, shards=tuple(end() for end in begun))
        for shard in loaded.shards:
            # Computed in the loader's thread, so that the first layer's attention does not wait for it.
            ring, place = shard.layout.ring, shard.member // shard.layout.ulysses_degree
            for source in range(ring.degree):
                ring.hops(place, source, packed=device.type != "cpu")
        return pinned(loaded) if device.type == "cuda" else loaded

    return finish


def _raise(error: Exception) -> RankMicroBatches[Any]:
    raise error


# Apply the plan's masks to sequences, and raise if data has different ones.


def with_planned_masks(fetch: Fetch, metadata: PlanMetadata) -> Fetch:
    """Return a fetch whose sequences have the plan's masks; `fetch` itself if the plan has none."""
    masks, name = metadata.mask_rows, metadata.manifest.name
    if masks is None:
        return fetch

    def fetch_masked(row: int) -> Any:
        found, mask = fetch(row), masks.mask(int(row))
        if isinstance(found, MaskedSequence) or (isinstance(found, VisualSequence) and not found.mask.is_causal):
            require_same(found.mask, mask, row, len(found.tokens), name)
            return found
        if mask.is_causal:
            return found
        if isinstance(found, JoinedSequences):
            raise RunError(
                f"row {row} of the data joins several sequences, but was planned with one mask ({described(mask)}); "
                "plan sequences that are joined without --mask"
            )
        if isinstance(found, VisualSequence):
            return replace(found, mask=mask)
        tokens, labels = found if isinstance(found, tuple) else (found, None)
        return MaskedSequence(tokens=tokens, labels=labels, mask=mask)

    return fetch_masked


def require_same(found: Mask, planned: Mask, row: int, tokens: int, name: str) -> None:
    """Raise RunError if the mask of a sequence of `tokens` tokens differs from the planned one."""
    if found != planned and found.areas(tokens) != planned.areas(tokens):
        raise RunError(
            f"row {row} of the data comes with another mask ({described(found)}) than it has in the plan's manifest "
            f"{name} ({described(planned)}); build the manifest from these data with 'fcp manifest build --mask', and "
            "plan again"
        )


# Several sequences in one row of the manifest, for losses that compare sequences of a micro-batch.


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
