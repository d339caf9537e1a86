"""Runtime inside the training job: follow a plan, switch rings per micro-batch, reduce gradients.

Names are imported on first use, since `python -m fcp_cli.runtime` must prepare a script's environment before torch is
imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.integrations.hugging_face.data import PlanSampler
    from fcp_cli.integrations.hugging_face.trainer import FollowsPlan
    from fcp_cli.runtime.cursor import mixed_fetch
    from fcp_cli.runtime.gradients import GradientSync
    from fcp_cli.runtime.loader import Fetch
    from fcp_cli.runtime.metrics import MicroBatchTiming
    from fcp_cli.runtime.recompute import ActivationOffload, keep_attention, keep_products, recomputed
    from fcp_cli.runtime.ring import Ring, current_ring
    from fcp_cli.runtime.ring_attention import attention
    from fcp_cli.runtime.session import Session, outside, start, steps
    from fcp_cli.runtime.step import LocalMicroBatch, Step
    from fcp_cli.runtime.stop_request import stopping

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
    "keep_products",
    "mixed_fetch",
    "outside",
    "recomputed",
    "start",
    "steps",
    "stopping",
]

_MODULES = {
    "ActivationOffload": ".recompute",
    "Fetch": ".loader",
    "FollowsPlan": "fcp_cli.integrations.hugging_face.trainer",
    "GradientSync": ".gradients",
    "LocalMicroBatch": ".step",
    "MicroBatchTiming": ".metrics",
    "PlanSampler": "fcp_cli.integrations.hugging_face.data",
    "Ring": ".ring",
    "Session": ".session",
    "Step": ".step",
    "attention": ".ring_attention",
    "current_ring": ".ring",
    "keep_attention": ".recompute",
    "keep_products": ".recompute",
    "mixed_fetch": ".cursor",
    "outside": ".session",
    "recomputed": ".recompute",
    "start": ".session",
    "steps": ".session",
    "stopping": ".stop_request",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
