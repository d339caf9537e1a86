"""Drive a training loop by a plan: which micro-batches a rank runs, on which ring, and when gradients are reduced.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.online import OnlineSettings
from fcp_cli.plan.reader import PlanReader
from fcp_cli.plan.step import MicroBatch
from fcp_cli.recipe import Reduce
from fcp_cli.runtime.agreement.grad_ring import GradRingDtype, agreed_grad_dtype
from fcp_cli.runtime.agreement.plan_agreement import NO_TRAINING, agree_on_plan
from fcp_cli.runtime.agreement.step_agreement import agree_on_first_step
from fcp_cli.runtime.communication.contacts import Contacts, agree_on_look_back, planned_hops, report_to_stderr
from fcp_cli.runtime.communication.transport import ProcessTransport, Transport
from fcp_cli.runtime.communication.world import ProcessWorld, World, join_process_group, local_device
from fcp_cli.runtime.data.cursor import PlanCursor
from fcp_cli.runtime.data.followed_step import FollowedStep, plan_path
from fcp_cli.runtime.data.loader import Fetch, LoadedStep, Shard, fetches_labels, load_steps
from fcp_cli.runtime.data.planned_masks import with_planned_masks
from fcp_cli.runtime.data.prefetch import Prefetched
from fcp_cli.runtime.gradients import GradientSync, gradient_sync
from fcp_cli.runtime.gradients.forward import without_backward
from fcp_cli.runtime.guards.finite import LossWatch
from fcp_cli.runtime.guards.guards import NO_BACKWARD, OTHER_LOSS, Guards
from fcp_cli.runtime.guards.on_nan import OnNan
from fcp_cli.runtime.guards.waiting import Watch, watch_for
from fcp_cli.runtime.loss.token_loss import Labels, head_loss_sum, token_loss_sum
from fcp_cli.runtime.metrics.recorder import Recorder, StepRecord, recorder_of
from fcp_cli.runtime.metrics.run_record import METRICS_VARIABLE
from fcp_cli.runtime.metrics.timing import Clock, MicroBatchTiming, clock_for
from fcp_cli.runtime.online.control import ProcessControl
from fcp_cli.runtime.online.cursor import PlansStreams, StreamCursor, online_settings, stream_plan_path
from fcp_cli.runtime.online.source import StreamSource
from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache
from fcp_cli.runtime.pictures.encoder_rank import EncoderAhead, require_ranks_apart
from fcp_cli.runtime.ring_attention.ring import Ring, current_ring
from fcp_cli.runtime.session.outside import outside
from fcp_cli.runtime.session.restarts import say_if_begun_again
from fcp_cli.runtime.session.token_values import collect, part_of, token_log_probs

_STEPS_AHEAD = 2
_NO_ATTENTION = (
    "the model's forward never called fcp_cli.runtime.attention with its ring; call it in place of the model's own "
    "attention, or use fcp_cli.integrations.transformers.prepare(model)"
)
_BACKWARD_TOO_EARLY = (
    "the backward of an earlier micro-batch runs between the forwards of later ones; under sync iteration ranks have "
    "different numbers of them and would wait for each other: run each backward before the next forward, or all "
    "forwards first, or plan with 'fcp plan --sync microbatch'"
)


def start(
    plan: str | Path | None = None,
    fetch: Fetch | None = None,
    *,
    stream: Iterable[Any] | None = None,
    planner: PlansStreams | OnlineSettings | None = None,
    device: torch.device | None = None,
    grad_ring_dtype: GradRingDtype | None = None,
    skip_bad_rows: bool = False,
    metrics: str | Path | None = None,
) -> Session:
    """Join the job and make sure that all ranks follow the same plan. Every rank calls it, once.

    Args:
        plan: plan file; by default what `fcp launch` put into FCP_PLAN.
        fetch: from a manifest row to its tokens, or to (tokens, labels); see `loader.Fetch`. Of a stream: from an id or
            a row that it gave.
        stream: sequences that are planned while the job trains, as (id, length) or as rows; `plan` is then written.
        planner: plans a stream: a `fcp_cli.Planner` or what its `online` returns; by default what `fcp launch --online`
            says.
        device: where tensors go; by default the local rank's accelerator, else the CPU.
        grad_ring_dtype: type in which gradients of keys and values travel; by default what FCP_GRAD_RING_DTYPE says,
            else fp32. See `GradRingDtype`.
        skip_bad_rows: learn nothing of a row whose pictures cannot be read, in place of ending; equal on all ranks.
        metrics: file in which rank 0 writes what all ranks measured; by default what FCP_METRICS names, which `fcp
            launch` sets, else none.

    Raises:
        PlanError: the plan is missing, damaged or was edited.
        RunError: ranks have different plans, or the plan is for another number of ranks; on all ranks.
    """
    online = None if stream is None else online_settings(planner)
    path = plan_path(plan) if online is None else stream_plan_path(plan)
    device = device or local_device()
    owns_process_group = join_process_group(device)
    world = ProcessWorld()
    metadata = agree_on_plan(world, path, device) if online is None else online.metadata
    _agree_on_kernels(world, device, metadata)
    transport = ProcessTransport.create(device)
    session = Session(
        plan=path,
        metadata=metadata,
        fetch=fetch,
        world=world,
        transport=transport,
        device=device,
        owns_process_group=owns_process_group,
    )
    if online is not None and stream is not None:
        session.source = StreamSource(stream, online, path, ProcessControl(online.options.planner), fetch)
    else:
        session.contacts.meet(planned_hops(path), report=report_to_stderr(world.rank, device))
    session.watch = watch_for(session.rank, session.clock, device)
    session.watch.start()
    session.grad_ring_dtype = agreed_grad_dtype(world, device, grad_ring_dtype)
    session.skip_bad_rows = skip_bad_rows
    if online is not None and online.options.refit_every is not None:  # which counts what is measured
        metrics = metrics or os.environ.get(METRICS_VARIABLE) or path.with_name(f"{path.stem}.metrics.jsonl")
    session.recorder = recorder_of(metrics, plan=path, metadata=metadata, rank=world.rank, device=device)
    return session


def _agree_on_kernels(world: ProcessWorld, device: torch.device, metadata: PlanMetadata) -> None:
    """Choose the attention kernels of CUDA devices; other devices have one, and need no cost profile for it."""
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
    """Return `start(plan, fetch).steps(model, first_step=first_step)`, for a loop that needs nothing else."""
    return start(plan, fetch, stream=stream, planner=planner).steps(model, first_step=first_step)


class Session:
    """One rank's part in a job that follows a plan. Made by `start`; use it as a context manager or call `close`.

    Attributes:
        plan, metadata: the plan file and its metadata.
        world: all ranks of the job.
        device: where micro-batches are put.
        fetch: from a manifest row to its tokens; may be set until `steps` is called.
        grad_ring_dtype: type in which gradients of keys and values travel.
        skip_bad_rows: learn nothing of a row whose pictures cannot be read, in place of ending.
        watch: says where this rank waits; None where nobody would read it.
        recorder: measures the steps; None where nobody asked for metrics.
        embedding_cache: keeps what a frozen vision encoder computes; may be set until `steps` is called.
        source: plans the steps of a stream; None where they are planned already.
        contacts: whom the rank has met.
    """

    def __init__(
        self,
        *,
        plan: Path,
        metadata: PlanMetadata,
        fetch: Fetch | None,
        world: World,
        transport: Transport,
        device: torch.device,
        owns_process_group: bool = False,
        steps_ahead: int = _STEPS_AHEAD,
    ) -> None:
        self.plan = plan
        self.metadata = metadata
        self.world = world
        self.device = device
        self.clock: Clock = clock_for(device)
        self.transport = transport
        self.grad_ring_dtype: GradRingDtype = "fp32"
        self.skip_bad_rows = False
        self.watch: Watch | None = None
        self.recorder: Recorder | None = None
        self.embedding_cache: EmbeddingCache | None = None
        self.source: StreamSource | None = None
        self.contacts = Contacts(transport, rank=world.rank, device=device)
        self.fetch = fetch
        self._owns_process_group = owns_process_group
        self._steps_ahead = steps_ahead
        self._first_step = self._next_step = 0  # of a loop that begins, and of one that goes on from here

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

    def steps(
        self,
        model: nn.Module | GradientSync | None = None,
        *,
        first_step: int | None = None,
        reduce: Reduce | None = None,
        on_nan: OnNan = "stop",
        mean_over: Literal["tokens", "rows"] = "tokens",
    ) -> Generator[Step, None, None]:
        """Yield the plan's steps from `first_step` on, each to be iterated to its end before the next.

        Every rank calls it.

        Args:
            model: whose gradients are summed over ranks: as it is (it starts from rank 0's weights), in
                DistributedDataParallel, or sharded with `fully_shard`. With `GradientSync()`, the script sums them
                itself; without either, nothing may be trained. Under a plan of forward passes nothing is summed, and
                micro-batches run without gradients.
            first_step: optimizer step to begin with, for a resumed run; None: what `load_state_dict` said, else 0.
            reduce: of FSDP2 that gathers weights again: reduce gradients in every `wave`, so that a rank holds only its
                share of them, or once a `step`, which sends less; None: as the plan's recipe says, else `wave`.
            on_nan: of a step in which a rank's loss is NaN or infinite: `stop` the job; `skip-step`: leave all ranks
                without gradients, so that their optimizers change nothing (the host then waits for the device once a
                step); or `go-on`.
            mean_over: what of the global batch the loss is a mean over: the tokens with labels, or the manifest's rows.

        Raises:
            RunError: no `fetch`, a model that cannot follow the plan, a step beyond it, ranks that begin with different
                ones; while iterating, a loop that goes wrong, data that does not match the plan or differs over ranks.
        """
        fetch = self.fetch if self.source is None else self.source.fetch
        if fetch is None:
            raise RunError("no data: pass fetch=..., a function from manifest row to tokens")
        fetch = with_planned_masks(fetch, self.metadata)
        first_step = self._first_step if first_step is None else first_step
        agree_on_first_step(self.world, first_step)
        self._meet_for_look_back()
        say_if_begun_again(first_step, self.metadata.first_step, self.rank)
        planned = self.metadata.recipe
        reduce = reduce or (planned.reduce if planned is not None else "wave")
        sync = gradient_sync(model, self.world, self.metadata.sync, reduce, self.metadata.phase)
        require_ranks_apart(sync, self.metadata.encoder_ranks)
        guards = Guards(self.world, sync, model=model, on_nan=on_nan, watch=LossWatch(self.clock))
        follow = partial(self._begun, first_step, fetch, guards, mean_over)
        # A stream may have nothing yet: its first step is waited for when the loop asks for it.
        return self._recorded(follow() if self.source is None else _when_asked(follow), first_step)

    def _meet_for_look_back(self) -> None:
        """Open the ways of layers that look back, where the model has any; those of a stream before each step."""
        self.contacts.look_back = agree_on_look_back(self.world)
        if self.contacts.look_back != "no" and self.source is None:
            hops = planned_hops(self.plan, look_back=self.contacts.look_back)
            self.contacts.meet(hops, report=report_to_stderr(self.rank, self.device))

    def _begun(
        self, first_step: int, fetch: Fetch, guards: Guards, mean_over: Literal["tokens", "rows"]
    ) -> Generator[Step, None, None]:
        cursor, labelled = self._begin_following(first_step, fetch)
        loaded = Prefetched(
            self._loaded(cursor, fetch, labelled=labelled),
            depth=self._steps_ahead,
            name="fcp-loader",
        )
        counting: Literal["rows", "labels"] | None = "rows" if mean_over == "rows" else "labels" if labelled else None
        return self._follow(cursor, loaded, guards, counting)

    def _recorded(self, followed: Generator[Step, None, None], first_step: int) -> Generator[Step, None, None]:
        if self.recorder is None:
            return followed
        if self.source is not None:
            self.recorder.followed = self.source.followed
            if self.source.measured.note not in self.recorder.listeners:
                self.recorder.listeners.append(self.source.measured.note)
        self.recorder.open(first_step)
        return self.recorder.recorded(followed)

    def _begin_following(self, first_step: int, fetch: Fetch) -> tuple[PlanCursor | StreamCursor, bool]:
        """Return this rank's steps of the plan or of the stream, and whether `fetch` gives labels."""
        if self.source is None:
            cursor = PlanCursor(self.plan, self.rank, first_step=first_step, ahead=self._steps_ahead)
            return cursor, fetches_labels(PlanReader(self.plan).steps(first_step), fetch)
        self._next_step = first_step
        planned = StreamCursor(self.source, self.rank, first_step=first_step, end_step=lambda: self._next_step)
        return planned, fetches_labels(planned.first(), fetch)

    def _loaded(self, cursor: PlanCursor | StreamCursor, fetch: Fetch, *, labelled: bool) -> Iterator[LoadedStep]:
        return load_steps(
            cursor,
            fetch,
            rank=self.rank,
            labelled=labelled,
            device=self.device,
            cache=self.embedding_cache,
            encoders=self.encoders,
            looks_ahead=self.source is None or self.source.settings.options.ahead > 0,
        )

    def _follow(
        self,
        cursor: PlanCursor | StreamCursor,
        loaded: Prefetched[LoadedStep],
        guards: Guards,
        counting: Literal["rows", "labels"] | None,
    ) -> Generator[Step, None, None]:
        try:
            while (found := self._next_loaded(loaded)) is not None:
                bad = self._bad_rows(found)
                item = found.without(bad) if bad else found
                tokens: int | Tensor = item.plan.loss_tokens
                if counting == "rows":
                    tokens = item.plan.sequences
                elif counting == "labels" or bad:
                    tokens = torch.tensor(item.labelled_tokens, device=self.device)
                    self.world.all_reduce_sum(tokens)  # the sum stays on the device: the host does not wait for it
                step = Step(self, guards, item, tokens)
                step.bad_rows = bad
                yield step
                step.require_finished()
        finally:
            cursor.close()
            loaded.close()

    def _next_loaded(self, loaded: Prefetched[LoadedStep]) -> LoadedStep | None:
        """Return the next step; of a stream, let more be planned, and meet the ranks that its rings join first."""
        if self.source is None:
            return next(loaded, None)
        self.source.want(self._next_step)
        found = next(loaded, None)
        if found is not None:
            plan = self.source.hand_out(found.plan.step)
            self.contacts.meet_for(plan, self.metadata.ranks_per_node)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the step that comes next, for a checkpoint of any framework: the one after the last that was run."""
        return {"next_step": self._next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `steps` begin where the run of a checkpoint ended.

        Raises:
            RunError: the state is no session's.
        """
        if not isinstance(state.get("next_step"), int):
            raise RunError(
                "the checkpoint's state of the session has no next_step, but "
                f"{', '.join(map(str, state)) or 'nothing'}; save what session.state_dict() returns"
            )
        self._first_step = self._next_step = state["next_step"]

    def outside(self) -> AbstractContextManager[None]:
        """Return `outside()`: a context in which models run beside the plan, as for evaluation and generation."""
        return outside()

    def _bad_rows(self, item: LoadedStep) -> tuple[int, ...]:
        """Return the manifest rows of the step whose pictures some rank could not read; the same on all ranks.

        Raises:
            RunError: there is one that this rank could not read, and such rows are not to be skipped.
        """
        if not self.skip_bad_rows:
            for problem in item.problems.values():
                raise RunError(problem)
            return ()
        counts = torch.zeros(self.world.size, dtype=torch.int64, device=self.device)
        counts[self.rank] = len(item.problems)
        self.world.all_reduce_sum(counts)
        ends = counts.cumsum(0).tolist()
        if not ends[-1]:
            return ()
        rows = torch.zeros(ends[-1], dtype=torch.int64, device=self.device)
        rows[ends[self.rank] - len(item.problems) : ends[self.rank]] = torch.tensor(
            list(item.problems), device=self.device
        )
        self.world.all_reduce_sum(rows)
        return tuple(sorted(set(rows.tolist())))

    def close(self) -> None:
        """Leave the job, and destroy the process group if `start` made it."""
        if self.recorder is not None:
            self.recorder.close()
        if self.watch is not None:
            self.watch.stop()
        if self._owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _when_asked(begin: Callable[[], Generator[Step, None, None]]) -> Generator[Step, None, None]:
    yield from begin()


class LocalMicroBatch:
    """One rank's part of one micro-batch.

    Attributes:
        row: the micro-batch in the plan.
        input_ids, labels: [1, tokens] int64 on the session's device; at least one token.
        position_ids: the same, or [axes, 1, tokens] where `fetch` gave positions of its own.
        ring: what `attention` runs on; current while the loop body runs, to be passed on where that may be too late.
        is_last: whether it is this rank's last of the step.
        pack_labels: [tokens of the pack] int64 of a pack of joined sequences, on the host; else None.
    """

    __slots__ = (
        "_backwards", "_divisor", "_guards", "_layout", "_losses",
        "input_ids", "is_last", "labels", "loss_sum", "pack_labels", "position_ids", "ring", "row",
    )  # fmt: skip

    def __init__(
        self, shard: Shard, ring: Ring, device: torch.device, *, is_last: bool, guards: Guards, divisor: int | Tensor
    ) -> None:
        self.row: MicroBatch = shard.row
        self._layout = shard.layout
        self.ring = ring
        self.is_last = is_last
        self.input_ids = shard.input_ids.to(device, non_blocking=True)
        self.position_ids = shard.position_ids.to(device, non_blocking=True)
        self.labels = shard.labels.to(device, non_blocking=True)
        rows = None if shard.labelled is None else shard.labelled.to(device, non_blocking=True)
        ring.labels = Labels(values=self.labels, rows=rows)
        ring.model_tokens = shard.input_ids.shape[1]
        ring.loss_missing = f"{ring.place}: {OTHER_LOSS if guards.sync.trains else NO_TRAINING}"
        self.pack_labels = shard.pack_labels
        self.loss_sum: Tensor | None = None
        self._guards = guards
        self._divisor = divisor
        self._losses = self._backwards = 0

    def loss(self, logits: Tensor) -> Tensor:
        """Return this rank's share of the step's loss, to call backward on.

        It is the sum of its token losses / tokens of the global batch, times what undoes the averaging of DDP and
        FSDP2.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return self.normalised(token_loss_sum(logits, self.labels))

    def loss_of(self, hidden: Tensor, head: nn.Linear | Tensor) -> Tensor:
        """Return what `loss` returns, without the logits: they are computed and dropped a part at a time.

        Args:
            hidden: [1, tokens, width] for `input_ids`, what the head would be given.
            head: the model's linear output layer, or its weight [vocabulary, width].

        Raises:
            RunError: the head's weight is sharded, as outside the forward of a model that `fully_shard` wraps.
        """
        assert self.ring.labels is not None
        return self.normalised(head_loss_sum(hidden, head, self.ring.labels))

    @property
    def loss_factor(self) -> float:
        """Return the factor in the loss that undoes what the model's wrapper divides gradients by."""
        return self._guards.sync.loss_factor

    @property
    def divisor(self) -> int | Tensor:
        """Return the loss denominator of the step: its tokens with labels, or its rows."""
        return self._divisor

    def normalised(self, loss_sum: Tensor) -> Tensor:
        """Return this rank's share of the loss from a sum of token losses (0-d) that the script computed itself."""
        self.loss_sum = loss_sum.detach()
        loss = loss_sum * self._guards.sync.loss_factor / self._divisor
        if not torch.compiler.is_compiling():
            self._guards.see_loss(self.ring.place, self.row, self.loss_sum, loss)
        if not self._guards.sync.trains:
            return without_backward(loss, self.ring.place)
        if loss.requires_grad:
            self._losses += 1
            loss.register_hook(self._note_backward)  # type: ignore[no-untyped-call]
        return loss

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return [1, tokens] the log-probability of each label, 0 where a token has none.

        Args:
            logits: [1, tokens, vocabulary] for `input_ids`.
        """
        return token_log_probs(logits, self.labels)

    def part_of(self, values: Mapping[int, Tensor]) -> Tensor:
        """Return [1, tokens] what this rank needs of values per token: log-probabilities of another pass, advantages.

        Args:
            values: manifest row -> [length], as `Step.collect` returns them.

        Raises:
            RunError: a sequence has no values, or not as many as tokens.
        """
        return part_of(values, self.row, self._layout, self.ring.index).to(self.input_ids.device)

    def _note_backward(self, _: Tensor) -> None:
        self._backwards += 1
        self.ring.loss_missing = ""

    def require_backward(self) -> None:
        """Raise RunError if a loss was made to be trained on, and no backward was run."""
        if self._losses and not self._backwards:
            raise RunError(f"{self.ring.place}: {NO_BACKWARD}")


class Step(FollowedStep):
    """One optimizer step of one rank: iterate it, to the end, for the micro-batches.

    While a micro-batch is out, its ring is current for `attention`, and no gradient is reduced.
    After the last, gradients are sums over all ranks and the optimizer may step.

    Attributes:
        is_skipped: whether the step, now over, left no gradients, since a rank's loss was not finite (`on_nan`).
        bad_rows: manifest rows of the step of which nothing is learned, since their pictures could not be read.
        problems: why, for those that this rank met.
        record: what is measured of it; None where nothing is.
    """

    record: StepRecord | None = None

    def __init__(self, session: Session, guards: Guards, loaded: LoadedStep, tokens: int | Tensor) -> None:
        super().__init__(loaded.plan)
        self.is_skipped = False
        self._session = session
        self._guards = guards
        self._sync = guards.sync
        self._shards = loaded.shards
        self._tokens = tokens
        self._divisor = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
        self._microbatches: list[LocalMicroBatch] = []
        self._marks: list[tuple[Any, Any]] = []
        self._encoder_ahead: EncoderAhead | None = None
        if session.rank in session.encoders:
            shown = [shard.visuals and shard.visuals.map_pixels(session.to_device) for shard in self._shards]
            self._encoder_ahead = EncoderAhead(shown)
        self.bad_rows: tuple[int, ...] = ()
        self.problems = loaded.problems

    @property
    def tokens(self) -> int:
        """Return the tokens of the global batch that carry a loss; with labels from `fetch`, wait for the device."""
        return int(self._tokens)

    @property
    def timings(self) -> tuple[MicroBatchTiming, ...]:
        """Return when this rank's micro-batches ran; on a device, wait for the last one."""
        if not self._marks:
            return ()
        clock, first = self._session.clock, self._marks[0][0]
        return tuple(
            MicroBatchTiming(
                order=shard.row.order, start_seconds=clock.seconds(first, begin), seconds=clock.seconds(begin, end)
            )
            for shard, (begin, end) in zip(self._shards, self._marks, strict=False)  # fewer marks in an unfinished step
        )

    def note(self, **facts: float) -> None:
        """Put into the metrics what the loop alone knows: `grad_norm`, `learning_rate`, or a `loss` of its own."""
        if self.record is not None:
            self.record.facts |= facts

    def __iter__(self) -> Iterator[LocalMicroBatch]:
        self._begin()
        watch, recorder = self._session.watch, self._session.recorder
        same_data = self._guards.same_data(self.index, self._shards)
        try:
            self._sync.begin()
            for position, shard in enumerate(self._shards):
                is_last = position == len(self._shards) - 1
                place = None if watch is None else watch.begin(self.index, shard.row)
                if recorder is not None:
                    recorder.enter(shard.row, position, len(self))
                begin = self._session.clock.mark()
                self._sync.before_microbatch(is_last=is_last)
                microbatch = self._enter(shard, is_last=is_last)
                self._order_backwards(is_last=is_last)
                self._guards.look()
                yield microbatch
                self._guards.note_forwards(microbatch.ring)
                self._marks.append((begin, self._session.clock.mark()))
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
            self._skip_if_bad()
            self._sync.finish()
            if place is not None:
                place.end = self._session.clock.mark()
            self._is_finished = True
            self._fill_record()
            self._session._next_step = self.index + 1
        finally:
            if watch is not None and not self._is_finished:
                watch.forget()
            current_ring.set(None)  # not by a token: a loop that is left may be closed in another context
            self._sync.restore()

    def _fill_record(self) -> None:
        if self.record is not None:
            orders = (shard.row.order for shard in self._shards)
            self.record.marks = [(order, *marks) for order, marks in zip(orders, self._marks, strict=True)]
            self.record.note_loss(self._loss_sums, 0 if self._session.rank else self._divisor)
            if self.bad_rows:
                self.record.facts["bad_rows"] = self.bad_rows
            self.record.is_whole = True

    def _skip_if_bad(self) -> None:
        self.is_skipped = self._guards.is_skipped(self._loss_sums, self._session.device)
        if self.is_skipped:
            self._sync.drop()

    def _enter(self, shard: Shard, *, is_last: bool) -> LocalMicroBatch:
        session = self._session
        ring = Ring(
            layout=shard.layout,
            index=shard.member,
            ranks=shard.row.ranks,
            transport=session.transport,
            visuals=None if shard.visuals is None else shard.visuals.map_pixels(session.to_device),
            grad_dtype=session.grad_ring_dtype,
            embedding_cache=session.embedding_cache,
            encoder_ahead=self._encoder_ahead,
        )
        ring.place = self._guards.place(self.index, shard.row)
        self._guards.expect_as_before(ring, shard.row.order)
        current_ring.set(ring)
        microbatch = LocalMicroBatch(
            shard, ring, session.device, is_last=is_last, guards=self._guards, divisor=self._divisor
        )
        self._microbatches.append(microbatch)
        return microbatch

    def _order_backwards(self, *, is_last: bool) -> None:
        """Forbid backwards between forwards where ranks have different numbers of micro-batches.

        A loop may run each backward before the next forward, or all forwards first. In between, one rank would begin
        a backward while another of its ring begins a forward, and both would wait for each other.
        """
        earlier = [microbatch.ring for microbatch in self._microbatches[:-1]]
        holds_back = any(ring.attention_calls and not ring.backward_calls for ring in earlier)
        if self._session.metadata.sync != "iteration" or not holds_back or not self._sync.trains:
            return
        for ring in earlier:
            ring.backward_forbidden = "" if is_last else f"step {self.index}: {_BACKWARD_TOO_EARLY}"

    def _require_calls(self) -> None:
        for microbatch in self._microbatches:
            row = microbatch.row
            self._require_attention(row, microbatch.ring, _NO_ATTENTION)
            if microbatch.ring.visuals is not None and not microbatch.ring.encoder_calls:
                raise RunError(
                    f"step {self.index}, micro-batch {row.order} has images or videos, but no vision encoder ran for "
                    "it; train a vision-language model that fcp_cli.integrations.transformers.prepare accepts"
                )
            microbatch.require_backward()

    @property
    def local_tokens(self) -> int:
        """Return the tokens of the step that this rank holds."""
        return sum(shard.layout.tokens(shard.member) for shard in self._shards)

    def local_loss(self) -> Tensor:
        """Return this rank's share (0-d) of `reduced_loss`, without waiting for the device.

        Raises:
            RunError: the loop did not use `LocalMicroBatch.loss` or `.normalised`.
        """
        return self._loss_sum() / self._divisor

    def collect(self, values: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return, on every rank, manifest row -> [length] of values per token, as `log_probs` gives them.

        Every rank calls it, after the last micro-batch.

        Args:
            values: [1, tokens] of each of this rank's micro-batches, in their order.

        Raises:
            RunError: there is not one tensor for each micro-batch, or not one value for each token; on every rank.
        """
        fault = ""
        if len(values) != len(self._shards):
            fault = (
                f"step {self.index} has {len(self._shards)} micro-batches here and values of {len(values)}; "
                "collect one tensor for each"
            )
        shards = () if fault else zip(self._shards, values, strict=True)
        parts = [(one.row, one.layout, one.member, of) for one, of in shards]
        return collect(self._session.world, parts, self._session.device, fault=fault)

    def reduced_loss(self) -> float:
        """Return the step's loss as one process would report it: token losses of all ranks / tokens of the batch.
        Every rank calls it, after the last micro-batch.

        Raises:
            RunError: the loop did not use `LocalMicroBatch.loss` or `.normalised`.
        """
        total = self._loss_sum()
        self._session.world.all_reduce_sum(total)
        loss = float(total) / int(self._divisor)
        self._guards.look()  # the host has waited for the device: all losses of this rank are there
        return loss

    @property
    def _loss_sums(self) -> list[Tensor]:
        return [microbatch.loss_sum for microbatch in self._microbatches if microbatch.loss_sum is not None]

    def _loss_sum(self) -> Tensor:
        sums = self._loss_sums
        if not sums:
            raise RunError(f"step {self.index} has no loss; compute it with microbatch.loss(logits)")
        return torch.stack(sums).sum()
