"""A cost profile of forward passes, derived from one of training, for log-probabilities and reference models.

Each coefficient is that of training times the share that a forward has in it, by the operations, bytes and messages
that `analytic` counts: no backward, nothing recomputed, only keys and values in the ring. The fixed cost of a
micro-batch is launches, shared as those of the matrices are. A wave gathers weights once and scatters no gradients; a
step sums none and updates nothing. Rates and bandwidths stay, and so does the share of a ring that nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fcp_cli.cost.profile import Coefficients, CostProfile, Heads, StepTerms, dump_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.memory.precision import precision_of
from fcp_cli.memory.state import State
from fcp_cli.memory.trained import backward_of
from fcp_cli.models.cluster import AttentionRate
from fcp_cli.models.model import ModelSpec, known_model, load_model
from fcp_cli.models.shipped import DEFAULT_MODEL
from fcp_cli.profiling.computed.analytic import (
    ATTENTION_BACKWARD,
    CHUNK_BYTES_BACKWARD,
    CHUNK_BYTES_FORWARD,
    halo_bytes_per_token,
    messages_per_hop,
    ring_bytes_per_token,
)
from fcp_cli.recipe import Recipe
from fcp_cli.validation import validated


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardShares:
    """Share of a forward in training, by coefficient: 1 / 3.5 of attention and 1 / 3 of matrices in the usual case.

    Attributes:
        attention, linear: the terms of the language model.
        ring_bytes, ring_hops, chunks: the terms of rings: bytes, messages, and the cost of short chunks.
        halo_messages: the halo messages of halos, whose bytes have the share of rings'.
        vision, vision_pairs: the terms of the encoder's matrices, and of its attention.
        wave_floor: the floor of a wave's gathers and scatters.
    """

    attention: float
    linear: float
    ring_bytes: float
    ring_hops: float
    halo_messages: float
    chunks: float
    vision: float
    vision_pairs: float
    wave_floor: float


def forward_shares(spec: ModelSpec, recipe: Recipe, *, backward_slowdown: float = 1.0) -> ForwardShares:
    """Return the shares of a forward in training under a recipe; common figures of the model cancel out.

    Args:
        spec, recipe: the description and recipe of the training profile.
        backward_slowdown: rate of the attention kernel's forward over that of its backward.
    """
    backward, precision = backward_of(spec, recipe), precision_of(recipe)
    again, recomputes = recipe.recompute == "full", recipe.recomputes_matrices
    kv = precision.activation
    trained: dict[str, Any] = {"gradient_bytes": max(4, kv), "recompute": again, "reached": backward.layers}
    sent, alone = (
        sum(of(spec, kv_bytes=kv, **how) for of in (ring_bytes_per_token, halo_bytes_per_token))
        for how in (trained, {"gradient_bytes": 0, "reached": 0.0})
    )
    hops = messages_per_hop(spec, recompute=again, reached=backward.layers)
    chunks = (1 + backward.layers * again) * CHUNK_BYTES_FORWARD + backward.layers * CHUNK_BYTES_BACKWARD
    state = State(spec=spec, recipe=recipe, precision=precision, shards=1)
    gathered = state.computed_weight * state.parameters
    scattered = precision.gradient * state.trained if recipe.reduce == "wave" else 0.0
    attention_backward = ATTENTION_BACKWARD * backward_slowdown + again
    return ForwardShares(
        attention=1 / (1 + backward.layers * attention_backward),
        linear=1 / backward.language.total(recomputes=recomputes),
        ring_bytes=alone / sent if sent else 1.0,  # of linear attention nothing goes around
        ring_hops=messages_per_hop(spec, reached=0.0) / hops if hops else 1.0,  # none either if all layers have windows
        halo_messages=1 / (1 + backward.layers * (2 + again)),
        chunks=CHUNK_BYTES_FORWARD / chunks,
        vision=1 / backward.vision.total(recomputes=recipe.recomputes_layers),
        vision_pairs=1 / (1 + backward.vision.inputs * attention_backward),
        wave_floor=gathered / (2 * gathered + scattered),
    )


def forward_profile(profile: CostProfile) -> CostProfile:
    """Return the profile of forward passes under the same model, cluster and recipe; one of forward passes unchanged.

    If the profile does not say its recipe, nothing is recomputed; if its model is not known, the shares are those of
    the default model, which differ from others' only for adapters and frozen weights. The memory stays that of
    training, which holds more.
    """
    if profile.phase == "forward":
        return profile
    slowdown = backward_slowdown(profile)
    recipe, levels = profile.recipe or Recipe(), profile.recompute_levels
    if levels:
        recipe = replace(recipe, recompute=levels[0].recompute)  # that the coefficients are of
    shares = forward_shares(known_model(profile.model) or load_model(DEFAULT_MODEL), recipe, backward_slowdown=slowdown)
    ground = profile.common_ground
    made = replace(
        profile,
        coefficients=_scaled(_without_elementwise(profile), shares),
        common_ground=ground and replace(ground, coefficients=_scaled(ground.coefficients, shares)),
        step=StepTerms(
            wave_floor_seconds=profile.step.wave_floor_seconds * shares.wave_floor, lockstep=profile.step.lockstep
        ),
        heads=profile.heads and _exchanged(profile.heads, shares.ring_hops),
        phase="forward",
    )
    return replace(made, text=dump_cost_profile(made))


def backward_slowdown(profile: CostProfile) -> float:
    """Return the rate of attention's forward over its backward's that a computed profile assumes, or 1."""
    rate = profile.measurement.get("attention_rate")
    if rate is None:
        return 1.0
    found = validated(rate, AttentionRate, where="the profile: attention_rate", error=ProfileError)
    return found.forward / found.backward


def _exchanged(heads: Heads, share: float) -> Heads:
    """Return the seconds of all-to-alls without those of backward, which are as many."""
    return replace(
        heads,
        exchange_bytes_per_token=heads.exchange_bytes_per_token * share,
        key_value_exchange_bytes_per_token=heads.key_value_exchange_bytes_per_token * share,
        exchange_seconds=heads.exchange_seconds * share,
    )


def _scaled(coefficients: Coefficients, shares: ForwardShares) -> Coefficients:
    return replace(
        coefficients,
        attention_seconds_per_token2=coefficients.attention_seconds_per_token2 * shares.attention,
        linear_seconds_per_token=coefficients.linear_seconds_per_token * shares.linear,
        ring_bytes_per_token=coefficients.ring_bytes_per_token * shares.ring_bytes,
        microbatch_seconds=coefficients.microbatch_seconds * shares.linear,
        ring_hop_seconds=coefficients.ring_hop_seconds * shares.ring_hops,
        chunk_seconds_per_token=coefficients.chunk_seconds_per_token * shares.chunks,
        window_seconds_per_token2=coefficients.window_seconds_per_token2 * shares.attention,
        halo_bytes_per_token=coefficients.halo_bytes_per_token * shares.ring_bytes,
        halo_message_seconds=coefficients.halo_message_seconds * shares.halo_messages,
        last_hop_bytes_per_token=0.0,  # gradients on their way home
        last_hop_seconds=0.0,
        vision_seconds_per_patch=coefficients.vision_seconds_per_patch * shares.vision,
        vision_seconds_per_patch2=coefficients.vision_seconds_per_patch2 * shares.vision_pairs,
    )


def _without_elementwise(profile: CostProfile) -> Coefficients:
    """Return the coefficients without the recomputed elementwise operations that a computed profile states."""
    seconds = float(profile.measurement.get("elementwise_seconds_per_token", 0.0))
    linear = max(0.0, profile.coefficients.linear_seconds_per_token - seconds)
    return replace(profile.coefficients, linear_seconds_per_token=linear)
