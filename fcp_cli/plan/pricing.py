"""Prices of packs on groups of ranks under a cost profile; every predicted micro-batch time is computed here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.cost.model import (
    WindowWork,
    Work,
    encoder_seconds,
    group_seconds,
    reach_tokens,
    sequence_work,
    token_in_window_seconds,
    vision_seconds,
)
from fcp_cli.cost.profile import CostProfile, StepTerms
from fcp_cli.cost.recipe import SplitAttention
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.setup import PlanSetup, Prices, Speeds, Sync, padded_tokens
from fcp_cli.plan.step import StepPlan, sizes_of
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray


class EncoderShares(NamedTuple):
    """Ranks that share the encoding of a wave's images.

    Attributes:
        ranks: number of ranks that share the work.
        runs_ahead: whether they are encoder-only ranks, which encode a wave while the others run the previous one.
        forward_share: forward share of the encoder's seconds; the backward, after gradients return, takes the rest.
    """

    ranks: int
    runs_ahead: bool = False
    forward_share: float = 1.0


class PlacedPacks(NamedTuple):
    """Packs and the groups that run them.

    Attributes:
        work: single-rank work of the packs' concatenated sequences (`single_rank_work`).
        offsets: [microbatches + 1] pack i has the sequences `offsets[i]:offsets[i + 1]`.
        rank_offsets, ranks: group i has the ranks `ranks[rank_offsets[i]:rank_offsets[i + 1]]`, ascending.
    """

    work: Work
    offsets: IntArray
    rank_offsets: IntArray
    ranks: Int32Array


def encoder_shares(setup: PlanSetup, profile: CostProfile) -> EncoderShares | None:
    """Return the ranks that share the encoding of a wave's images, or None if each group encodes its own."""
    if setup.encoder_balance is None:
        return None
    if not setup.encoder_ranks:
        return EncoderShares(setup.num_ranks)
    has_backward = profile.phase is None and not (setup.recipe is not None and setup.recipe.freeze_vision)
    forward_share = _FORWARD_SHARE if has_backward else 1.0
    return EncoderShares(setup.encoder_ranks, runs_ahead=True, forward_share=forward_share)


_FORWARD_SHARE = 1 / 3  # the backward has twice the matrix products


def beside_language(
    shares: EncoderShares, encoder_seconds: FloatArray, language_seconds: FloatArray, wave: Int32Array
) -> FloatArray:
    """Return [microbatches] the seconds that each micro-batch waits for its wave's images, on top of its own work.

    Encoder-only ranks stay one wave ahead: they send a wave's embeddings, encode the next wave, then run the backward
    of the previous wave, whose gradients have arrived by then. The last wave's backward closes the step.

    Args:
        shares: ranks that encode.
        encoder_seconds: [microbatches] single-rank seconds of all images of the micro-batch's wave.
        language_seconds: [microbatches] seconds without images.
        wave: [microbatches] ascending from 0; all working micro-batches of a wave have the same `encoder_seconds`.
    """
    if not shares.runs_ahead:
        return encoder_seconds / shares.ranks
    first = np.flatnonzero(np.concatenate(([True], wave[1:] != wave[:-1])))
    encoder = (np.maximum.reduceat(encoder_seconds, first) / shares.ranks).tolist()
    language = np.maximum.reduceat(language_seconds, first).tolist()
    forward, backward = shares.forward_share, 1.0 - shares.forward_share
    start = end = 0.0  # of a wave's language model
    waits = []
    # Recurrence: a wave starts once its images are encoded and the previous wave has ended.
    for number, (encoding, computing) in enumerate(zip(encoder, language, strict=True)):
        before = backward * encoder[number - 2] if number > 1 else 0.0
        ready = start + forward * encoding + before
        start = max(end, ready)
        waits.append(start - end)
        end = start + computing
    before = backward * encoder[-2] if len(encoder) > 1 else 0.0
    # The encoder backward of the last two waves runs after the last wave.
    waits[-1] += max(end, start + before) + backward * encoder[-1] - end
    return np.repeat(np.array(waits), np.diff(first, append=len(wave)))


def step_prices(
    step: StepPlan,
    setup: PlanSetup,
    *,
    profile: CostProfile,
    rank_speeds: Speeds | None = None,
    manifest: LengthTable | None = None,
) -> Prices:
    """Price the micro-batches of a planned step.

    Args:
        step: planned step, with lengths after truncation.
        profile: cost profile, not necessarily the plan's.
        rank_speeds: rank speeds at this step; None: all match the profile.
        manifest: source of `eta` and vision columns; without it every sequence is priced as causal text.
    """
    sequences = planned_sequences(step, manifest)
    shares = encoder_shares(setup, profile)
    language = sequences if shares is None else without_pictures(sequences)
    packs = PlacedPacks(
        work=single_rank_work(language, profile, setup.padding_multiple),
        offsets=step.sequence_offsets,
        rank_offsets=step.rank_offsets,
        ranks=step.ranks,
    )
    prices = microbatch_prices(packs, setup, profile, heads=step.heads_degree)
    if shares is None:
        return prices.at_speeds(rank_speeds, step.rank_offsets, step.ranks)
    # The whole wave waits for its images, even groups that have none.
    shared, text = wave_encoder_seconds(vision_seconds(sequences, profile), step.sequence_offsets, step.wave), prices[0]
    return Prices(np.where(step.is_idle, 0.0, text + beside_language(shares, shared, text, step.wave)))


def microbatch_prices(
    packs: PlacedPacks, setup: PlanSetup, profile: CostProfile, *, heads: Int32Array | SplitAttention | None = None
) -> Prices:
    """Price packs on groups of ranks.

    Args:
        setup: ranks per node and padding multiple.
        heads: [microbatches] Ulysses degrees; or an attention split, of which each group gets its fastest Ulysses
            degree (`quickest_heads`); None: rings only.
    """
    attention, heads_degree = (heads, None) if isinstance(heads, str) else (None, heads)
    pack, working = _working_packs(packs, setup, profile)
    rank_offsets, ranks, per_node = packs.rank_offsets, packs.ranks, setup.ranks_per_node
    degree = sizes_of(rank_offsets)[working]
    seconds, encoder, language, held = np.zeros((4, len(packs.offsets) - 1))
    place = place_of_groups(rank_offsets, ranks, per_node, heads_degree)
    seconds[working] = group_seconds(profile, pack, **{name: values[working] for name, values in place.items()})
    # A group of one rank has no Ulysses degree to choose.
    wide = np.flatnonzero(degree > 1)
    if attention is not None and len(wide):
        _choices, found = _by_heads(attention, pack.take(wide), working[wide], packs, per_node, profile)
        seconds[working[wide]] = found.min(axis=0)
    encoder[working] = encoder_seconds(pack, profile) / degree
    held[working] = pack.tokens / degree
    language[working] = profile.coefficients.linear_seconds_per_token * held[working]
    return Prices(seconds, encoder, language, held)


def place_of_groups(
    rank_offsets: IntArray, ranks: Int32Array, ranks_per_node: int, heads_degree: Int32Array | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the arguments `degree` and `place` of `group_seconds`, [groups] each; `heads_degree` None: rings only."""
    place = {
        "degree": sizes_of(rank_offsets),
        "crosses_nodes": crosses_nodes(rank_offsets, ranks, ranks_per_node),
    }
    if heads_degree is not None:
        place["heads_degree"] = heads_degree
        place["sets_cross_nodes"] = ranks_together(rank_offsets, ranks, ranks_per_node) % heads_degree != 0
    return place


def quickest_heads(attention: SplitAttention, packs: PlacedPacks, setup: PlanSetup, profile: CostProfile) -> Int32Array:
    """Return [microbatches] the fastest Ulysses degree of each group; on ties the smallest.

    Under `ulysses` it is the degree of the group, else one whose Ulysses groups all lie within a node.
    """
    assert profile.heads is not None, "a profile without the block `heads` knows rings alone"
    degree = sizes_of(packs.rank_offsets)
    if attention == "ulysses":
        return degree.astype(np.int32)
    best = np.ones(len(degree), dtype=np.int32)
    pack, working = _working_packs(packs, setup, profile)
    wide = np.flatnonzero(degree[working] > 1)
    choices, seconds = _by_heads(attention, pack.take(wide), working[wide], packs, setup.ranks_per_node, profile)
    # argmin returns the first of equal values, and choices ascend: the smallest degree.
    best[working[wide]] = choices[seconds.argmin(axis=0), 0]
    return best


def _working_packs(packs: PlacedPacks, setup: PlanSetup, profile: CostProfile) -> tuple[Work, IntArray]:
    """Return the padded work of the non-empty packs, and their indices."""
    working = np.flatnonzero(sizes_of(packs.offsets))
    # Empty packs have no entries in `work`, so the starts of the others are contiguous offsets.
    offsets, degree = np.append(packs.offsets[working], packs.offsets[-1:]), sizes_of(packs.rank_offsets)[working]
    return pack_work(packs.work, offsets, degree, profile, setup.padding_multiple), working


def _by_heads(
    attention: SplitAttention,
    pack: Work,
    groups: IntArray,
    packs: PlacedPacks,
    ranks_per_node: int,
    profile: CostProfile,
) -> tuple[IntArray, FloatArray]:
    """Return candidate Ulysses degrees, [choices, 1 or groups], and the seconds of packs with each, [choices, groups].

    Seconds are infinite if a Ulysses group would span nodes, except under `ulysses`, which has no alternative.
    """
    assert profile.heads is not None, "a profile without the block `heads` knows rings alone"
    degree = sizes_of(packs.rank_offsets)[groups]
    together = ranks_together(packs.rank_offsets, packs.ranks, ranks_per_node)[groups]
    only = attention == "ulysses"
    choices = degree[None, :] if only else np.array((1, *profile.heads.degrees(ranks_per_node)))[:, None]
    fits = together % choices == 0
    seconds = group_seconds(
        profile,
        pack,
        degree=degree,
        crosses_nodes=crosses_nodes(packs.rank_offsets, packs.ranks, ranks_per_node)[groups],
        heads_degree=choices,
        sets_cross_nodes=~fits if only else False,
    )
    return choices, seconds if only else np.where(fits, seconds, np.inf)


def wave_encoder_seconds(encoder_seconds: FloatArray, offsets: IntArray, wave: Int32Array) -> FloatArray:
    """Return [microbatches] the single-rank encoder seconds of all images of each micro-batch's wave.

    Args:
        encoder_seconds: encoder seconds of the packs' concatenated sequences.
        offsets: [microbatches + 1] pack i has the sequences `offsets[i]:offsets[i + 1]`.
        wave: [microbatches] from 0.
    """
    of_wave = np.bincount(np.repeat(wave, sizes_of(offsets)), weights=encoder_seconds, minlength=int(wave.max()) + 1)
    return np.asarray(of_wave[wave], dtype=np.float64)


def without_pictures(sequences: LengthTable) -> LengthTable:
    """Return the sequences without their vision columns."""
    return replace(sequences, vision_patches=None, vision_patch_pairs=None)


def single_rank_work(sequences: LengthTable, profile: CostProfile, padding_multiple: int | None) -> Work:
    """Return the work of each sequence on one rank, padded for one rank; no group pads less, so it is a lower bound."""
    padded = padded_tokens(sequences.length_tokens, 1, padding_multiple)
    return sequence_work(replace(sequences, length_tokens=padded), profile)


def pack_work(
    work: Work, offsets: IntArray, degree: npt.ArrayLike, profile: CostProfile, padding_multiple: int | None
) -> Work:
    """Sum the work of non-empty packs, with the padding of their groups.

    Args:
        work: single-rank work of the packs' concatenated sequences.
        offsets: [packs + 1] pack p has the sequences `offsets[p]:offsets[p + 1]`.
        degree: ranks of each pack's group, [packs] or one for all.
        profile, padding_multiple: prices and multiple of padding.
    """
    first = offsets[:-1]
    if padding_multiple is not None:
        degrees = np.broadcast_to(np.asarray(degree), first.shape)
        work = padded_work(work, np.repeat(degrees, np.diff(offsets)), padding_multiple, profile)
    return work.packed(first)


def planned_sequences(step: StepPlan, manifest: LengthTable | None) -> LengthTable:
    """Return the sequences of a step in step order, with the step's lengths and the manifest's factors, if given."""
    lengths = step.lengths.astype(np.int64)
    if manifest is None:
        return LengthTable(name="", length_tokens=lengths)
    rows = manifest.take(step.sequences)
    return LengthTable(
        name=manifest.name,
        length_tokens=lengths,
        eta=rows.eta,
        vision_patches=rows.vision_patches,
        vision_patch_pairs=rows.vision_patch_pairs,
    )


def ranks_together(rank_offsets: IntArray, ranks: Int32Array, ranks_per_node: int) -> IntArray:
    """Return [groups] the greatest common divisor of the numbers of ranks that each group has on its nodes."""
    node = ranks // ranks_per_node
    # Runs of ranks on one node; adjacent groups on one node are separate runs.
    begins = np.concatenate(([True], node[1:] != node[:-1]))
    begins[rank_offsets[:-1]] = True
    first = np.flatnonzero(begins)
    return np.asarray(np.gcd.reduceat(np.diff(first, append=len(ranks)), np.searchsorted(first, rank_offsets[:-1])))


def crosses_nodes(rank_offsets: IntArray, ranks: Int32Array, ranks_per_node: int) -> npt.NDArray[np.bool_]:
    """Return [groups] whether each group spans more than one node; ranks must ascend within a group."""
    return np.asarray(ranks[rank_offsets[:-1]] // ranks_per_node != ranks[rank_offsets[1:] - 1] // ranks_per_node)


# Work of padded sequences; separate from `padding.py`, so that ranks read plans without the cost model.


def padded_work(work: Work, degree: npt.ArrayLike, multiple: int | None, profile: CostProfile) -> Work:
    """Return the work of sequences padded for groups of `degree` ranks, not yet divided by the degree.

    Args:
        work: work of the sequences, unpadded or padded for one rank.
        degree: degree of each sequence's group; broadcasts.
        multiple: padding multiple, or None for no padding.
        profile: cost profile, for the linear and window seconds of padding tokens.
    """
    if multiple is None:
        return work
    tokens = padded_tokens(work.tokens, degree, multiple)
    # Kernels compute padding, too: attention scales with the square of the length, window attention linearly.
    growth = tokens / work.tokens
    added = profile.coefficients.linear_seconds_per_token * (tokens - work.tokens)
    windows = work.windows
    if windows is not None:
        windows = WindowWork(
            seconds=windows.seconds + token_in_window_seconds(profile.coefficients) * (tokens - work.tokens),
            halo_tokens=np.minimum(tokens, 2 * reach_tokens(profile.coefficients)),
            shortest_tokens=tokens,
        )
    return Work(
        attention_seconds=work.attention_seconds * growth * growth,
        linear_seconds=work.linear_seconds + added,
        tokens=tokens,
        windows=windows,
    )


# Predicted timeline of a step: start of each micro-batch and end of the step, from their seconds and the sync.

NO_TERMS: Final = StepTerms()


class Times(NamedTuple):
    """Start of each micro-batch ([microbatches] seconds from the step's start), and end of the step.

    In pipelines a micro-batch starts with the forward of its first block. `stuck` lists deadlocked micro-batches, whose
    replicas wait for each other in a cycle; the makespan is then infinite.
    """

    start_seconds: FloatArray
    makespan_seconds: float
    stuck: tuple[int, ...] = ()


def priced_times(
    setup: PlanSetup, prices: Prices, terms: StepTerms, *, wave: Int32Array, rank_offsets: IntArray, ranks: Int32Array
) -> Times:
    """Predict a step from the prices of its rows, including idle ones; as pipelines if the setup has one."""
    if setup.pipeline is not None:
        run = setup.pipeline.run(rank_offsets, ranks, prices, stages=setup.pipeline_parallel, num_ranks=setup.num_ranks)
        ends = run.makespan_seconds + terms.closing_seconds(setup.sync)
        return Times(run.forward_start[:, 0], ends, tuple(run.stuck.tolist()))
    return step_times(
        setup.sync,
        wave=wave,
        rank_offsets=rank_offsets,
        ranks=ranks,
        seconds=prices.seconds,
        num_ranks=setup.num_ranks,
        terms=terms,
        encoder_seconds=prices.encoder_seconds,
    )


def step_times(
    sync: Sync,
    *,
    wave: Int32Array,
    rank_offsets: IntArray,
    ranks: Int32Array,
    seconds: FloatArray,
    num_ranks: int,
    terms: StepTerms = NO_TERMS,
    encoder_seconds: FloatArray | None = None,
) -> Times:
    """Predict a step from its micro-batches in their global order.

    Under `iteration` a micro-batch starts when all of its ranks have finished their earlier ones. Under `microbatch` a
    wave starts when the previous wave ends (`wave_seconds`). Gradient reduction and the optimizer follow the last
    micro-batch.

    Args:
        sync: scope of synchronization between ranks.
        wave, rank_offsets, ranks, seconds: the micro-batches; `wave` must ascend under `microbatch`.
        num_ranks: number of ranks of the job.
        terms: step terms of the cost profile.
        encoder_seconds: [microbatches] part of `seconds` in the vision encoder; only used in lockstep.
    """
    closing = terms.closing_seconds(sync)
    if sync == "microbatch":
        first = np.flatnonzero(np.concatenate(([True], wave[1:] != wave[:-1])))  # row 0 also begins a wave
        lasts = wave_seconds(first, seconds, terms, encoder_seconds)
        ends = np.cumsum(lasts)
        start = np.repeat(np.concatenate(([0.0], ends[:-1])), np.diff(first, append=len(wave)))
        return Times(start, float(ends[-1]) + closing)
    start = list_schedule(rank_offsets, ranks, seconds, num_ranks)
    return Times(start, float((start + seconds).max()) + closing)


def wave_seconds(
    first: IntArray, seconds: FloatArray, terms: StepTerms = NO_TERMS, encoder_seconds: FloatArray | None = None
) -> FloatArray:
    """Return [waves] the seconds of each: its slowest micro-batch, or in lockstep the sum of each module's slowest.

    Args:
        first: [waves] first micro-batch of each wave.
        seconds, terms, encoder_seconds: see `step_times`.
    """
    if terms.lockstep and encoder_seconds is not None:
        language = np.maximum.reduceat(seconds - encoder_seconds, first)
        slowest = np.maximum.reduceat(encoder_seconds, first) + language
    else:
        slowest = np.maximum.reduceat(seconds, first)
    return np.asarray(np.maximum(slowest, terms.floor_seconds("microbatch")))


def list_schedule(rank_offsets: IntArray, ranks: Int32Array, seconds: FloatArray, num_ranks: int) -> FloatArray:
    """Return [microbatches] the starts under `sync: iteration`: in order, each once all its ranks are free."""
    # Plain lists: faster than NumPy calls for a few hundred micro-batches, without numba's compilation.
    free = [0.0] * num_ranks
    starts = [0.0] * len(seconds)
    offsets, members, durations = rank_offsets.tolist(), ranks.tolist(), seconds.tolist()
    for i, duration in enumerate(durations):
        first, stop = offsets[i], offsets[i + 1]
        if stop - first == 1:
            rank = members[first]
            start = free[rank]
            free[rank] = start + duration
        else:
            group = members[first:stop]
            start = max([free[rank] for rank in group])
            end = start + duration
            for rank in group:
                free[rank] = end
        starts[i] = start
    return np.array(starts)
