"""Ring attention for Hugging Face transformers models under a plan."""

from fcp_cli.integrations.transformers.preparation import prepare, recompute_layers
from fcp_cli.integrations.transformers.probe import weights_to_come

__all__ = ["prepare", "recompute_layers", "weights_to_come"]
