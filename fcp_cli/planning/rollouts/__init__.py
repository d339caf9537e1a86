"""Reinforcement learning: batches of rollouts as they arrive, and replacements for the balancing of verl and slime."""

from fcp_cli.planning.rollouts.arrivals import Rollouts

__all__ = ["Rollouts"]
