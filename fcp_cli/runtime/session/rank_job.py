"""One rank of a job under a plan: what its steps run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runtime.agreement.grad_ring import GradRingDtype
from fcp_cli.runtime.communication.transport import Transport
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.guards.waiting import Watch
from fcp_cli.runtime.metrics.recorder import Recorder
from fcp_cli.runtime.metrics.timing import Clock, clock_for
from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache


@dataclass(kw_only=True, eq=False)
class RankJob:
    """The means of one rank, the same for all steps of a loop.

    Attributes:
        plan, metadata: the plan file and its metadata.
        world: all ranks of the job.
        transport: messages between the members of a ring.
        device: device of the micro-batches.
        grad_ring_dtype: type in which gradients of keys and values travel.
        watch: stall reporter, or None if disabled.
        recorder: recorder of the steps, or None if no metrics are asked for.
        embedding_cache: outputs of a frozen vision encoder; may be set until `steps` is called.
        next_step: optimizer step after the last one that was trained.
        clock: clock of the device.
    """

    plan: Path
    metadata: PlanMetadata
    world: World
    transport: Transport
    device: torch.device
    grad_ring_dtype: GradRingDtype = "fp32"
    watch: Watch | None = None
    recorder: Recorder | None = None
    embedding_cache: EmbeddingCache | None = None
    next_step: int = field(default=0, init=False)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = clock_for(self.device)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def encoders(self) -> range:
        """Return the ranks that only encode; none where all ranks do."""
        ranks = self.world.size
        return range(ranks - (self.metadata.encoder_ranks or 0), ranks)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy what the loader prepared, without waiting where it is in page-locked memory."""
        return tensor.to(self.device, non_blocking=True)
