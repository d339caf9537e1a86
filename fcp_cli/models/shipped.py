"""Example cost profiles shipped with fcp, for each model that fits the example cluster.

Each is made with: fcp profile --analytic --model MODEL --cluster example-8x8 -o profiles/cost/MODEL-example-8x8.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.files import shipped
from fcp_cli.models.cluster import EXAMPLE_CLUSTER as EXAMPLE_CLUSTER
from fcp_cli.models.model import load_model

DEFAULT_MODEL: Final = "qwen3-vl-8b"
"""Default model of plans and profiles for accelerators."""


def shipped_profile_path(model: str) -> Path:
    """Return the path of a shipped model's profile on the example cluster."""
    return shipped("profiles") / "cost" / f"{load_model(model).name}-{EXAMPLE_CLUSTER}.yaml"


def shipped_profile(model: str) -> CostProfile:
    """Load a shipped model's analytic profile on the example cluster."""
    return load_cost_profile(shipped_profile_path(model))
