"""Cost profiles (contract `fcp-cost-profile/1`): the coefficients of the cost model, as YAML.

Two keys are optional and come together: the coefficient `exposed_ring_share`, and the block `common_ground` with the
fit of the same samples without it, for whatever compares strategies. Optional, too, are the coefficients of chunks, of
a ring's last hop, of layers with windows and of their halos, the block `step` with the seconds of a step outside its
micro-batches, the block `heads`, without which groups are rings, the block `recipe`, which times and memory are of,
`sync`, which its memory is of, `recompute_levels`, if ranks recompute as needed, `phase`, which its times are of where
it is not training, and `attention_kernels`, a measured table of the device's kernels. A reader refuses every key that
it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from msgspec import Meta

from fcp_cli.cost.attention_kernels import KernelTable
from fcp_cli.cost.kernel_names import KERNELS, KernelName
from fcp_cli.cost.recompute_levels import RecomputeLevel, check_levels
from fcp_cli.errors import ProfileError
from fcp_cli.kinds import another_kind
from fcp_cli.reading.documents import parse_yaml, read_text
from fcp_cli.recipe import Phase, Recipe
from fcp_cli.validation import Count, NonNegative, Positive, Share, fields_of, validated

FORMAT: Final = "fcp-cost-profile/1"
# The two models that a fit tries, as `measurement` names them.
HIDDEN_RING: Final = "hidden_ring"  # attention may hide the whole ring
EXPOSED_RING: Final = "exposed_ring_share"
Origin = Literal["measured", "fitted", "analytic", "assumed"]
Sync = Literal["iteration", "microbatch"]
# Next to fixed seconds, tokens must still show in a sum of doubles: a thousandth of the quickest models' and devices'.
_LEAST_PER_TOKEN: Final = 1e-12
_LEAST_PER_TOKEN2: Final = 1e-16
# Coefficients that are written only where they say something.
ONLY_WHERE_GIVEN: Final = (
    *("chunk_seconds_per_token", "last_hop_bytes_per_token", "last_hop_seconds"),
    *("window_seconds_per_token2", "window_tokens", "halo_bytes_per_token", "halo_message_seconds"),
)
Overhead = Annotated[float, Meta(ge=0, le=1e4, description="a non-negative number")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Symbols of the papers (Eq. 8-9): alpha1, alpha2, alpha3, beta1, beta2."""

    attention_seconds_per_token2: NonNegative  # alpha1
    linear_seconds_per_token: NonNegative  # alpha2
    ring_bytes_per_token: NonNegative  # alpha3: K/V forward, K/V and dK/dV backward, all layers
    microbatch_seconds: Overhead  # beta1
    ring_hop_seconds: Overhead = 0.0  # beta2, per hop
    vision_seconds_per_patch: NonNegative = 0.0
    vision_seconds_per_patch2: NonNegative = 0.0
    exposed_ring_share: Share = 0.0  # of a ring's seconds, hidden by nothing
    chunk_seconds_per_token: NonNegative = 0.0  # that attention takes longer in a ring, per token and hop
    window_seconds_per_token2: NonNegative = 0.0  # as alpha1, of layers in which tokens attend to a window
    window_tokens: NonNegative = 0.0  # of that window
    halo_bytes_per_token: NonNegative = 0.0  # as alpha3, of layers whose halos travel in place of a ring
    halo_message_seconds: Overhead = 0.0  # per message of a halo, forward and backward, all such layers
    last_hop_bytes_per_token: NonNegative = 0.0  # of alpha3: dK/dV on their way home, hidden by nothing
    last_hop_seconds: Overhead = 0.0  # per ring, in addition to its hops: messages that dK/dV need more than K/V


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Price of splitting a group's attention by heads (Ulysses): all-to-alls of tokens for heads, and back.

    Attributes:
        query_heads, key_value_heads: how many of each a device has; it holds more where tensor parallelism is less.
        exchange_bytes_per_token: the bytes of all heads' queries and outputs forward, their gradients backward, all
            layers.
        key_value_exchange_bytes_per_token: the bytes of keys and values, and their gradients.
        exchange_seconds: per other rank of the set, whatever the bytes: the messages of all layers.
        bandwidth_share: the share of a ring's bandwidth, at which exchanges travel, copies before and after them
            included.
    """

    query_heads: Count
    key_value_heads: Count
    exchange_bytes_per_token: NonNegative
    key_value_exchange_bytes_per_token: NonNegative
    exchange_seconds: Overhead = 0.0
    bandwidth_share: Positive = 1.0

    def degrees(self, most: int) -> tuple[int, ...]:
        """Return the heads degrees from 2 to `most`: each rank has as many query heads, of whole key/value heads.

        If there are more ranks than key/value heads, neighbours hold the same one.
        """
        return heads_degrees(self.query_heads, self.key_value_heads, most)


def heads_degrees(query_heads: int, key_value_heads: int, most: int) -> tuple[int, ...]:
    """Return how many ranks, from 2 to `most`, can share so many heads: see `Heads.degrees`."""
    q, kv = query_heads, key_value_heads
    return tuple(u for u in range(2, min(most, q) + 1) if q % u == 0 and (kv % u == 0 or u % kv == 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTerms:
    """Seconds of a step outside its micro-batches; 0 without it.

    Attributes:
        wave_floor_seconds: least seconds of a wave under `sync: microbatch`: those of ZeRO-3's gathers and scatters,
            hidden behind computation where that takes longer.
        tail_seconds: gradients summed over ranks once the last micro-batch has ended; waves with a floor sum them
            themselves.
        update_seconds: the seconds of every step: the optimizer, and loading that nothing hides.
        lockstep: the ranks of a wave meet layer by layer, so that all wait for the slowest vision encoder before the
            language model begins.
    """

    wave_floor_seconds: NonNegative = 0.0
    tail_seconds: NonNegative = 0.0
    update_seconds: NonNegative = 0.0
    lockstep: bool = False

    def floor_seconds(self, sync: Sync) -> float:
        """Return the least seconds of a wave."""
        return self.wave_floor_seconds if sync == "microbatch" else 0.0

    def closing_seconds(self, sync: Sync) -> float:
        """Return the seconds after a step's last micro-batch, which no plan changes."""
        return self.update_seconds + (0.0 if self.floor_seconds(sync) else self.tail_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Point-to-point bytes per second inside a ring."""

    intra_node: Positive
    inter_node: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Gives the token budget of a rank where all three are known; 0 means unknown."""

    bytes_per_token: NonNegative = 0.0
    model_state_bytes: NonNegative = 0.0
    capacity_bytes: NonNegative = 0.0

    def tokens_per_rank(self) -> int | None:
        """Return the most tokens a rank may hold in one micro-batch, or None if the figures are unknown."""
        if not self.bytes_per_token or not self.capacity_bytes:
            return None
        return math.floor((self.capacity_bytes - self.model_state_bytes) / self.bytes_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonGround:
    """The two blocks that price a pack: of a fit of the same samples in which attention may hide a whole ring."""

    coefficients: Coefficients
    bandwidth_bytes_per_second: Bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class CostProfile:
    """One model on one cluster.

    Attributes:
        common_ground: given exactly where `coefficients` may have an `exposed_ring_share`.
        step: seconds of a step outside its micro-batches.
        heads: prices groups that split heads; None: they are rings.
        recipe: the recipe that the times and the memory are of; None if nobody said.
        sync: the sync of the memory figures, which depend on gathered and kept tensors; None if unknown.
        recompute_levels: levels of recomputation as needed, by rising tokens; coefficients are of the first. None: ().
        phase: `forward` where the times are of forward passes alone; None: of training.
        attention_kernels: measured kernels of the device, or None.
        text: the YAML it was read from, kept whole for the plan's metadata.
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
    def expert_parallel(self) -> int:
        """Ranks that share out the experts of a layer, as the measurement block says; 1 if it says nothing."""
        found = self.measurement.get("expert_parallel", 1)
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def priced_levels(self) -> tuple[RecomputeLevel, ...]:
        """Levels of recomputation that ranks choose by each micro-batch: none in forward passes and pipelines."""
        is_staged = self.measurement.get("pipeline_parallel", 1) != 1
        return self.recompute_levels if self.phase is None and not is_staged else ()

    @property
    def prices_vision(self) -> bool:
        """Whether the profile has a cost for the work of a vision encoder (above 0 per patch or per patch squared)."""
        return bool(self.coefficients.vision_seconds_per_patch or self.coefficients.vision_seconds_per_patch2)

    @property
    def attention_kernel(self) -> KernelName | None:
        """Attention kernel that the times are of, or None if unknown."""
        if self.attention_kernels is not None and self.attention_kernels.kernel is not None:
            return self.attention_kernels.kernel
        found = self.measurement.get("attention_kernel")
        return next((name for name in KERNELS if name == found), None)

    def kernel_ratio(self, runs: KernelName, assumed: KernelName) -> float | None:
        """Return how many times as long attention takes on `runs` as on `assumed`, or None if unknown."""
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
        """Return the profile that strategies are compared under: without an exposed share of the ring."""
        if self.common_ground is None:
            return self
        ground = self.common_ground
        bandwidth = ground.bandwidth_bytes_per_second
        profile = replace(self, coefficients=ground.coefficients, bandwidth=bandwidth, common_ground=None)
        return replace(profile, text=dump_cost_profile(profile))

    def with_coefficients(self, change: Callable[[Coefficients], Coefficients]) -> CostProfile:
        """Return the profile with changed coefficients, those of the common ground included."""
        ground = self.common_ground
        ground = ground and replace(ground, coefficients=change(ground.coefficients))
        return replace(self, coefficients=change(self.coefficients), common_ground=ground)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File(CommonGround):
    """The whole file."""

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
    """Read a cost profile."""
    if mistaken := another_kind(path, "cost profile"):
        raise ProfileError(mistaken)
    if not path.exists():
        raise ProfileError(f"there is no cost profile {path}; make one with 'fcp profile -o {path}'")
    return parse_cost_profile(read_text(path, error=ProfileError, label="the cost profile "), name=str(path))


def parse_cost_profile(text: str, *, name: str) -> CostProfile:
    """Parse the YAML of a cost profile; `name` stands for the file in error messages."""
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
    """Check that tokens take time, that a last hop is part of a ring, and halos are of something."""
    attention, linear = c.attention_seconds_per_token2, c.linear_seconds_per_token
    last, whole, halo, message = (
        *(c.last_hop_bytes_per_token, c.ring_bytes_per_token),
        *(c.halo_bytes_per_token, c.halo_message_seconds),
    )
    # Planning compares, and divides by, times of packs.
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
    """Write a profile as the YAML that `parse_cost_profile` reads."""
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
        document["heads"] = asdict(profile.heads)
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
    for name in ONLY_WHERE_GIVEN:
        if not coefficients[name]:
            del coefficients[name]
    return {"coefficients": coefficients, "bandwidth_bytes_per_second": fields_of(Bandwidth, bandwidth)}


class _Inline(dict[str, Any]):
    """A mapping written on one line: the points of a measurement, which would fill pages otherwise."""


class _Dumper(yaml.SafeDumper):
    """Writes block style, but lists of plain values and the mappings of a list on one line each."""


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
