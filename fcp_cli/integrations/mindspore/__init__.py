"""Runs MindSpore scripts under a plan: native ring attention whose group changes with every micro-batch.

It needs no torch. The numbers are MindSpore's own operations, so it runs on every device that MindSpore has; the
point-to-point hops were run on CPU ranks only.
"""

from fcp_cli.integrations.mindspore.ring import MindSporeRing, attention
from fcp_cli.integrations.mindspore.session import MindSporeMicroBatch, MindSporeSession, MindSporeStep, start

__all__ = [
    "MindSporeMicroBatch",
    "MindSporeRing",
    "MindSporeSession",
    "MindSporeStep",
    "attention",
    "start",
]
