"""One optimizer step of one rank: its micro-batches in order, and the gradient reduction over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.data.followed_step import FollowedStep
from fcp_cli.runtime.data.loader import Shard, picture_problems
from fcp_cli.runtime.data.steps import LoadedStep
from fcp_cli.runtime.guards.guards import Guards
from fcp_cli.runtime.metrics.timing import MicroBatchTiming
from fcp_cli.runtime.pictures.encoder_rank import EncoderAhead
from fcp_cli.runtime.ring_attention.context import MicroBatchContext
from fcp_cli.runtime.ring_attention.ring import Ring, current_ring
from fcp_cli.runtime.session.microbatch import LocalMicroBatch
from fcp_cli.runtime.session.rank_job import RankJob
from fcp_cli.runtime.session.token_values import collect

_NO_ATTENTION = (
    "the model's forward never called fcp_cli.runtime.attention with its ring; call it in place of the model's own "
    "attention, or use fcp_cli.integrations.transformers.prepare(model)"
)
_BACKWARD_TOO_EARLY = (
    "the backward of an earlier micro-batch runs between the forwards of later ones; under sync iteration ranks have "
    "different numbers of them and would wait for each other: run each backward before the next forward, or all "
    "forwards first, or plan with 'fcp plan --sync microbatch'"
)


class Step(FollowedStep):
    """One optimizer step of one rank: iterate it to the end for its micro-batches.

    During a micro-batch, its ring is current for `attention`. FSDP2 and DeepSpeed may reduce gradients in its backward;
    plain models and DDP reduce them when the iteration ends. Gradients are then sums over all ranks, and the optimizer
    may step.

    Attributes:
        is_skipped: whether the finished step has no gradients because some rank's loss was not finite (`on_nan`).
        bad_rows: manifest rows of the step that are skipped because their images failed to decode.
        problems: decoding error of each bad row on this rank.
    """

    def __init__(
        self,
        job: RankJob,
        guards: Guards,
        loaded: LoadedStep[Shard],
        tokens: int | Tensor,
        bad_rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__(loaded.plan)
        self.is_skipped = False
        self._job = job
        self._guards = guards
        self._sync = guards.sync
        self._shards = loaded.shards
        self._tokens = tokens
        # Avoids 0 / 0 in a batch without labels: its loss is 0.
        self._denominator = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
        self._microbatches: list[LocalMicroBatch] = []
        self._marks: list[tuple[Any, Any]] = []
        self._encoder_ahead: EncoderAhead | None = None
        if job.rank in job.encoders:
            shown = [shard.visuals and shard.visuals.map_pixels(job.to_device) for shard in self._shards]
            self._encoder_ahead = EncoderAhead(shown)
        self.bad_rows = bad_rows
        self.problems = picture_problems(loaded.shards)

    @property
    def tokens(self) -> int:
        """Return the global loss denominator: trained tokens or rows. With `fetch` labels, waits for the device."""
        return int(self._tokens)

    @property
    def timings(self) -> tuple[MicroBatchTiming, ...]:
        """Return the start and seconds of this rank's micro-batches; waits for the device to finish the last one."""
        if not self._marks:
            return ()
        clock, first = self._job.clock, self._marks[0][0]
        return tuple(
            MicroBatchTiming(
                order=shard.row.order, start_seconds=clock.seconds(first, begin), seconds=clock.seconds(begin, end)
            )
            for shard, (begin, end) in zip(self._shards, self._marks, strict=False)  # fewer marks in an unfinished step
        )

    def note(self, **facts: float) -> None:
        """Add values from the script to the metrics: `grad_norm`, `learning_rate`, or its own `loss`."""
        if self.record is not None:
            self.record.facts |= facts

    def __iter__(self) -> Iterator[LocalMicroBatch]:
        self._begin()
        watch, recorder = self._job.watch, self._job.recorder
        same_data = self._guards.same_data(self.index, self._shards)
        try:
            self._sync.begin()
            for position, shard in enumerate(self._shards):
                is_last = position == len(self._shards) - 1
                place = None if watch is None else watch.begin(self.index, shard.row)
                if recorder is not None:
                    recorder.enter()
                begin = self._job.clock.mark()
                self._sync.before_microbatch(is_last=is_last)
                microbatch = self._enter(shard, is_last=is_last)
                self._order_backwards(is_last=is_last)
                self._guards.look()
                yield microbatch
                self._guards.note_forwards(microbatch.ring)
                self._marks.append((begin, self._job.clock.mark()))
                self._num_run += 1
                if place is not None:
                    place.end = self._marks[-1][1]
            if self._encoder_ahead is not None:
                self._encoder_ahead.run_backward()
            self._require_calls()
            self._guards.note_backwards(microbatch.ring for microbatch in self._microbatches)
            place = None if watch is None else watch.begin(self.index, None)
            if same_data is not None:
                same_data.require()
            self._sync.reduce()
            self.is_skipped = self._guards.is_skipped(self._loss_sums, self._job.device)
            if self.is_skipped:
                self._sync.drop()
            self._sync.finish()
            if place is not None:
                place.end = self._job.clock.mark()
            self._is_finished = True
            self._fill_record()
            self._job.next_step = self.index + 1
        finally:
            if watch is not None and not self._is_finished:
                watch.forget()
            current_ring.set(None)  # no token reset: an abandoned loop may be closed in another context
            self._sync.restore()

    def _fill_record(self) -> None:
        if self.record is not None:
            orders = (shard.row.order for shard in self._shards)
            self.record.marks = [(order, *marks) for order, marks in zip(orders, self._marks, strict=True)]
            self.record.note_loss(self._loss_sums, 0 if self._job.rank else self._denominator)
            if self.bad_rows:
                self.record.facts["bad_rows"] = self.bad_rows
            self.record.is_whole = True

    def _enter(self, shard: Shard, *, is_last: bool) -> LocalMicroBatch:
        job = self._job
        ring = Ring(
            layout=shard.layout,
            index=shard.member,
            ranks=shard.row.ranks,
            transport=job.transport,
            grad_dtype=job.grad_ring_dtype,
            context=MicroBatchContext(
                place=self._guards.place(self.index, shard.row),
                visuals=None if shard.visuals is None else shard.visuals.map_pixels(job.to_device),
                encoder_ahead=self._encoder_ahead,
            ),
        )
        self._guards.expect_as_before(ring, shard.row.order)
        current_ring.set(ring)
        microbatch = LocalMicroBatch(
            shard, ring, job.device, is_last=is_last, guards=self._guards, denominator=self._denominator
        )
        self._microbatches.append(microbatch)
        return microbatch

    def _order_backwards(self, *, is_last: bool) -> None:
        """Forbid backwards between forwards if ranks have different numbers of micro-batches.

        A loop may run each backward before the next forward, or all forwards first. In between, one rank would begin a
        backward while another of its ring begins a forward: a deadlock.
        """
        earlier = [microbatch.ring for microbatch in self._microbatches[:-1]]
        holds_back = any(ring.attention_calls and not ring.context.backward_calls for ring in earlier)
        if self._job.metadata.sync != "iteration" or not holds_back or not self._sync.trains:
            return
        for ring in earlier:
            ring.context.backward_forbidden = "" if is_last else f"step {self.index}: {_BACKWARD_TOO_EARLY}"

    def _require_calls(self) -> None:
        for microbatch in self._microbatches:
            row = microbatch.row
            self._require_attention(row, microbatch.ring, _NO_ATTENTION)
            if microbatch.ring.context.visuals is not None and not microbatch.ring.context.encoder_calls:
                raise RunError(
                    f"step {self.index}, micro-batch {row.order} has images or videos, but no vision encoder ran for "
                    "it; train a vision-language model that fcp_cli.integrations.transformers.prepare accepts"
                )
            microbatch.require_backward()

    @property
    def local_tokens(self) -> int:
        """Return the number of the step's tokens on this rank."""
        return sum(shard.layout.tokens(shard.member) for shard in self._shards)

    def local_loss(self) -> Tensor:
        """Return this rank's share (0-d) of `reduced_loss`, without waiting for the device.

        Raises:
            RunError: the loop did not use `LocalMicroBatch.loss` or `.normalised`.
        """
        return self._loss_sum() / self._denominator

    def collect(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Gather per-token values, such as those of `log_probs`, on every rank: manifest row -> [length].

        Every rank calls it, after the last micro-batch.

        Args:
            values: one tensor [1, tokens] per micro-batch of this rank, in loop order.

        Raises:
            RunError: a tensor or value is missing or surplus on any rank; raised on all ranks.
        """
        fault = ""
        if len(values) != len(self._shards):
            fault = (
                f"step {self.index} has {len(self._shards)} micro-batches here and values of {len(values)}; "
                "collect one tensor for each"
            )
        shards = () if fault else zip(self._shards, values, strict=True)
        parts = [(one.row, one.layout, one.member, of) for one, of in shards]
        return collect(self._job.world, parts, self._job.device, fault=fault)

    def reduced_loss(self) -> float:
        """Return the step's loss as a single process would compute it: sum of token losses / `tokens`, over all ranks.

        Every rank calls it, after the last micro-batch.

        Raises:
            RunError: the loop did not use `LocalMicroBatch.loss` or `.normalised`.
        """
        total = self._loss_sum()
        self._job.world.all_reduce_sum(total)
        loss = float(total) / int(self._denominator)
        self._guards.look()  # free: the host has just waited, so all losses of this rank are known
        return loss

    @property
    def _loss_sums(self) -> list[Tensor]:
        return [microbatch.loss_sum for microbatch in self._microbatches if microbatch.loss_sum is not None]

    def _loss_sum(self) -> Tensor:
        sums = self._loss_sums
        if not sums:
            raise RunError(f"step {self.index} has no loss; compute it with microbatch.loss(logits)")
        return torch.stack(sums).sum()
