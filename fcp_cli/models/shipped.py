"""The cost profiles that travel with fcp, as examples: those of every model that fits the example cluster.

Each is made by: fcp profile --analytic --model MODEL --cluster example-8x8 -o profiles/cost/MODEL-example-8x8.yaml
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.files import shipped
from fcp_cli.models.cluster import EXAMPLE_CLUSTER as EXAMPLE_CLUSTER
from fcp_cli.models.model import load_model

DEFAULT_MODEL: Final = "qwen3-vl-8b"
"""The model of a plan or a profile for accelerators where nothing says which."""


def shipped_profile_path(model: str) -> Path:
    """Return the path of the profile of a shipped model on the example cluster."""
    return shipped("profiles") / "cost" / f"{load_model(model).name}-{EXAMPLE_CLUSTER}.yaml"


def shipped_profile(model: str) -> CostProfile:
    """Load the analytic profile of a shipped model on the example cluster."""
    return load_cost_profile(shipped_profile_path(model))
