"""Checks of a training loop that abort it at the first step that would train incorrectly.

All checks run on the host: counters, hooks on the loss, and one all-reduced number a step. They cost a few microseconds
per micro-batch (`python -m benchmarks.guards`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.agreement.step_agreement import SameData
from fcp_cli.runtime.communication.world import World
from fcp_cli.runtime.data.loader import Shard
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.guards.finite import LossWatch
from fcp_cli.runtime.guards.on_nan import OnNan
from fcp_cli.runtime.guards.pass_agreement import PassAgreement
from fcp_cli.runtime.guards.summed_weights import require_summed
from fcp_cli.runtime.ring_attention.ring import Ring

NO_BACKWARD = (
    "no backward of its loss was run: gradients are summed over ranks when the loop over the step ends, so call "
    "backward inside it, for every micro-batch"
)
OTHER_LOSS = (
    "backward was called on a loss that the micro-batch did not make, and a mean of a rank's own weighs tokens by how "
    "the plan packed them: use microbatch.loss(logits), or microbatch.normalised(sum of token losses)"
)


class Guards:
    """Checks of one call of `Session.steps`.

    Attributes:
        sync: gradient reducer.
        on_nan: reaction to a loss that is not finite.
    """

    def __init__(
        self,
        world: World,
        sync: GradientSync,
        *,
        model: nn.Module | GradientSync | None,
        on_nan: OnNan,
        watch: LossWatch,
    ) -> None:
        self.sync = sync
        self.on_nan = on_nan
        self._world = world
        self._watch = watch
        self._most_forwards = self._most_backwards = 0
        self._passes: PassAgreement | None = PassAgreement(world)
        self._is_model_missing = model is None
        self._is_walked = world.size == 1  # with one rank, nothing is reduced

    def place(self, step: int, row: MicroBatch) -> str:
        """Return step, micro-batch and rank, for messages."""
        return f"step {step}, micro-batch {row.order}, rank {self._world.rank}"

    def same_data(self, step: int, shards: tuple[Shard, ...]) -> SameData | None:
        """Start to compare the sequences of each ring over its ranks; return None if there is one rank."""
        if self._world.size == 1:
            return None
        return SameData(self._world, step, [shard.digest for shard in shards if shard.digest is not None])

    def expect_as_before(self, ring: Ring, order: int) -> None:
        """Limit a ring's passes to the counts of earlier micro-batches, since ranks that differ would deadlock."""
        ring.context.most_forwards, ring.context.most_backwards = self._most_forwards, self._most_backwards
        if self._passes is not None:
            self._passes.watch(ring, order)

    def note_forwards(self, ring: Ring) -> None:
        """Record the forwards of a finished micro-batch."""
        self._most_forwards = max(self._most_forwards, ring.context.forward_calls)

    def note_backwards(self, rings: Iterable[Ring]) -> None:
        """Record the backwards of a finished step, since a loop may defer them to its end."""
        if self._passes is not None:
            # Later steps are compared with the counts of this one, without messages.
            self._passes.end_step()
            self._passes = None
        self._most_backwards = max(self._most_backwards, *(ring.context.backward_calls for ring in rings))

    def look(self) -> None:
        """Raise RunError if a loss of an earlier micro-batch turned out not to be finite."""
        self._watch.look()

    def see_loss(self, place: str, row: MicroBatch, loss_sum: Tensor, loss: Tensor) -> None:
        """Check a loss that a micro-batch computed.

        Args:
            place, row: place and row of the micro-batch.
            loss_sum: sum of its token losses (0-d, detached).
            loss: this rank's share of the step's loss.
        """
        if self.on_nan == "stop":
            self._watch.note(place, row.sequences, loss_sum)
        if not self._is_walked and loss.requires_grad:
            self._is_walked = True
            summed = self.sync.summed()
            if summed is not None or self._is_model_missing:
                ids = None if summed is None else frozenset(map(id, summed))
                require_summed(loss, ids, ranks=self._world.size, place=place)

    def is_skipped(self, losses: list[Tensor], device: torch.device) -> bool:
        """Return whether to skip the step: under `skip-step`, if any rank's loss is not finite. Every rank calls it."""
        if self.on_nan != "skip-step":
            return False
        bad = torch.zeros(1, device=device)
        for loss in losses:
            bad += ~torch.isfinite(loss)
        self._world.all_reduce_sum(bad)
        return bool(bad.item())
