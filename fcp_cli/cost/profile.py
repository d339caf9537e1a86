"""Cost profiles (contracts `fcp-cost-profile/1` and `/2`): the coefficients of the cost model, as YAML.

Version 2 has one coefficient more, `exposed_ring_share`, and a block `common_ground`: what version 1 says of the same
samples, for whatever compares under version 1. A profile that needs no version 2 is written as version 1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fcp_cli.errors import ProfileError
from fcp_cli.kinds import another_kind
from fcp_cli.words import first_sentence

FORMAT_1 = "fcp-cost-profile/1"
FORMAT_2 = "fcp-cost-profile/2"
ORIGINS = ("measured", "fitted", "analytic", "assumed")
_ONLY_VERSION_2 = {"exposed_ring_share"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Symbols of the papers (Eq. 8-9): alpha1, alpha2, alpha3, beta1, beta2."""

    attention_seconds_per_token2: float  # alpha1
    linear_seconds_per_token: float  # alpha2
    ring_bytes_per_token: float  # alpha3: K/V forward, K/V and dK/dV backward, all layers
    microbatch_seconds: float  # beta1
    ring_hop_seconds: float = 0.0  # beta2, per hop
    vision_seconds_per_patch: float = 0.0
    vision_seconds_per_patch2: float = 0.0
    exposed_ring_share: float = 0.0  # version 2: of a ring's seconds, hidden by nothing; at most 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Point-to-point bytes per second inside a ring."""

    intra_node: float
    inter_node: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Gives the token budget of a rank where all three are known; 0 means unknown."""

    bytes_per_token: float = 0.0
    model_state_bytes: float = 0.0
    capacity_bytes: float = 0.0

    def tokens_per_rank(self) -> int | None:
        """Most tokens a rank may hold in one micro-batch, or None where the figures are unknown."""
        if not self.bytes_per_token or not self.capacity_bytes:
            return None
        return math.floor((self.capacity_bytes - self.model_state_bytes) / self.bytes_per_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonGround:
    """What version 1 of the model says where a profile is of version 2: fitted to the same samples."""

    coefficients: Coefficients
    bandwidth: Bandwidth


@dataclass(frozen=True, kw_only=True, slots=True)
class CostProfile:
    """One model on one cluster.

    Attributes:
        common_ground: given exactly where a coefficient of version 2 is used.
        text: the YAML it was read from, kept whole for the plan's metadata.
    """

    model: str
    cluster: str
    origin: str
    coefficients: Coefficients
    bandwidth: Bandwidth
    common_ground: CommonGround | None = None
    memory: Memory = field(default_factory=Memory)
    measurement: Mapping[str, Any] = field(default_factory=dict)
    text: str = field(default="", compare=False)

    @property
    def format(self) -> str:
        """The contract that the profile's file follows."""
        return FORMAT_1 if self.common_ground is None else FORMAT_2

    def under_version_1(self) -> CostProfile:
        """This profile, or its common ground: what strategies are compared under."""
        if self.common_ground is None:
            return self
        ground = self.common_ground
        profile = replace(self, coefficients=ground.coefficients, bandwidth=ground.bandwidth, common_ground=None)
        return replace(profile, text=dump_cost_profile(profile))


def load_cost_profile(path: Path) -> CostProfile:
    """Read a cost profile.

    Raises:
        ProfileError: the file cannot be read or breaks the contract; the message names the offending key by its path.
    """
    if mistaken := another_kind(path, "cost profile"):
        raise ProfileError(mistaken)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ProfileError(f"there is no cost profile {path}; make one with 'fcp profile -o {path}'") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the cost profile {path}: {first_sentence(error)}") from error
    return parse_cost_profile(text, name=str(path))


def parse_cost_profile(text: str, *, name: str) -> CostProfile:
    """Parse the YAML of a cost profile; `name` stands for the file in error messages."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ProfileError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from error
    is_version_2 = _is_version_2(document, name)
    known = {
        "format",
        "model",
        "cluster",
        "origin",
        "coefficients",
        "bandwidth_bytes_per_second",
        "memory",
        "measurement",
    }
    if is_version_2:
        known.add("common_ground")
    elif "common_ground" in document:
        raise ProfileError(f"{name}: the block common_ground belongs to version 2 (format: {FORMAT_2})")
    _reject_unknown(document, known, where=name, prefix="")
    if document.get("origin") not in ORIGINS:
        raise ProfileError(f"{name}: origin is {document.get('origin')!r}; it must be one of {', '.join(ORIGINS)}")
    return CostProfile(
        model=str(document.get("model", "unknown")),
        cluster=str(document.get("cluster", "unknown")),
        origin=document["origin"],
        **_read_costs(document, name, version_2=is_version_2),
        common_ground=_read_common_ground(document, name) if is_version_2 else None,
        memory=_read_numbers(Memory, document, "memory", name) if document.get("memory") else Memory(),
        measurement=document.get("measurement") or {},
        text=text,
    )


def dump_cost_profile(profile: CostProfile) -> str:
    """The YAML of a profile, as `parse_cost_profile` reads it."""
    document: dict[str, Any] = {
        "format": profile.format,
        "model": profile.model,
        "cluster": profile.cluster,
        "origin": profile.origin,
        **_costs(profile, version_2=profile.common_ground is not None),
    }
    if profile.common_ground is not None:
        document["common_ground"] = _costs(profile.common_ground, version_2=False)
    document["memory"] = _numbers(profile.memory)
    if profile.measurement:
        document["measurement"] = dict(profile.measurement)
    return yaml.dump(_inlined(document), Dumper=_Dumper, sort_keys=False, width=120)


def _costs(holder: CostProfile | CommonGround, *, version_2: bool) -> dict[str, dict[str, float]]:
    coefficients = _numbers(holder.coefficients)
    if not version_2:
        for name in _ONLY_VERSION_2:
            del coefficients[name]
    return {"coefficients": coefficients, "bandwidth_bytes_per_second": _numbers(holder.bandwidth)}


def _numbers(block: Coefficients | Bandwidth | Memory) -> dict[str, float]:
    return {f.name: getattr(block, f.name) for f in fields(block)}


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


def _is_version_2(document: Any, name: str) -> bool:
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found in (FORMAT_1, FORMAT_2):
        return bool(found == FORMAT_2)
    if str(found).startswith(FORMAT_1.partition("/")[0] + "/"):
        raise ProfileError(f"{name} is {found}; this fcp reads {FORMAT_1} and {FORMAT_2}")
    raise ProfileError(f"{name} is not a cost profile: expected 'format: {FORMAT_1}' or {FORMAT_2}, found {found!r}")


def _read_costs(document: Mapping[str, Any], name: str, *, version_2: bool, prefix: str = "") -> dict[str, Any]:
    """The two blocks that price a pack, as keyword arguments."""
    given = document.get("coefficients")
    misplaced = sorted(_ONLY_VERSION_2 & given.keys()) if isinstance(given, dict) and not version_2 else []
    if misplaced:
        raise ProfileError(f"{name}: {prefix}coefficients.{misplaced[0]} belongs to version 2 (format: {FORMAT_2})")
    coefficients = _read_numbers(Coefficients, document, "coefficients", name, prefix=prefix)
    if coefficients.exposed_ring_share > 1:
        share = coefficients.exposed_ring_share
        raise ProfileError(f"{name}: coefficients.exposed_ring_share is {share}; it must be a share from 0 to 1")
    bandwidth = "bandwidth_bytes_per_second"
    return {
        "coefficients": coefficients,
        "bandwidth": _read_numbers(Bandwidth, document, bandwidth, name, positive=True, prefix=prefix),
    }


def _read_common_ground(document: Mapping[str, Any], name: str) -> CommonGround:
    block = document.get("common_ground")
    if not isinstance(block, dict):
        raise ProfileError(f"{name}: the block common_ground is missing; {FORMAT_2} holds version 1's figures there")
    _reject_unknown(block, {"coefficients", "bandwidth_bytes_per_second"}, where=name, prefix="common_ground.")
    return CommonGround(**_read_costs(block, name, version_2=False, prefix="common_ground."))


def _reject_unknown(mapping: Mapping[str, Any], known: set[str], *, where: str, prefix: str) -> None:
    for key in mapping:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ProfileError(f"{where}: unknown key {prefix}{key}{hint}")


def _read_numbers(
    kind: Any, document: Mapping[str, Any], block: str, name: str, *, positive: bool = False, prefix: str = ""
) -> Any:
    """Read a block of non-negative numbers into the dataclass `kind`."""
    values = document.get(block)
    if not isinstance(values, dict):
        raise ProfileError(f"{name}: the block {prefix}{block} is missing; 'fcp profile show' lists a whole profile")
    _reject_unknown(values, {f.name for f in fields(kind)}, where=name, prefix=f"{prefix}{block}.")
    numbers: dict[str, float] = {}
    for f in fields(kind):
        if f.name not in values:
            if f.default is not None and isinstance(f.default, float):
                continue
            raise ProfileError(f"{name}: {prefix}{block}.{f.name} is missing")
        numbers[f.name] = _number(values[f.name], where=f"{name}: {prefix}{block}.{f.name}", positive=positive)
    return kind(**numbers)


def _number(value: Any, *, where: str, positive: bool) -> float:
    # YAML 1.1 reads 6.451e-9 as a number but 50e9 (no sign, no dot) as a string: accept both.
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ProfileError(f"{where} is {value!r}; it must be a {'positive' if positive else 'non-negative'} number")
    return number
