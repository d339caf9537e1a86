"""Makes Lightning's Trainer follow a plan: unmodified scripts via hooks, manual optimization via a loader."""

from fcp_cli.integrations.lightning.loader import PlannedSteps

__all__ = ["PlannedSteps"]
