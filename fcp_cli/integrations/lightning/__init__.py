"""Make Lightning's Trainer follow a plan: an unmodified script by hooks, a module that optimises itself by a loader."""

from fcp_cli.integrations.lightning.loader import PlannedSteps

__all__ = ["PlannedSteps"]
