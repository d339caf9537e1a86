"""Make Lightning's Trainer follow a plan: unmodified scripts by hooks, modules that optimise by themselves by a loader."""

from fcp_cli.runtime.integrations.lightning.loader import PlannedSteps

__all__ = ["PlannedSteps"]
