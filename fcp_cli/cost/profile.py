"""Cost profiles (format `fcp-cost-profile/1`): the coefficients of the cost model, as YAML.

The coefficient `exposed_ring_share` requires the block `common_ground`, a fit of the same samples without it for fair
comparisons of strategies. Other optional coefficients price chunks, a ring's last hop, window layers and halos. The
optional keys are `step` (seconds outside micro-batches), `heads` (Ulysses prices; without it groups are pure rings),
`recipe` (assumed by times and memory), `sync` (assumed by memory), `recompute_levels` (as-needed recomputation),
`phase` (if not training) and `attention_kernels` (measured kernels of the device). Readers reject unknown keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from msgspec import Meta

from fcp_cli.cost.kernels import KernelTable
from fcp_cli.cost.levels import RecomputeLevel, check_levels
from fcp_cli.cost.recipe import KERNELS, KernelName, Phase, Recipe
from fcp_cli.errors import ProfileError
from fcp_cli.util.files import as_word, near_file
from fcp_cli.util.inputs import parse_yaml, read_text
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.validation import Count, NonNegative, Positive, Share, fields_of, validated

FORMAT: Final = "fcp-cost-profile/1"
# The two models that a fit compares, by their names in the block `measurement`.
HIDDEN_RING: Final = "hidden_ring"  # attention may hide the whole ring
EXPOSED_RING: Final = "exposed_ring_share"
Origin = Literal["measured", "fitted", "analytic", "assumed"]
Sync = Literal["iteration", "microbatch"]
# Least token prices that do not vanish next to fixed seconds in float64; a thousandth of the fastest devices' prices.
_LEAST_PER_TOKEN: Final = 1e-12
_LEAST_PER_TOKEN2: Final = 1e-16
# Figures that are omitted from the file if 0.
ONLY_WHERE_GIVEN: Final = (
    *("chunk_seconds_per_token", "last_hop_bytes_per_token", "last_hop_seconds"),
    *("window_seconds_per_token2", "window_tokens", "halo_bytes_per_token", "halo_message_seconds"),
    *("host_microbatch_seconds", "host_hop_seconds", "host_last_hop_seconds", "host_halo_message_seconds"),
    "host_exchange_seconds",
)
Overhead = Annotated[float, Meta(ge=0, le=1e4, description="a non-negative number")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Coefficients of the cost model: alpha1, alpha2, alpha3, beta1, beta2 of the FCP paper (Eq. 8-9), and others."""

    attention_seconds_per_token2: NonNegative  # alpha1
    linear_seconds_per_token: NonNegative  # alpha2
    ring_bytes_per_token: NonNegative  # alpha3: K/V forward, K/V and dK/dV backward, all layers
    microbatch_seconds: Overhead  # beta1
    ring_hop_seconds: Overhead = 0.0  # beta2, per hop
    vision_seconds_per_patch: NonNegative = 0.0
    vision_seconds_per_patch2: NonNegative = 0.0
    exposed_ring_share: Share = 0.0  # share of a ring's seconds that is never hidden
    chunk_seconds_per_token: NonNegative = 0.0  # extra attention seconds in a ring, per token and hop
    window_seconds_per_token2: NonNegative = 0.0  # like alpha1, for layers with sliding windows
    window_tokens: NonNegative = 0.0  # window length
    halo_bytes_per_token: NonNegative = 0.0  # like alpha3, for layers with a halo exchange instead of a ring
    halo_message_seconds: Overhead = 0.0  # per halo message, forward and backward, all such layers
    last_hop_bytes_per_token: NonNegative = 0.0  # part of alpha3: a last hop that no kernel hides
    last_hop_seconds: Overhead = 0.0  # per ring, on top of its hops: latency of such a last hop
    # The host's clock: seconds to issue the operations of a micro-batch, and the messages of its ring and halos.
    host_microbatch_seconds: Overhead = 0.0
    host_hop_seconds: Overhead = 0.0
    host_last_hop_seconds: Overhead = 0.0
    host_halo_message_seconds: Overhead = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Price of splitting a group's attention by heads (Ulysses): all-to-alls between sequence and head shards.

    Attributes:
        query_heads, key_value_heads: heads of a device, after tensor parallelism.
        exchange_bytes_per_token: bytes of queries and outputs forward and of their gradients, all heads and layers.
        key_value_exchange_bytes_per_token: bytes of keys and values and of their gradients.
        exchange_seconds: latency per other rank of the Ulysses group, all layers.
        bandwidth_share: bandwidth of exchanges relative to rings, including the copies before and after.
        host_exchange_seconds: host seconds per other rank of the Ulysses group, all layers.
    """

    query_heads: Count
    key_value_heads: Count
    exchange_bytes_per_token: NonNegative
    key_value_exchange_bytes_per_token: NonNegative
    exchange_seconds: Overhead = 0.0
    bandwidth_share: Positive = 1.0
    host_exchange_seconds: Overhead = 0.0

    def degrees(self, most: int) -> tuple[int, ...]:
        """Return the Ulysses degrees from 2 to `most` that split the query heads evenly along key/value heads.

        If there are more ranks than key/value heads, adjacent ranks hold copies of one.
        """
        return heads_degrees(self.query_heads, self.key_value_heads, most)


def heads_degrees(query_heads: int, key_value_heads: int, most: int) -> tuple[int, ...]:
    """Return the Ulysses degrees from 2 to `most` for these heads; see `Heads.degrees`."""
    q, kv = query_heads, key_value_heads
    return tuple(u for u in range(2, min(most, q) + 1) if q % u == 0 and (kv % u == 0 or u % kv == 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """Seconds of a step outside its micro-batches.

    Attributes:
        wave_floor_seconds: least seconds of a wave under `sync: microbatch`: ZeRO-3's all-gathers and reduce-scatters,
            hidden if computation takes longer.
        tail_seconds: gradient reduction after the last micro-batch; not added if waves have a floor, which includes it.
        update_seconds: optimizer and exposed data loading, per step.
        lockstep: whether the ranks of a wave synchronize layer by layer, so that all wait for the slowest vision
            encoder before the language model.
    """

    wave_floor_seconds: NonNegative = 0.0
    tail_seconds: NonNegative = 0.0
    update_seconds: NonNegative = 0.0
    lockstep: bool = False

    def floor_seconds(self, sync: Sync) -> float:
        """Return the least seconds of a wave, 0 unless waves are synchronized."""
        return self.wave_floor_seconds if sync == "microbatch" else 0.0

    def closing_seconds(self, sync: Sync) -> float:
        """Return the seconds after a step's last micro-batch, independent of the plan."""
        return self.update_seconds + (0.0 if self.floor_seconds(sync) else self.tail_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Point-to-point bandwidth of a ring in bytes per second."""

    intra_node: Positive
    inter_node: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory figures of a rank, which determine its token budget; 0 means unknown."""

    bytes_per_token: NonNegative = 0.0
    model_state_bytes: NonNegative = 0.0
    capacity_bytes: NonNegative = 0.0

    def tokens_per_rank(self) -> int | None:
        """Return the token budget of a rank per micro-batch, or None if the figures are unknown."""
        if not self.bytes_per_token or not self.capacity_bytes:
            return None
        return math.floor((self.capacity_bytes - self.model_state_bytes) / self.bytes_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonGround:
    """Coefficients and bandwidth of a fit without `exposed_ring_share`, under which strategies are compared."""

    coefficients: Coefficients
    bandwidth_bytes_per_second: Bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class CostProfile:
    """Cost profile of one model on one cluster.

    Attributes:
        common_ground: fit without `exposed_ring_share`; required if `coefficients` has one.
        step: seconds of a step outside its micro-batches.
        heads: Ulysses prices; None: groups are pure rings.
        recipe: recipe assumed by times and memory, or None if unknown.
        sync: sync assumed by the memory figures, which depend on gathered and kept tensors; None if unknown.
        recompute_levels: levels of as-needed recomputation by ascending tokens, or (); coefficients assume the first.
        phase: `forward` if the times are of forward passes only; None: training.
        attention_kernels: measured kernels of the device, or None.
        text: YAML source, stored in the plan's metadata.
    """

    model: str
    cluster: str
    origin: Origin
    coefficients: Coefficients
    bandwidth: Bandwidth
    common_ground: CommonGround | None = None
    memory: Memory = field(default_factory=Memory)
    step: StepTerms = field(default_factory=StepTerms)
    heads: Heads | None = None
    recipe: Recipe | None = None
    sync: Sync | None = None
    recompute_levels: tuple[RecomputeLevel, ...] = ()
    phase: Phase | None = None
    attention_kernels: KernelTable | None = None
    measurement: Mapping[str, Any] = field(default_factory=dict)
    text: str = field(default="", compare=False)

    @property
    def is_measured(self) -> bool:
        """Whether its times come from measurements instead of data sheets or assumptions."""
        return self.origin in ("measured", "fitted")

    @property
    def expert_parallel(self) -> int:
        """Expert-parallel size from the block `measurement`, 1 by default."""
        found = self.measurement.get("expert_parallel", 1)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def priced_levels(self) -> tuple[RecomputeLevel, ...]:
        """Recomputation levels that ranks choose per micro-batch; () for forward passes and pipelines."""
        is_staged = self.measurement.get("pipeline_parallel", 1) != 1
        return self.recompute_levels if self.phase is None and not is_staged else ()

    @property
    def prices_vision(self) -> bool:
        """Whether a vision encoder has a cost, per patch or per pair of patches."""
        return bool(self.coefficients.vision_seconds_per_patch or self.coefficients.vision_seconds_per_patch2)

    @property
    def attention_kernel(self) -> KernelName | None:
        """Attention kernel that the times were measured with, or None if unknown."""
        if self.attention_kernels is not None and self.attention_kernels.kernel is not None:
            return self.attention_kernels.kernel
        found = self.measurement.get("attention_kernel")
        return next((name for name in KERNELS if name == found), None)

    def kernel_ratio(self, runs: KernelName, assumed: KernelName) -> float | None:
        """Return the attention time of kernel `runs` relative to `assumed`, or None if unknown."""
        if self.attention_kernels is not None:
            return self.attention_kernels.ratio(runs, assumed)
        seconds = self.measurement.get("attention_seconds_by_kernel")
        if not isinstance(seconds, Mapping):
            return None
        first, second = (seconds.get(name) for name in (runs, assumed))
        if isinstance(first, float) and isinstance(second, float) and second > 0:
            return first / second
        return None

    def on_common_ground(self) -> CostProfile:
        """Return the profile without an exposed ring share, under which strategies are compared."""
        if self.common_ground is None:
            return self
        ground = self.common_ground
        bandwidth = ground.bandwidth_bytes_per_second
        profile = replace(self, coefficients=ground.coefficients, bandwidth=bandwidth, common_ground=None)
        return replace(profile, text=dump_cost_profile(profile))

    def with_coefficients(self, change: Callable[[Coefficients], Coefficients]) -> CostProfile:
        """Return the profile with `change` applied to its coefficients and to those of the common ground."""
        ground = self.common_ground
        ground = ground and replace(ground, coefficients=change(ground.coefficients))
        return replace(self, coefficients=change(self.coefficients), common_ground=ground)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File(CommonGround):
    """Schema of the YAML file."""

    format: str
    origin: Origin
    model: str = "unknown"
    cluster: str = "unknown"
    common_ground: CommonGround | None = None
    memory: Memory | None = None
    step: StepTerms | None = None
    heads: Heads | None = None
    recipe: Recipe | None = None
    sync: Sync | None = None
    recompute_levels: tuple[RecomputeLevel, ...] = ()
    phase: Phase | None = None
    attention_kernels: KernelTable | None = None
    measurement: Mapping[str, Any] | None = None


def load_cost_profile(path: Path) -> CostProfile:
    """Read a cost profile; raise ProfileError if it is missing or invalid."""
    if mistaken := another_kind(path, "cost profile"):
        raise ProfileError(mistaken)
    if not path.exists():
        mend = near_file(path) or f"; make one with 'fcp profile -o {as_word(path)}'"
        raise ProfileError(f"there is no cost profile {path}{mend}")
    return parse_cost_profile(read_text(path, error=ProfileError, label="the cost profile "), name=str(path))


def parse_cost_profile(text: str, *, name: str) -> CostProfile:
    """Parse the YAML of a cost profile; `name` identifies the file in messages.

    Raises:
        ProfileError: the document is invalid or inconsistent.
    """
    document = parse_yaml(text, name=name, error=ProfileError)
    _require_format(document, name)
    file = validated(document, _File, where=name, error=ProfileError, remedy="'fcp profile show' lists a whole profile")
    ground = file.common_ground
    if ground is None and file.coefficients.exposed_ring_share:
        raise ProfileError(
            f"{name}: the block common_ground is missing; beside coefficients.exposed_ring_share it holds the fit "
            "without one, which strategies are compared under"
        )
    if ground is not None and ground.coefficients.exposed_ring_share:
        share = ground.coefficients.exposed_ring_share
        raise ProfileError(
            f"{name}: common_ground.coefficients.exposed_ring_share is {share}; it must be absent, since the common "
            "ground is the fit without one"
        )
    for place, costs in (("", file), ("common_ground.", ground)):
        if costs is not None:
            _require_sense(costs.coefficients, f"{name}: {place}coefficients")
    check_levels(file.recompute_levels, f"{name}: recompute_levels")
    if (file.recipe is not None and file.recipe.recompute == "as-needed") != bool(file.recompute_levels):
        raise ProfileError(
            f"{name}: recompute_levels come with recipe.recompute: as-needed, and neither without the other; "
            "'fcp profile --analytic --recompute as-needed' computes both"
        )
    given = {name: value for name, value in fields_of(_File, file).items() if value is not None}
    bandwidth = given.pop("bandwidth_bytes_per_second")
    del given["format"]
    return CostProfile(**given, bandwidth=bandwidth, text=text)


def _require_sense(c: Coefficients, where: str) -> None:
    """Raise ProfileError if tokens take no time, or if last-hop or halo coefficients are inconsistent."""
    attention, linear = c.attention_seconds_per_token2, c.linear_seconds_per_token
    last, whole, halo, message = (
        *(c.last_hop_bytes_per_token, c.ring_bytes_per_token),
        *(c.halo_bytes_per_token, c.halo_message_seconds),
    )
    # Planning divides by the times of packs.
    if attention < _LEAST_PER_TOKEN2 and linear < _LEAST_PER_TOKEN:
        raise ProfileError(
            f"{where}.attention_seconds_per_token2 is {attention:g} and .linear_seconds_per_token {linear:g}: tokens "
            "take no time, so that no plan is quicker than another; 'fcp profile --analytic' computes them"
        )
    if last > whole:
        raise ProfileError(
            f"{where}.last_hop_bytes_per_token is {last:g}, more than .ring_bytes_per_token, {whole:g}, of which it is "
            "a part"
        )
    if halo and not c.window_tokens:
        raise ProfileError(
            f"{where}.halo_bytes_per_token is {halo:g}, and .window_tokens is missing: a halo is what lies within a "
            "window before each chunk"
        )
    if message and not halo:
        raise ProfileError(
            f"{where}.halo_message_seconds is {message:g}, and .halo_bytes_per_token is missing: without it rings "
            "carry layers with windows, and there are no such messages"
        )


def dump_cost_profile(profile: CostProfile) -> str:
    """Return a profile as YAML that `parse_cost_profile` reads."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "model": profile.model,
        "cluster": profile.cluster,
        "origin": profile.origin,
        **_costs(profile.coefficients, profile.bandwidth, with_share=profile.common_ground is not None),
    }
    if (ground := profile.common_ground) is not None:
        document["common_ground"] = _costs(ground.coefficients, ground.bandwidth_bytes_per_second, with_share=False)
    document["memory"] = fields_of(Memory, profile.memory)
    if profile.step != StepTerms():
        document["step"] = {name: value for name, value in asdict(profile.step).items() if value}
    if profile.heads is not None:
        document["heads"] = _without_zeros(asdict(profile.heads))
        if profile.heads.bandwidth_share == 1.0:
            del document["heads"]["bandwidth_share"]
    if profile.recipe is not None:
        document["recipe"] = {name: value for name, value in asdict(profile.recipe).items() if value is not None}
    if profile.sync is not None:
        document["sync"] = profile.sync
    if profile.recompute_levels:
        document["recompute_levels"] = [asdict(level) for level in profile.recompute_levels]
    if profile.phase is not None:
        document["phase"] = profile.phase
    if profile.attention_kernels is not None:
        document["attention_kernels"] = profile.attention_kernels.document()
    if profile.measurement:
        document["measurement"] = dict(profile.measurement)
    return yaml.dump(_inlined(document), Dumper=_Dumper, sort_keys=False, width=120)


def _costs(prices: Coefficients, bandwidth: Bandwidth, *, with_share: bool) -> dict[str, dict[str, float]]:
    coefficients = fields_of(Coefficients, prices)
    if not with_share:
        del coefficients["exposed_ring_share"]
    return {"coefficients": _without_zeros(coefficients), "bandwidth_bytes_per_second": fields_of(Bandwidth, bandwidth)}


def _without_zeros(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value or name not in ONLY_WHERE_GIVEN}


class _Inline(dict[str, Any]):
    """Mapping dumped on one line, for the many points of a measurement."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper in block style, with number lists and the mappings of a list on one line each."""


_Dumper.add_representer(
    _Inline, lambda dumper, value: dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=True)
)
_Dumper.add_representer(
    list,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=all(isinstance(item, (int, float)) for item in value)
    ),
)


def _inlined(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _inlined(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_Inline(item) if isinstance(item, Mapping) else item for item in value]
    return value


def _require_format(document: Any, name: str) -> None:
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found == FORMAT:
        return
    kind = FORMAT.partition("/")[0]
    if not str(found).startswith(f"{kind}/"):
        raise ProfileError(f"{name} is not a cost profile: expected 'format: {FORMAT}', found {found!r}")
    raise ProfileError(f"{name} is {found}; this fcp reads {FORMAT}; make it again with 'fcp profile'")
