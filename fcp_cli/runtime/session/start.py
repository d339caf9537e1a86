"""Run a training loop under a plan, which decides a rank's micro-batches, their rings and when gradients are reduced.

session = fcp_cli.runtime.start("plan.parquet", fetch)
for step in session.steps(model):
    for microbatch in step:
        logits = model(microbatch.input_ids, microbatch.position_ids)
        microbatch.loss(logits).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fcp_cli.plan.metadata.online import OnlineSettings
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runtime.agreement.grad_ring import GradRingDtype
from fcp_cli.runtime.agreement.plan_agreement import agree_on_plan
from fcp_cli.runtime.communication.world import ProcessWorld, join_process_group, local_device
from fcp_cli.runtime.data.followed_step import plan_path
from fcp_cli.runtime.data.loader import Fetch
from fcp_cli.runtime.metrics.run_record import METRICS_VARIABLE
from fcp_cli.runtime.online.control import ProcessControl
from fcp_cli.runtime.online.cursor import PlansStreams, online_settings, stream_plan_path
from fcp_cli.runtime.online.source import StreamSource
from fcp_cli.runtime.session.session import Session
from fcp_cli.runtime.session.step import Step


def start(
    plan: str | Path | None = None,
    fetch: Fetch | None = None,
    *,
    stream: Iterable[Any] | StreamSource | None = None,
    planner: PlansStreams | OnlineSettings | None = None,
    device: torch.device | None = None,
    grad_ring_dtype: GradRingDtype | None = None,
    skip_bad_rows: bool = False,
    metrics: str | Path | None = None,
) -> Session:
    """Join the job and validate that all ranks follow the same plan. Every rank calls it once.

    Args:
        plan: plan file; defaults to FCP_PLAN, which `fcp launch` sets. With `stream`, the file to write.
        fetch: function from a manifest row, or an id or row of `stream`, to tokens or (tokens, labels); see
            `loader.Fetch`.
        stream: sequences to plan while the job trains, as (id, length) or as rows. Integrations pass a `StreamSource`
            that is already being planned.
        planner: planner of a stream: a `fcp_cli.Planner` or its `online()`; defaults to that of `fcp launch --online`.
        device: device of the tensors; defaults to the local rank's accelerator, else the CPU.
        grad_ring_dtype: data type in which gradients of keys and values are sent; defaults to FCP_GRAD_RING_DTYPE, else
            fp32. See `GradRingDtype`.
        skip_bad_rows: skip rows whose images fail to decode instead of raising; equal on all ranks.
        metrics: metrics file of all ranks; defaults to FCP_METRICS, which `fcp launch` sets, else no metrics.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
        RunError: ranks have different plans, or the plan is for a different number of ranks; raised on all ranks.
    """
    source = stream if isinstance(stream, StreamSource) else None
    online = None if stream is None else source.settings if source is not None else online_settings(planner)
    path = plan_path(plan) if online is None else stream_plan_path(source.path if source is not None else plan)
    device = device or local_device()
    owns_process_group = join_process_group(device)
    world = ProcessWorld()
    metadata = agree_on_plan(world, path, device) if online is None else online.metadata
    _agree_on_kernels(world, device, metadata)
    if online is not None and stream is not None and not isinstance(stream, StreamSource):
        source = StreamSource(stream, online, path, ProcessControl(), fetch)
        metrics = metrics or _measured_stream(online, path)
    session = Session.join(
        path,
        metadata,
        device,
        grad_ring_dtype=grad_ring_dtype,
        metrics=metrics,
        fetch=fetch,
        owns_process_group=owns_process_group,
        source=source,
        skip_bad_rows=skip_bad_rows,
    )
    # The rings of a stream are not known yet: `Session` opens connections before each step.
    if source is None:
        session.connect()
    if session.watch is not None:
        session.watch.start()
    return session


def _measured_stream(online: OnlineSettings, plan: Path) -> str | Path | None:
    """Return the metrics file that a stream with refits needs; None without refits."""
    if online.options.refit_every is None:
        return None
    return os.environ.get(METRICS_VARIABLE) or plan.with_name(f"{plan.stem}.metrics.jsonl")


def _agree_on_kernels(world: ProcessWorld, device: torch.device, metadata: PlanMetadata) -> None:
    """Choose the attention kernels of CUDA devices. Other devices have a single kernel."""
    if device.type == "cuda":
        from fcp_cli.runtime.agreement.kernel_agreement import prefer_agreed_kernels

        prefer_agreed_kernels(world, device, metadata)


def steps(
    plan: str | Path | None = None,
    fetch: Fetch | None = None,
    model: nn.Module | None = None,
    first_step: int = 0,
    *,
    stream: Iterable[Any] | None = None,
    planner: PlansStreams | OnlineSettings | None = None,
) -> Generator[Step, None, None]:
    """Return `start(plan, fetch).steps(model, first_step=first_step)`, for loops without further settings."""
    return start(plan, fetch, stream=stream, planner=planner).steps(model, first_step=first_step)
