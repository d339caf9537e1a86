"""The part that runs inside the training job: follow a plan, switch rings per micro-batch, sum gradients.

The names are imported on first use: `python -m fcp_cli.runtime` prepares a script's environment before torch is read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.runtime.frames import with_frames_before
    from fcp_cli.runtime.gradients import GradientSync
    from fcp_cli.runtime.integrations.hugging_face.mixin import FollowsPlan
    from fcp_cli.runtime.integrations.hugging_face.sampler import PlanSampler
    from fcp_cli.runtime.loader import Fetch
    from fcp_cli.runtime.offload import ActivationOffload
    from fcp_cli.runtime.outside import outside
    from fcp_cli.runtime.recompute import keep_attention, recomputed
    from fcp_cli.runtime.ring import Ring, attention, current_ring
    from fcp_cli.runtime.session import LocalMicroBatch, Session, Step, start, steps
    from fcp_cli.runtime.timing import MicroBatchTiming

__all__ = [
    "ActivationOffload",
    "Fetch",
    "FollowsPlan",
    "GradientSync",
    "LocalMicroBatch",
    "MicroBatchTiming",
    "PlanSampler",
    "Ring",
    "Session",
    "Step",
    "attention",
    "current_ring",
    "keep_attention",
    "outside",
    "recomputed",
    "start",
    "steps",
    "with_frames_before",
]

_MODULES = {
    "ActivationOffload": "offload",
    "Fetch": "loader",
    "FollowsPlan": "integrations.hugging_face.mixin",
    "GradientSync": "gradients",
    "LocalMicroBatch": "session",
    "MicroBatchTiming": "timing",
    "PlanSampler": "integrations.hugging_face.sampler",
    "Ring": "ring",
    "Session": "session",
    "Step": "session",
    "attention": "ring",
    "current_ring": "ring",
    "keep_attention": "recompute",
    "outside": "outside",
    "recomputed": "recompute",
    "start": "session",
    "steps": "session",
    "with_frames_before": "frames",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
