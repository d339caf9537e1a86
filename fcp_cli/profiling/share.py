"""The shared part of a measured profile: its device's figures, without names or paths of machine, model or user."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import yaml

from fcp_cli.cost.measured import FORMAT
from fcp_cli.cost.profile import CostProfile
from fcp_cli.errors import UsageError

_TIERS = ("intra_node", "inter_node", "inter_node_cross_rail")


def shared_text(profile: CostProfile) -> str:
    """Return the YAML that `profiles/measured` takes."""
    found = profile.measurement
    if profile.origin != "measured" or "device_name" not in found:
        raise UsageError("--share writes what was measured, and these samples name no device")
    document: dict[str, Any] = {
        "format": FORMAT,
        "device": _plain(found["device_name"]),
        "release": _plain(found.get("torch", "unknown")),
        "ranks": int(found.get("ranks", 1)),
        "ranks_per_node": int(found.get("ranks_per_node", 1)),
    }
    if profile.attention_kernels is not None:
        document["attention_kernels"] = profile.attention_kernels.document()
    transfers = found.get("transfers") or {}
    links = {tier: dict(transfers[tier]) for tier in _TIERS if tier in transfers}
    if links:
        document["links"] = links
        c = asdict(profile.coefficients)
        names = ("ring_hop_seconds", "exposed_ring_share", "chunk_seconds_per_token")
        document["ring"] = {name: c[name] for name in names}
    return yaml.safe_dump(document, sort_keys=False, width=120)


def file_name(profile: CostProfile) -> str:
    """Return the name for a file in `profiles/measured`."""
    return re.sub(r"[^a-z0-9]+", "-", str(profile.measurement["device_name"]).lower()).strip("-") + ".yaml"


def _plain(text: Any) -> str:
    return re.sub(r"\s+", " ", str(text)).strip()
