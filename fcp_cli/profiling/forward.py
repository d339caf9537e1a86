"""Derives a cost profile of forward passes from a training profile, for log-probabilities and reference models.

Each training coefficient is multiplied by the share of the forward pass, from the operations, bytes and messages that
`analytic` counts: no backward, no recomputation, only keys and values in the ring. The fixed cost of a micro-batch is
scaled like the matrices. A wave gathers weights once; there is no gradient reduction or update. Rates, bandwidths and
the exposed share of a ring are unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fcp_cli.cost.profile import Coefficients, CostProfile, Heads, StepTerms, dump_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError
from fcp_cli.memory.items import precision_of
from fcp_cli.memory.state import State, backward_of
from fcp_cli.models.cluster import DEFAULT_MODEL, AttentionRate
from fcp_cli.models.model import ModelSpec, known_model, load_model
from fcp_cli.profiling.computed import (
    ATTENTION_BACKWARD,
    CHUNK_BYTES_BACKWARD,
    CHUNK_BYTES_FORWARD,
    halo_bytes_per_token,
    messages_per_hop,
    ring_bytes_per_token,
)
from fcp_cli.util.validation import validated


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardShares:
    """Share of the forward pass in training, by coefficient: usually 1 / 3.5 for attention and 1 / 3 for matrices.

    Attributes:
        attention, linear: terms of the language model.
        ring_bytes, ring_hops, chunks: terms of rings: bytes, messages, and the overhead of chunks.
        halo_messages: messages of halos; their bytes have the share of rings.
        vision, vision_pairs: terms of the encoder's matrices and attention.
        wave_floor: minimum time of a wave's collectives.
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
    """Return the forward shares for a recipe; common factors of the model cancel out.

    Args:
        spec, recipe: model and recipe of the training profile.
        backward_slowdown: forward rate of the attention kernel / backward rate.
    """
    backward, precision = backward_of(spec, recipe), precision_of(recipe)
    reruns_forward = recipe.recompute == "full"
    forward_reruns = int(reruns_forward)
    kv_bytes = precision.activation
    training_bytes = _sent_bytes(
        spec, kv_bytes=kv_bytes, gradient_bytes=max(4, kv_bytes), recompute=reruns_forward, reached=backward.layers
    )
    forward_bytes = _sent_bytes(spec, kv_bytes=kv_bytes, gradient_bytes=0, reached=0.0)
    # Linear attention sends no keys and values.
    ring_bytes = forward_bytes / training_bytes if training_bytes else 1.0
    messages = messages_per_hop(spec, recompute=reruns_forward, reached=backward.layers)
    chunks = (1 + backward.layers * forward_reruns) * CHUNK_BYTES_FORWARD + backward.layers * CHUNK_BYTES_BACKWARD
    state = State(spec=spec, recipe=recipe, precision=precision, shards=1)
    gathered = state.computed_weight * state.parameters
    scattered = precision.gradient * state.trained if recipe.reduce == "wave" else 0.0
    attention_backward = ATTENTION_BACKWARD * backward_slowdown + forward_reruns
    return ForwardShares(
        attention=1 / (1 + backward.layers * attention_backward),
        linear=1 / backward.language.total(recomputes=recipe.recomputes_matrices),
        ring_bytes=ring_bytes,
        ring_hops=messages_per_hop(spec, reached=0.0) / messages if messages else 1.0,  # 0 if all layers have windows
        halo_messages=1 / (1 + backward.layers * (2 + forward_reruns)),
        chunks=CHUNK_BYTES_FORWARD / chunks,
        vision=1 / backward.vision.total(recomputes=recipe.recomputes_layers),
        vision_pairs=1 / (1 + backward.vision.inputs * attention_backward),
        wave_floor=gathered / (2 * gathered + scattered),
    )


def _sent_bytes(spec: ModelSpec, **of_pass: Any) -> float:
    """Return ring and halo traffic in bytes per token; see `ring_bytes_per_token` for arguments."""
    return ring_bytes_per_token(spec, **of_pass) + halo_bytes_per_token(spec, **of_pass)


def forward_profile(profile: CostProfile) -> CostProfile:
    """Return the forward profile of a training profile; a forward profile is returned unchanged.

    Without a recorded recipe, no recomputation is assumed. For an unknown model, the default model's shares are used:
    shares hardly depend on the model, except with adapters or frozen weights. Memory stays that of training, which is
    larger.
    """
    if profile.phase == "forward":
        return profile
    slowdown = backward_slowdown(profile)
    recipe, levels = profile.recipe or Recipe(), profile.recompute_levels
    if levels:
        recipe = replace(recipe, recompute=levels[0].recompute)  # the level of the coefficients
    shares = forward_shares(known_model(profile.model) or load_model(DEFAULT_MODEL), recipe, backward_slowdown=slowdown)
    common_ground = profile.common_ground
    if common_ground is not None:
        coefficients = _scaled_coefficients(common_ground.coefficients, shares)
        common_ground = replace(common_ground, coefficients=coefficients)
    forward = replace(
        profile,
        coefficients=_scaled_coefficients(_without_elementwise(profile), shares),
        common_ground=common_ground,
        step=StepTerms(
            wave_floor_seconds=profile.step.wave_floor_seconds * shares.wave_floor, lockstep=profile.step.lockstep
        ),
        heads=profile.heads and _scaled_heads(profile.heads, shares.ring_hops),
        phase="forward",
    )
    return replace(forward, text=dump_cost_profile(forward))


def backward_slowdown(profile: CostProfile) -> float:
    """Return the forward / backward rate of attention that a computed profile assumes, or 1."""
    rate = profile.measurement.get("attention_rate")
    if rate is None:
        return 1.0
    attention_rate = validated(rate, AttentionRate, where="the profile: attention_rate", error=ProfileError)
    return attention_rate.forward / attention_rate.backward


def _scaled_heads(heads: Heads, share: float) -> Heads:
    """Return the all-to-all costs scaled to the forward pass."""
    return replace(
        heads,
        exchange_bytes_per_token=heads.exchange_bytes_per_token * share,
        key_value_exchange_bytes_per_token=heads.key_value_exchange_bytes_per_token * share,
        exchange_seconds=heads.exchange_seconds * share,
    )


def _scaled_coefficients(coefficients: Coefficients, shares: ForwardShares) -> Coefficients:
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
        last_hop_bytes_per_token=0.0,  # only returns gradients
        last_hop_seconds=0.0,
        vision_seconds_per_patch=coefficients.vision_seconds_per_patch * shares.vision,
        vision_seconds_per_patch2=coefficients.vision_seconds_per_patch2 * shares.vision_pairs,
    )


def _without_elementwise(profile: CostProfile) -> Coefficients:
    """Return the coefficients without recomputed elementwise operations, as stated by a computed profile."""
    seconds = float(profile.measurement.get("elementwise_seconds_per_token", 0.0))
    linear = max(0.0, profile.coefficients.linear_seconds_per_token - seconds)
    return replace(profile.coefficients, linear_seconds_per_token=linear)
