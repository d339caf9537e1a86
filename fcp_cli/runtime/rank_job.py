"""One rank of a job that follows a plan: its transport, clock, guards and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runtime.choices import GradRingDtype
from fcp_cli.runtime.connections import Connections, planned_hops, report_to_stderr
from fcp_cli.runtime.guards import Watch, watch_for
from fcp_cli.runtime.metrics import Clock, Recorder, clock_for, recorder_of
from fcp_cli.runtime.plan_agreement import agree_on_plan
from fcp_cli.runtime.rank_agreement import agreed_grad_dtype
from fcp_cli.runtime.transport import BufferPool, ProcessTransport, ProcessWorld, Transport, World

AnyJob = TypeVar("AnyJob", bound="RankJob")


@dataclass(kw_only=True, eq=False)
class RankJob:
    """State of one rank that outlives a step. Create it with `join`.

    Attributes:
        plan, metadata: the plan file and its metadata.
        world: all processes of the job.
        peers: process of each rank of the plan within this process's tensor- and pipeline-parallel position; None if
            ranks and processes have the same numbers.
        transport: point-to-point messages between the members of a ring.
        device: device of the micro-batches.
        grad_ring_dtype: data type in which gradients of keys and values are sent.
        watch: stall reporter, or None if disabled.
        recorder: metrics recorder, or None if disabled.
        next_step: index of the next optimizer step to train.
        clock: clock of the device.
        connections: open peer connections.
        buffers: memory of ring messages.
    """

    plan: Path
    metadata: PlanMetadata
    world: World
    transport: Transport
    peers: tuple[int, ...] | None = None
    device: torch.device
    grad_ring_dtype: GradRingDtype = "fp32"
    watch: Watch | None = None
    recorder: Recorder | None = None
    next_step: int = field(default=0, init=False)
    clock: Clock = field(init=False)
    connections: Connections = field(init=False)
    buffers: BufferPool = field(default_factory=BufferPool, init=False)

    def __post_init__(self) -> None:
        self.clock = clock_for(self.device)
        self.connections = Connections(self.transport, rank=self.rank, device=self.device, peers=self.peers)

    @staticmethod
    def agree(
        plan: Path, device: torch.device, *, tensor_parallel: int = 1, pipeline_parallel: int = 1
    ) -> PlanMetadata:
        """Validate that all processes have the same plan, and return its metadata. Collective; comes before `join`."""
        world = ProcessWorld()
        return agree_on_plan(world, plan, device, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)

    @classmethod
    def join(
        cls: type[AnyJob],
        plan: Path,
        metadata: PlanMetadata,
        device: torch.device,
        *,
        peers: tuple[int, ...] | None = None,
        grad_ring_dtype: GradRingDtype | None = None,
        metrics: str | Path | None = None,
        records: bool = True,
        **more: Any,
    ) -> AnyJob:
        """Join the transport of all ranks and agree on settings. Every process calls it once.

        Args:
            plan, metadata: the plan that all processes agreed on.
            device: device of the micro-batches.
            peers: see the attribute.
            grad_ring_dtype: as in `start`.
            metrics: metrics file, or None for FCP_METRICS.
            records: whether this process records its steps, if there is a metrics file.
            more: fields of the subclass.
        """
        world = ProcessWorld()
        rank = world.rank if peers is None else peers.index(world.rank)
        # The arguments run collectives, so their order must be the same on all processes.
        return cls(
            plan=plan,
            metadata=metadata,
            world=world,
            transport=ProcessTransport.create(device),
            peers=peers,
            device=device,
            grad_ring_dtype=agreed_grad_dtype(world, device, grad_ring_dtype),
            watch=watch_for(rank, clock_for(device), device),
            recorder=recorder_of(metrics, plan=plan, metadata=metadata, rank=rank, device=device) if records else None,
            **more,
        )

    def connect(self) -> None:
        """Open the connections between all ring neighbours of the plan, and those of halos. Every process calls it."""
        hops = planned_hops(self.plan, halo_pattern=self.connections.halo_pattern)
        self.connections.open_all(hops, report=report_to_stderr(self.world.rank, self.device))

    @cached_property
    def recompute_levels(self) -> tuple[RecomputeLevel, ...]:
        """Return the recompute levels of the plan's cost profile; empty unless the recipe recomputes as needed."""
        recipe, text = self.metadata.recipe, self.metadata.cost_profile
        if recipe is None or recipe.recompute != "as-needed":
            return ()
        from fcp_cli.cost.profile import parse_cost_profile  # slow to import, and most recipes do not need it

        return parse_cost_profile(text, name="the plan's cost profile").recompute_levels

    @property
    def rank(self) -> int:
        """Return this process's rank in the plan."""
        return self.world.rank if self.peers is None else self.peers.index(self.world.rank)

    @property
    def encoders(self) -> range:
        """Return the dedicated encoder ranks; empty if all ranks encode."""
        ranks = self.world.size
        return range(ranks - (self.metadata.encoder_ranks or 0), ranks)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the loader to the device, asynchronously if it is in pinned memory."""
        return tensor.to(self.device, non_blocking=True)
