"""What runs inside the training job: follow a plan, switch rings per micro-batch, sum gradients over all ranks."""

from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.ring import Ring, attention, current_ring
from fcp_cli.runtime.session import LocalMicroBatch, Session, Step, start, steps
from fcp_cli.runtime.timing import MicroBatchTiming

__all__ = [
    "Fetch",
    "LocalMicroBatch",
    "MicroBatchTiming",
    "Ring",
    "Session",
    "Step",
    "attention",
    "current_ring",
    "start",
    "steps",
]
