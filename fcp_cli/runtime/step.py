"""One optimizer step of one rank: its micro-batches in order, and the gradient reduction over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.cursor import RankMicroBatches
from fcp_cli.runtime.gradients import without_backward
from fcp_cli.runtime.guards import NO_BACKWARD, OTHER_LOSS, Guards
from fcp_cli.runtime.layout import ShardLayout
from fcp_cli.runtime.loader import Shard, picture_problems
from fcp_cli.runtime.loss import Labels, head_loss_sum, token_loss_sum
from fcp_cli.runtime.metrics import ClockMarks, MicroBatchTiming
from fcp_cli.runtime.plan_agreement import NO_TRAINING
from fcp_cli.runtime.rank_job import RankJob
from fcp_cli.runtime.ring import MicroBatchContext, Ring, current_ring
from fcp_cli.runtime.transport import World, gather_rows, gather_words
from fcp_cli.runtime.visuals import EncoderAhead

_NO_ATTENTION = (
    "the model's forward never called fcp_cli.runtime.attention with its ring; call it in place of the model's own "
    "attention, or use fcp_cli.integrations.transformers.prepare(model)"
)
_BACKWARD_TOO_EARLY = (
    "the backward of an earlier micro-batch runs between the forwards of later ones; under sync iteration ranks have "
    "different numbers of them and would wait for each other: run each backward before the next forward, or all "
    "forwards first, or plan with 'fcp plan --sync microbatch'"
)


class Step:
    """One optimizer step of one rank: iterate it to the end for its micro-batches.

    During a micro-batch, its ring is current for `attention`. FSDP2 and DeepSpeed may reduce gradients in its backward;
    plain models and DDP reduce them when the iteration ends. Gradients are then sums over all ranks, and the optimizer
    may step.

    Attributes:
        index: optimizer step, from 0.
        predicted_seconds, bound_seconds: the plan's makespan and lower bound.
        record: clock marks and facts for the metrics, or None if the step is not recorded.
        is_skipped: whether the finished step has no gradients because some rank's loss was not finite (`on_nan`).
        bad_rows: manifest rows of the step that are skipped because their images failed to decode.
        problems: decoding error of each bad row on this rank.
    """

    def __init__(
        self,
        job: RankJob,
        guards: Guards,
        own: RankMicroBatches[Shard],
        tokens: int | Tensor,
        bad_rows: tuple[int, ...] = (),
    ) -> None:
        self.index = own.step
        self.predicted_seconds, self.bound_seconds = own.makespan_seconds, own.bound_seconds
        self.record: ClockMarks | None = None
        self.is_skipped = False
        self._own = own
        self._job = job
        self._guards = guards
        self._sync = guards.sync
        self._shards = own.shards
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
        self.problems = picture_problems(own.shards)

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches."""
        return len(self._own)

    def require_finished(self) -> None:
        """Raise RunError unless every micro-batch was run."""
        self._own.require_finished()

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
        self._own.begin()
        watch = self._job.watch
        same_data = self._guards.same_data(self.index, self._shards)
        try:
            self._sync.begin()
            for shard in self._shards:
                with self._running(shard, is_last=shard is self._shards[-1]) as microbatch:
                    yield microbatch
            if self._encoder_ahead is not None:
                self._encoder_ahead.run_backward()
            self._require_calls()
            self._guards.note_backwards(microbatch.ring for microbatch in self._microbatches)
            if watch is not None:
                watch.begin(self.index, None)
            if same_data is not None:
                same_data.require()
            self._sync.reduce()
            self.is_skipped = self._guards.is_skipped(self._loss_sums, self._job.device)
            if self.is_skipped:
                self._sync.drop()
            self._sync.finish()
            if watch is not None:
                watch.end()
            self._own.is_finished = True
            self._fill_record()
            self._job.next_step = self.index + 1
        finally:
            if watch is not None and not self._own.is_finished:
                watch.forget()
            current_ring.set(None)  # no token reset: an abandoned loop may be closed in another context
            self._sync.restore()

    @contextmanager
    def _running(self, shard: Shard, *, is_last: bool) -> Iterator[LocalMicroBatch]:
        """Run one micro-batch on its ring, watched for stalls, checked and measured; the loop's body runs inside."""
        job = self._job
        if job.watch is not None:
            job.watch.begin(self.index, shard.row)
        if job.recorder is not None:
            job.recorder.enter()
        begin = job.clock.mark()
        self._sync.before_microbatch(is_last=is_last)
        microbatch = self._enter(shard, is_last=is_last)
        self._order_backwards(is_last=is_last)
        self._guards.poll_losses()
        yield microbatch
        self._guards.note_forwards(microbatch.ring)
        self._marks.append((begin, job.clock.mark()))
        self._own.num_run += 1
        if job.watch is not None:
            job.watch.end(self._marks[-1][1])

    def _fill_record(self) -> None:
        if self.record is not None:
            orders = (shard.row.order for shard in self._shards)
            self.record.microbatches = [(order, *marks) for order, marks in zip(orders, self._marks, strict=True)]
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
                buffers=job.buffers,
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
            self._own.require_attention(row, microbatch.ring, _NO_ATTENTION)
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
        self._guards.poll_losses()  # free: the host has just waited, so all losses of this rank are known
        return loss

    @property
    def _loss_sums(self) -> list[Tensor]:
        return [microbatch.loss_sum for microbatch in self._microbatches if microbatch.loss_sum is not None]

    def _loss_sum(self) -> Tensor:
        sums = self._loss_sums
        if not sums:
            raise RunError(f"step {self.index} has no loss; compute it with microbatch.loss(logits)")
        return torch.stack(sums).sum()


# One rank's shard of a micro-batch: its tokens, its ring and its share of the loss.


class LocalMicroBatch:
    """One rank's shard of one micro-batch.

    Attributes:
        row: the micro-batch's row of the plan.
        input_ids, labels: [1, tokens] int64 on the session's device; at least one token.
        position_ids: [1, tokens] int64, or [axes, 1, tokens] if `fetch` returned positions.
        ring: ring that `attention` runs on. It is current only while the loop body runs; pass it explicitly if
            attention runs later.
        is_last: whether this is the rank's last micro-batch of the step.
        pack_labels: [tokens of the pack] int64 on the host for packs of joined sequences, else None.
    """

    __slots__ = (
        "_backwards", "_denominator", "_guards", "_layout", "_losses",
        "input_ids", "is_last", "labels", "loss_sum", "pack_labels", "position_ids", "ring", "row",
    )  # fmt: skip

    def __init__(
        self,
        shard: Shard,
        ring: Ring,
        device: torch.device,
        *,
        is_last: bool,
        guards: Guards,
        denominator: int | Tensor,
    ) -> None:
        self.row: MicroBatch = shard.row
        self._layout = shard.layout
        self.ring = ring
        self.is_last = is_last
        self.input_ids = shard.input_ids.to(device, non_blocking=True)
        self.position_ids = shard.position_ids.to(device, non_blocking=True)
        self.labels = shard.labels.to(device, non_blocking=True)
        rows = None if shard.labelled is None else shard.labelled.to(device, non_blocking=True)
        ring.context.labels = Labels(values=self.labels, rows=rows)
        ring.context.model_tokens = shard.input_ids.shape[1]
        # Cleared when the backward of a loss from this micro-batch begins.
        ring.context.loss_missing = f"{ring.place}: {OTHER_LOSS if guards.sync.trains else NO_TRAINING}"
        self.pack_labels = shard.pack_labels
        self.loss_sum: Tensor | None = None
        self._guards = guards
        self._denominator = denominator
        self._losses = self._backwards = 0

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the step's loss, to call backward on.

        The share is the sum of its token losses / `denominator`, times `loss_factor`.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return self.normalised(token_loss_sum(logits, self.labels))

    def loss_of(self, hidden: Tensor, head: nn.Linear | Tensor) -> Tensor:
        """Return the same loss as `loss`, computing the logits block by block instead of materializing all of them.

        Args:
            hidden: [1, tokens, width] inputs of the head, for `input_ids`.
            head: the model's linear output layer, or its weight [vocabulary, width].

        Raises:
            RunError: the head's weight is sharded: the call is outside the forward of a model wrapped by `fully_shard`.
        """
        assert self.ring.context.labels is not None
        return self.normalised(head_loss_sum(hidden, head, self.ring.context.labels))

    @property
    def loss_factor(self) -> float:
        """Return the factor on the loss that undoes the gradient averaging of FSDP2 and DeepSpeed."""
        return self._guards.sync.loss_factor

    @property
    def denominator(self) -> int | Tensor:
        """Return the loss denominator of the step: its number of tokens with labels, or of manifest rows."""
        return self._denominator

    def normalised(self, loss_sum: Tensor) -> Tensor:
        """Return this rank's share of the step's loss for a sum of token losses (0-d) computed by the script."""
        self.loss_sum = loss_sum.detach()
        loss = loss_sum * self._guards.sync.loss_factor / self._denominator
        # The checks run on the host and would break the graph.
        if not torch.compiler.is_compiling():
            self._guards.check_loss(self.ring.place, self.row, self.loss_sum, loss)
        if not self._guards.sync.trains:
            return without_backward(loss, self.ring.place)
        if loss.requires_grad:
            self._losses += 1
            # The first hook of the loss's backward: it must run before a layer checks `loss_missing`.
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return loss

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each label, [1, tokens]; 0 for tokens without a label.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return token_log_probs(logits, self.labels)

    def part_of(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return this rank's shard [1, tokens, ...] of per-token values, e.g. log-probabilities or advantages.

        Args:
            values: manifest row -> [length, ...], as returned by `Step.collect`.

        Raises:
            RunError: a sequence has no values, or their number differs from its number of tokens.
        """
        return part_of(values, self.row, self._layout, self.ring.index).to(self.input_ids.device)

    def _note_backward(self, _: Tensor) -> None:
        self._backwards += 1
        self.ring.context.loss_missing = ""

    def require_backward(self) -> None:
        """Raise RunError if a trainable loss was computed but its backward never ran."""
        if self._losses and not self._backwards:
            raise RunError(f"{self.ring.place}: {NO_BACKWARD}")


# Per-token values, gathered from ranks to whole sequences and scattered back, e.g. log-probabilities.
#
# Passes over one rollout have separate plans, so a rank rarely holds the same tokens twice. `collect` gathers the
# values of a pass as one tensor per manifest row, and the next pass takes its shards with `part_of`. A value has the
# index of the predicting token, like its label, so the last value of each sequence is meaningless.

_BLOCK_TOKENS = 1024  # tokens whose logits are held in fp32 at a time


def token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label, in at least fp32; 0 for tokens without a label.

    Args:
        logits: [1, tokens, vocabulary].
        labels: [1, tokens] int64, `IGNORED` if there is nothing to predict.
    """
    kind = torch.promote_types(logits.dtype, torch.float32)
    parts = [
        -functional.cross_entropy(some.to(kind), of, ignore_index=IGNORED, reduction="none")
        for some, of in zip(torch.split(logits[0], _BLOCK_TOKENS), torch.split(labels[0], _BLOCK_TOKENS), strict=True)
    ]
    return torch.cat(parts).unsqueeze(0)


def part_of(values: Mapping[int, Tensor], row: MicroBatch, layout: ShardLayout, member: int) -> Tensor:
    """Return the values [1, tokens, ...] of a rank's tokens of a micro-batch; one 0 for a rank without tokens.

    Args:
        values: manifest row -> [length, ...].
        row, layout, member: the micro-batch, its layout, and the rank's index in it.
    """
    for sequence, length in zip(row.sequences, row.lengths, strict=True):
        found = values.get(sequence)
        if found is None or found.shape[:1] != (length,):
            has = "no values" if found is None else f"values of the shape {tuple(found.shape)}"
            raise RunError(f"row {sequence} has {has}; the micro-batch needs one for each of its {length} tokens")
    if not layout.tokens(member):
        any_values = next(iter(values.values()), torch.zeros(0, device="cpu"))
        return any_values.new_zeros((1, 1, *any_values.shape[1:]))
    pack = torch.cat([values[sequence] for sequence in row.sequences])
    return pack[torch.from_numpy(layout.index(member)).to(pack.device)].unsqueeze(0)


def collect(
    world: World,
    parts: Sequence[tuple[MicroBatch, ShardLayout, int, Tensor]],
    device: torch.device,
    *,
    fault: str = "",
) -> dict[int, Tensor]:
    """Gather per-token values on every rank: manifest row -> [length]. Every rank calls it.

    Args:
        world: all ranks.
        parts: per micro-batch of this rank: its row, its layout, the rank's index in it, and [1, tokens] values.
        device: device of the exchange and of the result.
        fault: error on this rank, if it has no parts because of one.
    """
    fault = fault or _fault(parts)
    # Member 0 of each ring announces its sequences. Then every rank fills in its tokens of a zero tensor, and a sum
    # joins them.
    told = [
        (sequence, length)
        for row, _, member, _ in parts
        if member == 0
        for sequence, length in zip(row.sequences, row.lengths, strict=True)
    ]
    is_double = any(values.dtype == torch.float64 for *_, values in parts)
    facts = gather_words(world, (int(is_double), int(bool(fault))), device)
    if faulty := [rank for rank, (_, is_faulty) in enumerate(facts) if is_faulty]:
        raise RunError(fault or f"values of rank {faulty[0]} are not one per token; its own message says which")
    table = torch.cat(gather_rows(world, torch.tensor(told, dtype=torch.int64, device=device).reshape(-1, 2), device))
    offsets, total = {}, 0
    for sequence, length in table.tolist():
        offsets[sequence] = (total, total + length)
        total += length
    # Agree over all ranks, since the values of an idle rank may have another data type.
    flat = torch.zeros(
        total, dtype=torch.float64 if any(double for double, _ in facts) else torch.float32, device=device
    )
    for row, layout, member, values in parts:
        if layout.tokens(member):
            starts = torch.cat([torch.arange(*offsets[sequence], device="cpu") for sequence in row.sequences])
            places = starts[torch.from_numpy(layout.index(member))].to(device)
            flat[places] = values.detach().flatten().to(device=device, dtype=flat.dtype)
    world.all_reduce_sum(flat)
    return {sequence: flat[start:end] for sequence, (start, end) in offsets.items()}


def _fault(parts: Sequence[tuple[MicroBatch, ShardLayout, int, Tensor]]) -> str:
    """Return a description of the first micro-batch whose values do not match this rank's tokens, or ""."""
    for row, layout, member, values in parts:
        if values.numel() != max(layout.tokens(member), 1):
            return (
                f"micro-batch {row.order} has values of the shape {tuple(values.shape)}, but this rank holds "
                f"{layout.tokens(member)} of its tokens; give one value for each"
            )
    return ""
