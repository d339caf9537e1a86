"""Explanation of a cost profile: meaning of its coefficients, break-even lengths, example times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Literal

import numpy as np

from fcp_cli.cost.model import causal_work, group_seconds
from fcp_cli.cost.profile import ONLY_WHERE_GIVEN, Bandwidth, Coefficients, CostProfile, Heads, Memory, StepTerms
from fcp_cli.util.arrays import FloatArray

Tier = Literal["intra_node", "inter_node"]

MEANINGS = {
    "attention_seconds_per_token2": "alpha1: causal attention, forward and backward, per pair of tokens",
    "linear_seconds_per_token": "alpha2: matrices, norms and loss, per token",
    "ring_bytes_per_token": "alpha3: K/V forward, K/V and dK/dV backward, all layers",
    "microbatch_seconds": "beta1: fixed cost of one micro-batch",
    "ring_hop_seconds": "beta2: fixed cost of one hop, forward and backward, all layers",
    "exposed_ring_share": "of a ring's seconds, not hidden by attention",
    "chunk_seconds_per_token": "that attention takes longer in a ring, per token and hop",
    "window_seconds_per_token2": "attention in windows, as alpha1: per pair of tokens within one",
    "window_tokens": "of a window",
    "halo_bytes_per_token": "of layers with windows, per token of what travels of them; rings carry the others",
    "halo_message_seconds": "fixed cost of one message of a halo, forward and backward, all layers with windows",
    "last_hop_bytes_per_token": "of alpha3, in a last hop that no kernel hides",
    "last_hop_seconds": "messages of a last hop that no kernel hides",
    "host_microbatch_seconds": "the host's clock: to issue a micro-batch without messages; a pack takes the longer one",
    "host_hop_seconds": "the host's clock: to issue one hop, forward and backward, all layers",
    "host_last_hop_seconds": "the host's clock: to issue a ring's message in addition to its hops",
    "host_halo_message_seconds": "the host's clock: to issue one message of a halo, all layers with windows",
    "host_exchange_seconds": "the host's clock: to issue the messages to one rank that shares the heads",
    "query_heads": "query heads of a device",
    "key_value_heads": "key/value heads of a device",
    "exchange_bytes_per_token": "queries, outputs and their gradients, where ranks exchange tokens for heads",
    "key_value_exchange_bytes_per_token": "keys, values and their gradients, where ranks exchange tokens for heads",
    "exchange_seconds": "messages to one rank that shares the heads, forward and backward, all layers",
    "bandwidth_share": "of the bandwidth of rings, that exchanges reach",
    "vision_seconds_per_patch": "vision encoder, per patch",
    "vision_seconds_per_patch2": "vision encoder's attention, per pair of patches of one image",
    "intra_node": "bytes per second in a ring inside a node",
    "inter_node": "bytes per second in a ring across nodes",
    "bytes_per_token": "activations of one token on a rank",
    "model_state_bytes": "weights, gradients and optimizer on a rank",
    "capacity_bytes": "memory of a rank that may be used",
    "wave_floor_seconds": "least time of a wave: weights gathered, gradients scattered",
    "tail_seconds": "gradients summed after the last micro-batch",
    "update_seconds": "optimizer, and loading that nothing hides, per step",
    "lockstep": "1: a wave waits for its slowest encoder before the language model",
}


def figures_of(profile: CostProfile) -> dict[str, tuple[float, str]]:
    """Return (value, meaning) of a profile's numbers by path, in file order, without optional zeros."""
    blocks = (
        ("coefficients", Coefficients, profile.coefficients),
        ("bandwidth_bytes_per_second", Bandwidth, profile.bandwidth),
        ("memory", Memory, profile.memory),
        ("step", StepTerms, profile.step),
        *([] if profile.heads is None else [("heads", Heads, profile.heads)]),
    )
    return {
        f"{block}.{f.name}": (float(getattr(values, f.name)), MEANINGS[f.name])
        for block, kind, values in blocks
        for f in fields(kind)
        if getattr(values, f.name) or not (block == "step" or f.name in ONLY_WHERE_GIVEN)
    }


def break_even_tokens(profile: CostProfile) -> float | None:
    """Return the length at which attention takes as long as linear work, or None."""
    return _reached_by_attention(profile.coefficients, per_token=profile.coefficients.linear_seconds_per_token)


def host_bound_tokens(profile: CostProfile) -> float | None:
    """Return the tokens of one sequence on one rank below which its device waits for its host, or None."""
    c = profile.coefficients
    waits = c.host_microbatch_seconds - c.microbatch_seconds
    if waits <= 0.0:
        return None
    if not c.attention_seconds_per_token2 + c.window_seconds_per_token2:
        return waits / c.linear_seconds_per_token
    return _reached_by_attention(c, per_token=-c.linear_seconds_per_token, fixed=waits)


def _reached_by_attention(c: Coefficients, *, per_token: float, fixed: float = 0.0) -> float | None:
    """Return the length from which attention takes at least `per_token` L + `fixed` seconds, or None.

    Sequences longer than a window of w tokens have 2 w L - w^2 pairs.
    """
    full, windowed, window = c.attention_seconds_per_token2, c.window_seconds_per_token2, c.window_tokens
    if not full + windowed:
        return None
    # The positive root of (full + windowed) L^2 = per_token L + fixed; the other one is negative.
    within = (per_token + math.sqrt(per_token * per_token + 4 * (full + windowed) * fixed)) / (2 * (full + windowed))
    if not windowed or within <= window:
        return within
    rest, start = per_token - 2 * windowed * window, fixed + windowed * window * window
    if not full:
        return start / -rest if rest < 0 else None
    return (rest + math.sqrt(rest * rest + 4 * full * start)) / (2 * full)


def hidden_ring_tokens(profile: CostProfile, *, degree: int, tier: Tier) -> float | None:
    """Return the length from which attention hides the hideable part of a single sequence's ring, or None.

    It solves attention = hidden of `formula.pack_parts` for L tokens, multiplied by the degree.
    """
    c = profile.coefficients
    if degree < 2 or c.exposed_ring_share == 1:
        return None
    bandwidth = profile.bandwidth.intra_node if tier == "intra_node" else profile.bandwidth.inter_node
    hidden = 1 - c.exposed_ring_share
    ring_bytes = c.ring_bytes_per_token * (degree - 1) - c.last_hop_bytes_per_token
    per_token = hidden * ring_bytes / bandwidth - c.chunk_seconds_per_token * (degree - 1)
    fixed = hidden * c.ring_hop_seconds * (degree - 1) * degree
    if c.halo_bytes_per_token:
        c = replace(c, window_seconds_per_token2=0.0)  # overlaps with no ring
    return _reached_by_attention(c, per_token=per_token, fixed=fixed)


def seconds_table(
    profile: CostProfile, lengths: Sequence[int], degrees: Sequence[int], *, tier: Tier = "intra_node"
) -> FloatArray:
    """Predict [lengths, degrees] the seconds of a single causal sequence."""
    return group_seconds(
        profile,
        causal_work(np.asarray(lengths, dtype=np.int64)[:, None], profile.coefficients),
        degree=np.asarray(degrees)[None, :],
        crosses_nodes=tier == "inter_node",
    )


def example_lengths(profile: CostProfile) -> list[int]:
    """Return eight consecutive powers of two around the break-even length."""
    middle = break_even_tokens(profile) or 16384.0
    centre = round(math.log2(min(max(middle, 256.0), 2.0**40)))
    return [2**exponent for exponent in range(max(centre - 4, 6), centre + 4)]
