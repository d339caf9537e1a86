"""Prints cost profiles as tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fcp_cli.cost.explain import (
    break_even_tokens,
    example_lengths,
    figures_of,
    hidden_ring_tokens,
    host_bound_tokens,
    seconds_table,
)
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, CostProfile, parse_cost_profile
from fcp_cli.errors import ProfileError
from fcp_cli.manifest.read import PICTURE_COUNTS, ManifestSummary
from fcp_cli.memory.fitting import sharing_ranks
from fcp_cli.memory.items import RankMemory
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import Cut
from fcp_cli.models.cluster import THIS_MACHINE
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.util.console import bar, new_table, print_table
from fcp_cli.util.words import counted

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
    host_bound = host_bound_tokens(profile)
    if host_bound is not None:
        lines.append(f"Host: below {host_bound:,.0f} tokens a rank waits for its host, whatever its device computes.")
    rings = sorted(degree for degree in degrees if degree > 1)
    lines += [line for degree in dict.fromkeys(rings[:1] + rings[-1:]) if (line := _hidden_ring(profile, degree))]
    if profile.coefficients.last_hop_bytes_per_token or profile.coefficients.last_hop_seconds:
        lines.append(
            "Last hop: priced as exposed, as in fcp's rings of earlier versions and in MindSpore's; a kernel hides it "
            "now. 'fcp profile --analytic' computes prices without it."
        )
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


_BAR_CELLS: Final = 22
_BIN_COLUMNS: Final = 11  # width of the length range column
_SHARE_COLUMNS: Final = 10  # width of a percentage and the column gap


def print_manifest(
    console: Console, source: dict[str, Any] | None, summary: ManifestSummary, pictures: Mapping[str, int]
) -> None:
    """Print the statistics of a manifest and a histogram of its lengths."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_row("sequences", f"{summary.rows:,}")
    facts.add_row("tokens", f"{summary.tokens:,}")
    facts.add_row("length", f"min {summary.min_tokens:,}  mean {summary.mean_tokens:,.1f}  max {summary.max_tokens:,}")
    facts.add_row("", "  ".join(f"p{p:g} {length:,}" for p, length in summary.percentiles.items()))
    facts.add_row("longest 1 %", f"{summary.longest_percent_token_share:.1%} of all tokens")
    if pictures:
        facts.add_row("pictures", ", ".join(counted(count, PICTURE_COUNTS[name]) for name, count in pictures.items()))
    facts.add_row("source", _source_text(source))
    console.print(facts)
    room = console.width - _BIN_COLUMNS - 2 * _SHARE_COLUMNS
    bars = max(1, min(_BAR_CELLS, room // 2))
    print_table(console, _histogram(summary, bars, ascii_only=console.options.ascii_only))


def _source_text(source: dict[str, Any] | None) -> str:
    if source is None:
        return "not recorded: the file was not made by fcp manifest build"
    place = f"{source['kind']} {source['path']}"
    return f"{place}, tokens by {source['tokenizer']}" if source.get("tokenizer") else place


def _histogram(summary: ManifestSummary, bar_cells: int, *, ascii_only: bool) -> Any:
    from rich import box
    from rich.table import Table

    chart = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    chart.add_column("length", justify="right", no_wrap=True)
    for title in ("% of sequences", "% of tokens"):
        chart.add_column(title, no_wrap=True, min_width=7 + bar_cells)
    shares = [(span.sequences / summary.rows, span.tokens / summary.tokens) for span in summary.bins]
    largest = max(max(pair) for pair in shares)
    for span, pair in zip(summary.bins, shares, strict=True):
        bars = [f"{share:6.1%} {bar(share / largest, bar_cells, ascii_only=ascii_only)}" for share in pair]
        chart.add_row(f"{_short(span.from_tokens)} - {_short(span.to_tokens)}", *bars)
    return chart


def _short(tokens: int) -> str:
    """Format a power of two in binary units: 512, 4k, 2M."""
    for factor, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if tokens >= factor:
            return f"{tokens // factor}{letter}"
    return str(tokens)


_ITEMS_NAMED = 4


def ranks_are_hosts(metadata: PlanMetadata) -> bool:
    """Return whether ranks are CPU cores of one machine, which need no device memory for connections."""
    try:
        return parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").cluster == THIS_MACHINE
    except ProfileError:
        return False


def planned_memory(metadata: PlanMetadata, peers: int) -> RankMemory | None:
    """Return the modelled memory of a rank; None if the plan names no model or recipe.

    Args:
        metadata: plan metadata.
        peers: maximum number of peers per rank.
    """
    if metadata.recipe is None:
        return None
    try:
        profile = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile")
        spec = load_model(profile.model)
    except ProfileError:
        return None
    memory = rank_memory(
        spec,
        metadata.recipe,
        sync=metadata.sync,
        ranks=metadata.num_ranks,
        cut=Cut(
            tensor_parallel=metadata.tensor_parallel,
            pipeline_parallel=metadata.pipeline_parallel,
            expert_parallel=profile.expert_parallel,
        ),
        on_cpu=ranks_are_hosts(metadata),
        peers=peers,
        sharing=sharing_ranks(metadata.attention, metadata),
    )
    return memory if metadata.phase is None else memory.in_forward()


def memory_sentence(metadata: PlanMetadata, memory: RankMemory) -> str:
    """Describe the memory at the full token budget, in GB by use."""
    assert metadata.recipe is not None, "the memory model needs one"
    model = parse_cost_profile(metadata.cost_profile, name="the plan's cost profile").model
    tokens = metadata.tokens_per_rank
    items = [f"{name} {size / 1e9:.1f}" for name, size in memory.items(tokens).items()]
    named = ", ".join(items[:_ITEMS_NAMED]) + (" and more" if len(items) > _ITEMS_NAMED else "")
    takes = f"{memory.total_bytes(tokens) / 1e9:.1f} GB under {metadata.recipe.describe()}"
    return f"By the memory model of {model}, a rank at its full token budget takes {takes}: {named}."
