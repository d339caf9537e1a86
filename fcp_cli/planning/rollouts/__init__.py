"""Rollouts of reinforcement learning: batches of arrived rollouts, and the call sites of trainers that split them."""

from fcp_cli.planning.rollouts.arrivals import Rollouts

__all__ = ["Rollouts"]
