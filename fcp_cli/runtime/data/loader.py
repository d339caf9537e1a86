"""Load exactly the tokens that one rank holds of its micro-batches, ahead of the training loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.masks import CAUSAL, Mask, MaskedSequence
from fcp_cli.plan.step import MicroBatch, StepPlan
from fcp_cli.runtime.agreement.step_agreement import PackDigest, digest
from fcp_cli.runtime.data.cursor import RankStep
from fcp_cli.runtime.data.followed_step import require_length
from fcp_cli.runtime.data.joined import JoinedSequences
from fcp_cli.runtime.layouts.layout import ShardLayout, shard_layout
from fcp_cli.runtime.loss.labels import IGNORED
from fcp_cli.runtime.loss.token_loss import labelled_rows, next_token_labels
from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache
from fcp_cli.runtime.pictures.visuals import VisualPack, VisualShard, begin_visual_shard
from fcp_cli.vision.parts import VisualPart, VisualSequence

Fetch: TypeAlias = Callable[[int], Any]
"""From a manifest row to the sequence's tokens, or to (tokens, labels); arrays, tensors or lists of integers.

A sequence with images or videos is a `VisualSequence`, one with a mask a `MaskedSequence`; beside such, a causal one of
text may be either. A row that holds several sequences which do not see each other is a `JoinedSequences`.

Labels are as long as the tokens and belong to them one by one, as Hugging Face data sets have them (-100 where the
token is not to be learned, a prompt for example); shifting them to the next token is done here.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One rank's tokens of one micro-batch; all tensors [1, tokens] int64, positions perhaps [axes, 1, tokens].

    A rank that holds no token (an idle row, or a pack with fewer tokens than ranks) gets one pad token outside every
    sequence, with an ignored label, so that it takes part in every forward and backward with weight zero.

    Attributes:
        row: the micro-batch in the plan.
        member: this rank's place in the ring.
        layout: who holds which tokens.
        input_ids, position_ids: tokens, and their positions within their own sequences.
        labels: the token after each, -100 at the end of a sequence.
        labelled: [labelled] int64 the tokens with labels, for a loss that leaves out the others; None: nearly all have.
        visuals: this rank's part in the pack's images and videos; None where it has none.
        digest: of what `fetch` gave for the whole pack; None where no other rank trains on it.
        pack_labels: [tokens of the pack] of joined sequences, whose loss needs to know all of them; None of others.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """One sequence, cut to the plan's length: [tokens] ids and next-token labels, and what `VisualSequence` adds."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    parts: tuple[VisualPart, ...] = ()
    lengths: tuple[int, ...] = ()
    mask: Mask = CAUSAL


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedStep:
    """One step's shards of one rank.

    Attributes:
        labelled_tokens: labels among them that are not ignored.
        problems: why pictures could not be read that this rank encodes, by manifest row; they are blank.
    """

    plan: RankStep
    shards: tuple[Shard, ...]
    labelled_tokens: int
    problems: Mapping[int, str] = field(default_factory=dict)

    def without(self, rows: Collection[int]) -> LoadedStep:
        """Return the same with nothing to learn in these rows of the manifest."""
        shards = tuple(_unlearned(shard, rows) for shard in self.shards)
        return replace(self, shards=shards, labelled_tokens=_labelled_tokens(shards))


def load_steps(
    steps: Iterable[RankStep],
    fetch: Fetch,
    *,
    rank: int,
    labelled: bool,
    device: torch.device,
    cache: EmbeddingCache | None = None,
    looks_ahead: bool = True,
    encoders: Sequence[int] = (),
) -> Iterator[LoadedStep]:
    """Load this rank's shards step by step.

    Args:
        steps: what to load.
        fetch: where from.
        rank: global rank.
        labelled: whether `fetch` returns labels, of which the ranks must have the same opinion.
        device: where the shards will go: for CUDA they are put in page-locked memory.
        cache: of the encoder's embeddings; None: there is none.
        looks_ahead: whether the step after may be asked for before one is there.
        encoders: ranks that only encode; none: all ranks of a ring, or of a wave, do.

    Raises:
        RunError: a sequence is shorter than in the plan; its labels are not as long as its tokens, or come against
            `labelled`.
    """
    # What a rank encodes is read by others meanwhile: a step ahead is asked for before one is waited for.
    begun: deque[Callable[[], LoadedStep]] = deque()
    begin = partial(begin_shard, fetch=fetch, rank=rank, labelled=labelled, cache=cache, encoders=encoders)
    for step in steps:
        begun.append(_begin_step(step, begin, device))
        if len(begun) > 1 or not looks_ahead:
            yield begun.popleft()()
    yield from (finish() for finish in begun)


def _begin_step(
    step: RankStep, begin: Callable[..., Callable[[], Shard]], device: torch.device
) -> Callable[[], LoadedStep]:
    """Load a step but for its pixels, which others may read; return what waits for them."""
    try:
        waves = step.waves or [()] * len(step.rows)
        begun = [begin(row, wave=wave) for row, wave in zip(step.rows, waves, strict=True)]
    except Exception as error:
        return partial(_raise, error)  # at its place: after the steps before it
    return partial(_finish_step, step, begun, device)


def _raise(error: Exception) -> LoadedStep:
    raise error


def _finish_step(step: RankStep, begun: Sequence[Callable[[], Shard]], device: torch.device) -> LoadedStep:
    shards = tuple(finish() for finish in begun)
    for shard in shards:
        # Worked out here, in the loader's thread: the first layer's attention would wait for them.
        ring, place = shard.layout.ring, shard.member // shard.layout.heads_degree
        for source in range(ring.degree):
            ring.hops(place, source, packed=device.type != "cpu")
    if device.type == "cuda":  # only from page-locked memory does a copy run beside the host
        shards = tuple(map(_pinned, shards))
    problems = {row: why for shard in shards if shard.visuals for row, why in shard.visuals.problems.items()}
    return LoadedStep(plan=step, shards=shards, labelled_tokens=_labelled_tokens(shards), problems=problems)


def _labelled_tokens(shards: Sequence[Shard]) -> int:
    return sum(int((shard.labels != IGNORED).sum()) for shard in shards)


def _unlearned(shard: Shard, rows: Collection[int]) -> Shard:
    """Return a shard without the labels of some rows of the manifest."""
    bad = np.isin(shard.row.sequences, list(rows))
    if not bad.any() or not shard.layout.tokens(shard.member):
        return shard
    sequence_of = np.repeat(np.arange(len(bad)), shard.layout.lengths)
    dropped = torch.from_numpy(bad[sequence_of[shard.layout.index(shard.member)]])
    labels = shard.labels.masked_fill(dropped.unsqueeze(0), IGNORED)
    return replace(shard, labels=labels, labelled=labelled_rows(labels))


def fetches_labels(steps: Iterable[StepPlan], fetch: Fetch) -> bool:
    """Return whether `fetch` returns labels, judged by the first sequence to be trained; the same on every rank."""
    for step in steps:
        return _has_labels(fetch(int(step.sequences[0])))
    return False


def load_shard(row: MicroBatch, fetch: Fetch, *, rank: int, labelled: bool = False) -> Shard:
    """Load this rank's part of one micro-batch."""
    return begin_shard(row, fetch, rank=rank, labelled=labelled)()


def begin_shard(
    row: MicroBatch,
    fetch: Fetch,
    *,
    rank: int,
    labelled: bool = False,
    wave: Sequence[MicroBatch] = (),
    cache: EmbeddingCache | None = None,
    encoders: Sequence[int] = (),
) -> Callable[[], Shard]:
    """Load this rank's part of one micro-batch but for its pixels; return what waits for them.

    Args:
        row: the micro-batch.
        fetch: where sequences come from.
        rank: global rank.
        labelled: whether `fetch` returns labels.
        wave: all micro-batches whose ranks share the encoder's work, `row` among them; none: those of `row` alone.
        cache: of the encoder's embeddings; None: there is none.
        encoders: ranks that only encode; none: all that share the work do.
    """
    member = row.ranks.index(rank)
    sequences = [_sequence(fetch, at, length, labelled) for at, length in zip(row.sequences, row.lengths, strict=True)]
    lengths = tuple(length for sequence in sequences for length in sequence.lengths)
    masks = [sequence.mask for sequence in sequences for _ in sequence.lengths]
    layout = shard_layout(lengths, row.degree, row.heads_degree, _masks(masks))
    place = partial(Shard, row=row, member=member, layout=layout, digest=_digest(row, member, sequences))
    # Joined sequences have no parts.
    own = VisualPack(
        parts=[sequence.parts for sequence in sequences for _ in sequence.lengths],
        rows=[at for at, sequence in zip(row.sequences, sequences, strict=True) for _ in sequence.lengths],
        layout=layout,
        ranks=row.ranks,
    )
    packs = [own if other.order == row.order else _pack_of_others(other, fetch) for other in wave] or [own]
    visuals = begin_visual_shard(packs, rank=rank, cache=cache, encoders=encoders)
    shard = _tokens_of_shard(place, sequences, layout, member)
    return lambda: shard if visuals is None else replace(shard, visuals=visuals())


def _pack_of_others(row: MicroBatch, fetch: Fetch) -> VisualPack:
    """Return what the pack of another ring shows of its pictures."""
    found = [fetch(at) for at in row.sequences]
    return VisualPack(
        parts=[one.parts if isinstance(one, VisualSequence) else () for one in found],
        rows=row.sequences,
        layout=shard_layout(
            row.lengths,
            row.degree,
            row.heads_degree,
            _masks([one.mask if isinstance(one, (VisualSequence, MaskedSequence)) else CAUSAL for one in found]),
        ),
        ranks=row.ranks,
    )


def _masks(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Return the masks of a pack as its layout takes them: none where all are causal."""
    return () if all(mask.is_causal for mask in masks) else tuple(masks)


def _tokens_of_shard(
    place: Callable[..., Shard], sequences: list[_Sequence], layout: ShardLayout, member: int
) -> Shard:
    if not layout.tokens(member):
        pad = torch.zeros((1, 1), dtype=torch.int64)
        none = torch.full_like(pad, IGNORED)
        return place(input_ids=pad, position_ids=pad.clone(), labels=none, labelled=labelled_rows(none))
    index = torch.from_numpy(layout.index(member))
    pack_labels = torch.cat([sequence.labels for sequence in sequences])
    labels = pack_labels[index].unsqueeze(0)
    return place(
        input_ids=torch.cat([sequence.tokens for sequence in sequences])[index].unsqueeze(0),
        position_ids=_position_ids(sequences, layout, member, index),
        labels=labels,
        # Found here, in the loader's thread: on the device, how many there are would be waited for.
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
        yield torch.tensor(found.mask.numbers)


def _position_ids(sequences: list[_Sequence], layout: ShardLayout, member: int, index: Tensor) -> Tensor:
    """Return positions [1, tokens], or [axes, 1, tokens] where a sequence has its own; others count on all axes."""
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
    return torch.as_tensor(values, dtype=torch.int64)


def _pinned(shard: Shard) -> Shard:
    return replace(
        shard,
        input_ids=shard.input_ids.pin_memory(),
        position_ids=shard.position_ids.pin_memory(),
        labels=shard.labels.pin_memory(),
        labelled=None if shard.labelled is None else shard.labelled.pin_memory(),
        visuals=None if shard.visuals is None else shard.visuals.map_pixels(Tensor.pin_memory),
    )
