"""Prints cost profiles as tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fcp_cli.console import new_table, print_table
from fcp_cli.cost.explain import (
    break_even_tokens,
    example_lengths,
    figures_of,
    hidden_ring_tokens,
    seconds_table,
)
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, CostProfile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_profile(console: Console, profile: CostProfile, *, lengths: Sequence[int], degrees: Sequence[int]) -> None:
    """Explain a profile: its figures, break-even points, example times and errors."""
    console.print(f"{profile.model} on {profile.cluster}: {profile.origin}", style="bold")
    table = new_table("figure", "value", "meaning", left=(0, 2))
    for path, (value, meaning) in figures_of(profile).items():
        table.add_row(path.split(".")[-1], f"{value:.4g}", meaning)
    console.print(table)
    for warning in profile.measurement.get("warnings") or ():
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    for line in reading(profile, degrees):
        console.print(line, markup=False, soft_wrap=True)
    lengths = lengths or example_lengths(profile)
    table = new_table("seconds at length", *(f"degree {degree}" for degree in degrees))
    for length, seconds in zip(lengths, seconds_table(profile, lengths, degrees).tolist(), strict=True):
        table.add_row(f"{length:,}", *(f"{value:.4g}" for value in seconds))
    print_table(console, table)
    print_errors(console, profile)


def reading(profile: CostProfile, degrees: Sequence[int]) -> list[str]:
    """Interpret the figures in sentences; rings at the smallest and largest of `degrees`."""
    lines = []
    middle = break_even_tokens(profile)
    if middle is not None:
        lines.append(f"Break-even: attention takes as long as linear work at {middle:,.0f} tokens.")
    rings = sorted(degree for degree in degrees if degree > 1)
    lines += [line for degree in dict.fromkeys(rings[:1] + rings[-1:]) if (line := _hidden_ring(profile, degree))]
    tokens_per_rank = profile.memory.tokens_per_rank()
    if tokens_per_rank is None:
        lines.append("Token budget: unknown, since the memory block is empty; fcp plan needs --tokens-per-rank.")
    elif tokens_per_rank < 1:
        memory = profile.memory
        state, room = memory.model_state_bytes / 1e9, memory.capacity_bytes / 1e9
        lines.append(f"Token budget: none, since {state:.1f} of {room:.1f} GB are taken before the first token.")
    else:
        lines.append(f"Token budget: {tokens_per_rank:,} tokens per rank and micro-batch.")
    lines += _formats(profile)
    measured = profile.measurement
    if measured.get("shares_cores"):
        lines.append(
            f"Measured with {measured['ranks_per_node']} ranks on {measured['cores']} cores: times include that."
        )
    encoder = measured.get("vision_encoder") or {}
    if "trained" in encoder or "frozen" in encoder:
        kind = "frozen" if encoder["freeze_vision"] else "trained"
        lines.append(f"Vision encoder: timed trained and frozen; this profile is for a {kind} one.")
    lines += _recipe(profile)
    if profile.attention_kernels is not None:
        table = profile.attention_kernels
        shares = ", ".join(f"{name} {count}" for name, count in table.quickest().items()) or "none"
        lines.append(f"Attention kernels, by the number of shapes for which each is fastest: {shares}.")
    lines += _circumstances(measured)
    step = measured.get("step_seconds")
    if step:
        lines.append(f"Besides its micro-batches, a step takes {float(step):.4g} s (gradient sum, clipping, AdamW).")
    return lines


def _recipe(profile: CostProfile) -> list[str]:
    """Describe the training recipe of the profile, if recorded."""
    if profile.recipe is None:
        return []
    sync = f", sync {profile.sync}" if profile.sync else ""
    return [f"Times and memory are of {profile.recipe.describe()}{sync}: {shlex.join(profile.recipe.flags())}."]


def _circumstances(measured: Mapping[str, Any]) -> list[str]:
    """Describe how rings were measured on accelerators: emulated degrees, messages, first contacts, clocks."""
    lines = []
    if degrees := measured.get("compute_only_degrees"):
        named = ", ".join(map(str, degrees))
        lines.append(f"Compute only: degrees {named} were emulated on one device; ring transfers are assumed.")
    for tier, figures in (measured.get("transfers") or {}).items():
        rate, latency = figures["bytes_per_second"] / 1e9, 1e6 * figures["seconds_per_message"]
        lines.append(f"Messages {_TIERS.get(tier, tier)}: {rate:.3g} GB/s, {latency:.3g} us each.")
    for tier, figures in (measured.get("first_contact") or {}).items():
        megabytes = figures.get("device_megabytes")
        memory = "" if megabytes is None else f" and {megabytes:,.0f} MB of device memory a peer"
        took = f"{figures['milliseconds']:.3g} ms"
        lines.append(f"First contact of two ranks {_TIERS.get(tier, tier)}: {took}{memory}.")
    before, after = measured.get("clocks_before_mhz"), measured.get("clocks_after_mhz")
    if before and after:
        lines.append(
            f"Clocks of the devices: {min(before):,.0f} to {max(before):,.0f} MHz before, {min(after):,.0f} to "
            f"{max(after):,.0f} MHz after."
        )
    return lines


_TIERS = {
    "intra_node": "inside a node",
    "inter_node": "between nodes, on one rail",
    "inter_node_cross_rail": "between nodes, across rails",
}


def _hidden_ring(profile: CostProfile, degree: int) -> str | None:
    """Describe from which length attention hides a ring of this degree, or return None."""
    inside, across = (
        hidden_ring_tokens(profile, degree=degree, tier="intra_node"),
        hidden_ring_tokens(profile, degree=degree, tier="inter_node"),
    )
    if inside is None or across is None:
        return None
    hidden = "all but the exposed share of a ring" if profile.coefficients.exposed_ring_share else "a ring"
    beyond = "" if across == inside else f", across nodes {across:,.0f}"
    return f"Attention hides {hidden} of degree {degree} from {inside:,.0f} tokens on{beyond}."


def _formats(profile: CostProfile) -> list[str]:
    """Compare the held-out errors of both ring models, if both were fitted."""
    errors: Mapping[str, float] = profile.measurement.get("held_out_error_percent_by_model") or {}
    if HIDDEN_RING not in errors or EXPOSED_RING not in errors:
        return []
    hidden, exposed = errors[HIDDEN_RING], errors[EXPOSED_RING]
    if profile.common_ground is None:
        return [f"Held-out error {hidden:.1f} %; an exposed share of the ring would make it {exposed:.1f} %."]
    share = profile.coefficients.exposed_ring_share
    return [f"{share:.0%} of a ring is exposed; held-out error {exposed:.1f} %, {hidden:.1f} % without."]


def print_errors(console: Console, profile: CostProfile) -> None:
    """Print the error table of a measured profile, if any."""
    rows: Any = profile.measurement.get("error_by_degree")
    if not rows:
        return
    table = new_table("degree", "error held out", "error fitted", "held out", "points")
    for row in rows:
        held_out, shared = row.get("held_out_percent"), row.get("heads_degree", 1)
        table.add_row(
            str(row["degree"]) if shared == 1 else f"{row['degree']} = {shared} x {row['degree'] // shared}",
            "-" if held_out is None else f"{held_out:.2f} %",
            f"{row['fitted_percent']:.2f} %",
            str(row["held_out_points"]),
            str(row["points"]),
        )
    total = profile.measurement.get("held_out_error_percent")
    if total is not None:
        fitted = profile.measurement["fitted_error_percent"]
        table.add_section()
        table.add_row("all", f"{total:.2f} %", f"{fitted:.2f} %", "", "")
    _add_encoder_errors(table, profile.measurement.get("vision_encoder") or {})
    print_table(console, table)


def _add_encoder_errors(table: Table, encoder: Mapping[str, Any]) -> None:
    """Add the errors of the vision encoder, which has no degree: each rank encodes its own parts."""
    fits = [(name, encoder[name]) for name in ("trained", "frozen") if name in encoder]
    if fits:
        table.add_section()
    for name, fit in fits:
        held_out = fit.get("held_out_error_percent")
        table.add_row(
            f"encoder, {name}",
            "-" if held_out is None else f"{held_out:.2f} %",
            f"{fit['fitted_error_percent']:.2f} %",
            str(fit["held_out_points"]),
            str(fit["fitted_points"]),
        )
