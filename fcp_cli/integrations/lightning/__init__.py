"""Makes Lightning's Trainer follow a plan: unmodified scripts via hooks, manual optimization via a loader."""

from fcp_cli.integrations.lightning.hooks import PlannedSteps

__all__ = ["PlannedSteps"]
