"""Runtime inside the training job: follow a plan, switch rings per micro-batch, reduce gradients.

Names are imported on first use, since `python -m fcp_cli.runtime` must prepare a script's environment before torch is
imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcp_cli.integrations.hugging_face.data.sampler import PlanSampler
    from fcp_cli.integrations.hugging_face.mixin import FollowsPlan
    from fcp_cli.runtime.data.loader import Fetch
    from fcp_cli.runtime.data.mixed_fetch import mixed_fetch
    from fcp_cli.runtime.gradients import GradientSync
    from fcp_cli.runtime.metrics.timing import MicroBatchTiming
    from fcp_cli.runtime.recomputation.offload import ActivationOffload
    from fcp_cli.runtime.recomputation.recompute import keep_attention, keep_products, recomputed
    from fcp_cli.runtime.ring_attention.attention import attention
    from fcp_cli.runtime.ring_attention.ring import Ring, current_ring
    from fcp_cli.runtime.session.microbatch import LocalMicroBatch
    from fcp_cli.runtime.session.outside import outside
    from fcp_cli.runtime.session.session import Session
    from fcp_cli.runtime.session.start import start, steps
    from fcp_cli.runtime.session.step import Step

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
]

_MODULES = {
    "ActivationOffload": ".recomputation.offload",
    "Fetch": ".data.loader",
    "FollowsPlan": "fcp_cli.integrations.hugging_face.mixin",
    "GradientSync": ".gradients",
    "LocalMicroBatch": ".session.microbatch",
    "MicroBatchTiming": ".metrics.timing",
    "PlanSampler": "fcp_cli.integrations.hugging_face.data.sampler",
    "Ring": ".ring_attention.ring",
    "Session": ".session.session",
    "Step": ".session.step",
    "attention": ".ring_attention.attention",
    "current_ring": ".ring_attention.ring",
    "keep_attention": ".recomputation.recompute",
    "keep_products": ".recomputation.recompute",
    "mixed_fetch": ".data.mixed_fetch",
    "outside": ".session.outside",
    "recomputed": ".recomputation.recompute",
    "start": ".session.start",
    "steps": ".session.start",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
