"""MindSpore under a plan: native ring attention whose group changes with every micro-batch.

It needs no torch, and uses MindSpore's own operations, so it should run on all its devices; the point-to-point hops
have been tested on CPU ranks only.
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
