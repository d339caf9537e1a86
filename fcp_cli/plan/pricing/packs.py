"""Prices packs on groups under a cost profile: the only place where sequences become the seconds of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fcp_cli.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.cost.model import Work, encoder_seconds, group_seconds, sequence_work, vision_seconds
from fcp_cli.cost.profile import CostProfile
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.pricing.padded_work import padded_work
from fcp_cli.plan.pricing.padding import padded_tokens
from fcp_cli.plan.pricing.prices import Prices
from fcp_cli.plan.pricing.setup import PlanSetup
from fcp_cli.plan.pricing.speeds import Speeds
from fcp_cli.plan.step import StepPlan, sizes_of
from fcp_cli.recipe import SplitAttention


class EncoderShares(NamedTuple):
    """Who encodes the pictures of a wave.

    Attributes:
        ranks: the ranks that share the work.
        runs_ahead: they do nothing else, and encode a wave while the others run the one before.
        forward_share: the forward's share of the encoder's seconds; the rest is its backward, once gradients have come
            back.
    """

    ranks: int
    runs_ahead: bool = False
    forward_share: float = 1.0


class PlacedPacks(NamedTuple):
    """Packs and the groups that run them.

    Attributes:
        work: the work of the packs' sequences, back to back, on a single rank (`single_rank_work`).
        offsets: [microbatches + 1] pack i has the sequences `offsets[i]:offsets[i + 1]`.
        rank_offsets, ranks: group i has the ranks `ranks[rank_offsets[i]:rank_offsets[i + 1]]`, ascending.
    """

    work: Work
    offsets: IntArray
    rank_offsets: IntArray
    ranks: Int32Array


def encoder_shares(setup: PlanSetup, profile: CostProfile) -> EncoderShares | None:
    """Return which ranks share the encoding of a wave's pictures, and when; None if each ring encodes its own."""
    if setup.encoder_balance is None:
        return None
    if not setup.encoder_ranks:
        return EncoderShares(setup.num_ranks)
    has_backward = profile.phase is None and not (setup.recipe is not None and setup.recipe.freeze_vision)
    forward_share = _FORWARD_SHARE if has_backward else 1.0
    return EncoderShares(setup.encoder_ranks, runs_ahead=True, forward_share=forward_share)


_FORWARD_SHARE = 1 / 3  # a backward multiplies twice as much


def beside_language(
    shares: EncoderShares, encoder_seconds: FloatArray, language_seconds: FloatArray, wave: Int32Array
) -> FloatArray:
    """Return the seconds that each micro-batch waits for its wave's pictures, on top of its own work, [microbatches].

    Ranks that do nothing else hold one wave ahead: they send a wave's embeddings, encode the next, and run the backward
    of the wave before, whose gradients have come meanwhile. The last wave's backward closes the step.

    Args:
        shares: who encodes.
        encoder_seconds: [microbatches] of the pictures of each one's wave, on one rank.
        language_seconds: [microbatches] without them.
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
    # A recurrence: a wave starts when its pictures are there and the wave before has ended.
    for number, (encoding, computing) in enumerate(zip(encoder, language, strict=True)):
        before = backward * encoder[number - 2] if number > 1 else 0.0
        ready = start + forward * encoding + before
        start = max(end, ready)
        waits.append(start - end)
        end = start + computing
    before = backward * encoder[-2] if len(encoder) > 1 else 0.0
    # Behind the last wave come the backwards of the last two.
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
        step: the planned step; lengths are its own, after truncation.
        profile: any cost profile, the plan's own or another.
        rank_speeds: the rank speeds of the plan at this step; None: all as the profile says.
        manifest: gives `eta` and vision columns; without it every sequence counts as causal text.
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
    # The whole wave waits for its pictures, whichever ring they belong to.
    shared, text = wave_encoder_seconds(vision_seconds(sequences, profile), step.sequence_offsets, step.wave), prices[0]
    return Prices(np.where(step.is_idle, 0.0, text + beside_language(shares, shared, text, step.wave)))


def microbatch_prices(
    packs: PlacedPacks, setup: PlanSetup, profile: CostProfile, *, heads: Int32Array | SplitAttention | None = None
) -> Prices:
    """Price packs on groups of ranks.

    Args:
        setup: gives nodes and padding.
        heads: [microbatches] ranks of each group that share heads; or how groups may share them, and each then does so
            that it takes least (`quickest_heads`); None: groups are rings.
    """
    attention, heads_degree = (heads, None) if isinstance(heads, str) else (None, heads)
    pack, working = _working_packs(packs, setup, profile)
    rank_offsets, ranks, per_node = packs.rank_offsets, packs.ranks, setup.ranks_per_node
    degree = sizes_of(rank_offsets)[working]
    seconds, encoder, language, held = np.zeros((4, len(packs.offsets) - 1))
    shared = np.int64(1) if heads_degree is None else heads_degree[working]
    seconds[working] = group_seconds(
        profile,
        pack,
        degree=degree,
        crosses_nodes=crosses_nodes(rank_offsets, ranks, per_node)[working],
        heads_degree=shared,
        sets_cross_nodes=heads_degree is not None
        and ranks_together(rank_offsets, ranks, per_node)[working] % shared != 0,
    )
    # A group of one rank has nothing to share.
    wide = np.flatnonzero(degree > 1)
    if attention is not None and len(wide):
        _choices, found = _by_heads(attention, pack.take(wide), working[wide], packs, per_node, profile)
        seconds[working[wide]] = found.min(axis=0)
    encoder[working] = encoder_seconds(pack, profile) / degree
    held[working] = pack.tokens / degree
    language[working] = profile.coefficients.linear_seconds_per_token * held[working]
    return Prices(seconds, encoder, language, held)


def quickest_heads(attention: SplitAttention, packs: PlacedPacks, setup: PlanSetup, profile: CostProfile) -> Int32Array:
    """Return [microbatches] how many ranks of each group share heads, so that it takes least; of equals the fewest.

    Under `ulysses` all of a group, else a number of which every set lies inside a node.
    """
    assert profile.heads is not None, "a profile without the block `heads` knows rings alone"
    degree = sizes_of(packs.rank_offsets)
    if attention == "ulysses":
        return degree.astype(np.int32)
    best = np.ones(len(degree), dtype=np.int32)
    pack, working = _working_packs(packs, setup, profile)
    wide = np.flatnonzero(degree[working] > 1)
    choices, seconds = _by_heads(attention, pack.take(wide), working[wide], packs, setup.ranks_per_node, profile)
    # argmin takes the first of equals, and choices rise: the fewest.
    best[working[wide]] = choices[seconds.argmin(axis=0), 0]
    return best


def _working_packs(packs: PlacedPacks, setup: PlanSetup, profile: CostProfile) -> tuple[Work, IntArray]:
    """Return the work of the packs that have sequences, padded for their groups, and their positions."""
    working = np.flatnonzero(sizes_of(packs.offsets))
    # Packs without sequences take no room in `work`: the others lie back to back without them.
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
    """Return Ulysses degrees, [choices, 1 or groups], and the seconds of packs with each, [choices, groups].

    It is infinite where sets would not lie inside nodes, but under `ulysses`, which has no other choice.
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
    """Add up over waves: [microbatches] the seconds on one rank of all pictures of the wave of each micro-batch.

    Args:
        encoder_seconds: the encoder seconds of the packs' sequences, back to back.
        offsets: [microbatches + 1] pack i has the sequences `offsets[i]:offsets[i + 1]`.
        wave: [microbatches] from 0.
    """
    of_wave = np.bincount(np.repeat(wave, sizes_of(offsets)), weights=encoder_seconds, minlength=int(wave.max()) + 1)
    return np.asarray(of_wave[wave], dtype=np.float64)


def without_pictures(sequences: LengthTable) -> LengthTable:
    """Return the same sequences as if they were text."""
    return replace(sequences, vision_patches=None, vision_patch_pairs=None)


def single_rank_work(sequences: LengthTable, profile: CostProfile, padding_multiple: int | None) -> Work:
    """Return the work of each sequence on one rank, padded for that; no group pads less, so bounds may use it."""
    padded = padded_tokens(sequences.length_tokens, 1, padding_multiple)
    return sequence_work(replace(sequences, length_tokens=padded), profile)


def pack_work(
    work: Work, offsets: IntArray, degree: npt.ArrayLike, profile: CostProfile, padding_multiple: int | None
) -> Work:
    """Add up the work of packs on groups of `degree` ranks ([packs], or one for all); none of the packs is empty.

    Args:
        work: the work of the packs' sequences, back to back, on a single rank.
        offsets: [packs + 1] pack p has the sequences `offsets[p]:offsets[p + 1]`.
        degree: ranks of each pack's group.
        profile, padding_multiple: padding of rings, and its price.
    """
    first = offsets[:-1]
    if padding_multiple is not None:
        degrees = np.broadcast_to(np.asarray(degree), first.shape)
        work = padded_work(work, np.repeat(degrees, np.diff(offsets)), padding_multiple, profile)
    return work.packed(first)


def planned_sequences(step: StepPlan, manifest: LengthTable | None) -> LengthTable:
    """Return the sequences of a step in its own order, with its own lengths and, if given, the manifest's factors."""
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
    """Return [groups] the greatest number that divides how many ranks each group has on every one of its nodes."""
    node = ranks // ranks_per_node
    # Runs of ranks on one node; a group's first rank begins a run, too.
    begins = np.concatenate(([True], node[1:] != node[:-1]))
    begins[rank_offsets[:-1]] = True
    first = np.flatnonzero(begins)
    return np.asarray(np.gcd.reduceat(np.diff(first, append=len(ranks)), np.searchsorted(first, rank_offsets[:-1])))


def crosses_nodes(rank_offsets: IntArray, ranks: Int32Array, ranks_per_node: int) -> npt.NDArray[np.bool_]:
    """Return [groups] whether each group's ranks lie on more than one node; ranks ascend within a group."""
    # Ascending ranks: the first and the last tell.
    return np.asarray(ranks[rank_offsets[:-1]] // ranks_per_node != ranks[rank_offsets[1:] - 1] // ranks_per_node)
