"""Derives a cost profile of forward passes from a training profile, for log-probabilities and reference models.

Each training coefficient is multiplied by the share of the forward pass, from the operations, bytes and messages that
`analytic` counts: no backward, no recomputation, only keys and values in the ring. The fixed cost of a micro-batch is
scaled like the matrices. A wave gathers weights once; there is no gradient reduction or update. Rates, bandwidths and
the exposed share of a ring are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

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

Figures = TypeVar("Figures", Coefficients, Heads)


def forward_shares(spec: ModelSpec, recipe: Recipe, *, backward_slowdown: float = 1.0) -> dict[str, float]:
    """Return the share of the forward pass in training by name in `Coefficients` and `StepTerms`; factors cancel out.

    It is usually 1 / 3.5 for attention and 1 / 3 for matrices. The last hop of a ring only returns gradients.

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
    of_attention = 1 / (1 + backward.layers * attention_backward)
    of_matrices = 1 / backward.language.total(recomputes=recipe.recomputes_matrices)
    # 0 messages if all layers have windows
    of_hops = messages_per_hop(spec, reached=0.0) / messages if messages else 1.0
    of_halos = 1 / (1 + backward.layers * (2 + forward_reruns))
    return {
        "attention_seconds_per_token2": of_attention,
        "window_seconds_per_token2": of_attention,
        "linear_seconds_per_token": of_matrices,
        "microbatch_seconds": of_matrices,
        "host_microbatch_seconds": of_matrices,
        "ring_bytes_per_token": ring_bytes,
        "halo_bytes_per_token": ring_bytes,
        **dict.fromkeys(("ring_hop_seconds", "host_hop_seconds"), of_hops),
        **dict.fromkeys(("halo_message_seconds", "host_halo_message_seconds"), of_halos),
        "chunk_seconds_per_token": CHUNK_BYTES_FORWARD / chunks,
        "last_hop_bytes_per_token": 0.0,
        "last_hop_seconds": 0.0,
        "host_last_hop_seconds": 0.0,
        "vision_seconds_per_patch": 1 / backward.vision.total(recomputes=recipe.recomputes_layers),
        "vision_seconds_per_patch2": 1 / (1 + backward.vision.inputs * attention_backward),
        "wave_floor_seconds": gathered / (2 * gathered + scattered),
    }


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
        common_ground = replace(common_ground, coefficients=_scaled(common_ground.coefficients, shares))
    exchanges = (
        *("exchange_bytes_per_token", "key_value_exchange_bytes_per_token"),
        *("exchange_seconds", "host_exchange_seconds"),
    )
    forward = replace(
        profile,
        coefficients=_scaled(_without_elementwise(profile), shares),
        common_ground=common_ground,
        step=StepTerms(
            wave_floor_seconds=profile.step.wave_floor_seconds * shares["wave_floor_seconds"],
            lockstep=profile.step.lockstep,
        ),
        heads=profile.heads and _scaled(profile.heads, dict.fromkeys(exchanges, shares["ring_hop_seconds"])),
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


def _scaled(figures: Figures, shares: Mapping[str, float]) -> Figures:
    """Return coefficients or all-to-all costs multiplied by their shares."""
    names = {field.name for field in fields(figures)} & shares.keys()
    return replace(figures, **{name: getattr(figures, name) * shares[name] for name in names})


def _without_elementwise(profile: CostProfile) -> Coefficients:
    """Return the coefficients without recomputed elementwise operations, as stated by a computed profile."""
    seconds = float(profile.measurement.get("elementwise_seconds_per_token", 0.0))
    linear = max(0.0, profile.coefficients.linear_seconds_per_token - seconds)
    return replace(profile.coefficients, linear_seconds_per_token=linear)
