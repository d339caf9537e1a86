"""Measurements by users on their devices: `profiles/measured`, which `fcp profile --share` writes files for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from fcp_cli.cost.attention_kernels import KernelTable
from fcp_cli.errors import ProfileError
from fcp_cli.files import shipped
from fcp_cli.reading.documents import parse_yaml, read_text
from fcp_cli.validation import Count, NonEmptyText, NonNegative, Positive, validated

FORMAT: Final = "fcp-measured/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFigures:
    """A message between neighbours: its fixed seconds, and the bytes per second of a long one."""

    seconds_per_message: NonNegative
    bytes_per_second: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class RingCoefficients:
    """A ring's coefficients, as fitted; those of a cost profile."""

    ring_hop_seconds: NonNegative
    exposed_ring_share: NonNegative
    chunk_seconds_per_token: NonNegative


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDevice:
    """A device's figures, without names or paths of the machine, the model or the user.

    Attributes:
        device, release: name of the device, version of PyTorch.
        ranks, ranks_per_node: that measured.
        links: by tier, `intra_node`, `inter_node` or `inter_node_cross_rail`.
    """

    format: str
    device: NonEmptyText
    release: NonEmptyText
    ranks: Count
    ranks_per_node: Count
    attention_kernels: KernelTable | None = None
    links: Mapping[str, LinkFigures] | None = None
    ring: RingCoefficients | None = None


def read_measured(path: Path) -> MeasuredDevice:
    """Read a file of `fcp profile --share`."""
    document = parse_yaml(read_text(path, error=ProfileError), name=str(path), error=ProfileError)
    measured = validated(document, MeasuredDevice, where=str(path), error=ProfileError)
    if measured.format != FORMAT:
        raise ProfileError(f"{path} is {measured.format!r}; this fcp reads {FORMAT}")
    return measured


@cache
def shipped_measured() -> tuple[MeasuredDevice, ...]:
    """Return the shipped measurements, by device and release."""
    found = [read_measured(path) for path in (shipped("profiles") / "measured").glob("*.yaml")]
    return tuple(sorted(found, key=lambda one: (one.device, one.release)))


def measured_table(device: str) -> KernelTable | None:
    """Return the newest shipped table of a device's kernels, or None."""
    tables = [one.attention_kernels for one in shipped_measured() if one.device == device]
    return next((table for table in reversed(tables) if table is not None), None)
