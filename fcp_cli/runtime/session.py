"""The training loop of one rank under a plan: prefetches steps and yields them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.cost.recipe import Reduce
from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import OnlineSettings, PlanMetadata
from fcp_cli.runtime.choices import GradRingDtype, OnNan
from fcp_cli.runtime.connections import agree_on_halo_pattern
from fcp_cli.runtime.cursor import PlanCursor, Prefetched, RankMicroBatches, plan_path
from fcp_cli.runtime.gradients import GradientSync, gradient_sync
from fcp_cli.runtime.guards import Guards, LossWatch
from fcp_cli.runtime.loader import (
    Fetch,
    Shard,
    begin_shard,
    fetches_labels,
    load_steps,
    picture_problems,
    with_planned_masks,
)
from fcp_cli.runtime.metrics import Recorder
from fcp_cli.runtime.metrics_message import METRICS_VARIABLE
from fcp_cli.runtime.online import (
    PlansStreams,
    ProcessControl,
    StreamCursor,
    StreamSource,
    online_settings,
    stream_plan_path,
)
from fcp_cli.runtime.plan_agreement import agree_on_plan
from fcp_cli.runtime.rank_agreement import agree_on_bad_rows, agree_on_first_step
from fcp_cli.runtime.rank_job import RankJob
from fcp_cli.runtime.ring import current_ring, runs_outside
from fcp_cli.runtime.step import Step
from fcp_cli.runtime.transport import ProcessWorld, join_process_group, local_device
from fcp_cli.runtime.visuals import require_ranks_apart

_STEPS_AHEAD = 2
_RESTARTS = "SLURM_RESTART_COUNT"  # set by Slurm when a job is requeued

# A cursor, the loader of its micro-batches, and whether the data has labels.
_Followed: TypeAlias = tuple[PlanCursor | StreamCursor, Prefetched[RankMicroBatches[Shard]], bool]


class PlanSource:
    """Steps of a plan file, for a session; has the interface of `StreamSource`."""

    is_planned = True
    looks_ahead = True

    def fetch_by(self, given: Fetch | None) -> Fetch | None:
        return given

    def connect(self, job: RankJob) -> None:
        job.connect()

    def report_to(self, recorder: Recorder) -> None:
        """Change nothing: the recorder reads the trained steps from the plan."""

    def cursor(self, job: RankJob, first_step: int, *, ahead: int) -> PlanCursor:
        return PlanCursor(job.plan, job.rank, first_step=first_step, ahead=ahead)


@dataclass(kw_only=True, eq=False)
class Session(RankJob):
    """One rank of a training job that follows a plan. Create it with `start`; a context manager, or call `close`.

    Attributes:
        fetch: function from a manifest row to its tokens; may be set any time before `steps` is called.
        source: planner of a stream's steps, or None for an existing plan.
        skip_bad_rows: skip rows whose images fail to decode instead of raising; equal on all ranks.
        owns_process_group: whether `close` destroys the process group.
        steps_ahead: number of steps to prefetch.
        has_begun: whether this process has created a session (class attribute).
    """

    has_begun: ClassVar[bool] = False

    fetch: Fetch | None
    source: StreamSource | None = None
    skip_bad_rows: bool = False
    owns_process_group: bool = False
    steps_ahead: int = _STEPS_AHEAD

    def __post_init__(self) -> None:
        super().__post_init__()
        Session.has_begun = True
        self._first_step = 0  # default of `steps`; set by `load_state_dict`
        self._steps_of: PlanSource | StreamSource = self.source or PlanSource()

    def steps(
        self,
        model: nn.Module | GradientSync | None = None,
        *,
        first_step: int | None = None,
        reduce: Reduce | None = None,
        on_nan: OnNan = "stop",
        mean_over: Literal["tokens", "rows"] = "tokens",
    ) -> Generator[Step, None, None]:
        """Yield the plan's steps from `first_step` on. Iterate each to its end before requesting the next.

        Every rank calls it.

        Args:
            model: the model whose gradients are reduced over ranks: a plain module (it starts from rank 0's weights),
                in DistributedDataParallel, or sharded with `fully_shard`. Pass `GradientSync()` if the script reduces
                them itself; training without either raises. Plans of forward passes reduce nothing and run without
                gradients.
            first_step: optimizer step to start at; default: the step given by `load_state_dict`, else 0.
            reduce: for FSDP2 that reshards after forward: reduce gradients in every `wave`, so that a rank only holds
                its shard of them, or once a `step`, which sends less. Default: the plan's recipe, else `wave`.
            on_nan: reaction to a NaN or infinite loss on any rank: `stop` the job; `skip-step`: clear the gradients of
                all ranks, so that optimizers change nothing (costs one device synchronization a step); or `go-on`.
            mean_over: loss denominator: tokens with labels, or rows of the manifest.

        Raises:
            RunError: no `fetch`, a model that cannot follow the plan, a step beyond the plan, or ranks that start at
                different steps. While iterating: a loop that breaks the contract, or data that does not match the plan
                or differs between ranks.
        """
        fetch = self._steps_of.fetch_by(self.fetch)
        if fetch is None:
            raise RunError("no data: pass fetch=..., a function from manifest row to tokens")
        fetch = with_planned_masks(fetch, self.metadata)
        first_step = self._first_step if first_step is None else first_step
        agree_on_first_step(self.world, first_step)
        self.connections.halo_pattern = agree_on_halo_pattern(self.world)
        if self.connections.halo_pattern != "no":
            self._steps_of.connect(self)
        _warn_if_begun_again(first_step, self.metadata.first_step, self.rank)
        planned = self.metadata.recipe
        reduce = reduce or (planned.reduce if planned is not None else "wave")
        sync = gradient_sync(model, self.world, self.metadata.sync, reduce, self.metadata.phase)
        require_ranks_apart(sync, self.metadata.encoder_ranks)
        guards = Guards(self.world, sync, model=model, on_nan=on_nan, losses=LossWatch(self.clock))
        begin = cache(partial(self._begin, first_step, fetch))
        if self._steps_of.is_planned:
            begin()  # loads ahead of the loop, and raises here
        if self.recorder is not None:
            self._steps_of.report_to(self.recorder)
            self.recorder.open(first_step)
        return self._follow(begin, guards, mean_over, model)

    def _begin(self, first_step: int, fetch: Fetch) -> _Followed:
        """Open the steps and start to load them."""
        cursor = self._steps_of.cursor(self, first_step, ahead=self.steps_ahead)
        labelled = fetches_labels(cursor.first(), fetch)
        begin = partial(begin_shard, fetch=fetch, rank=self.rank, labelled=labelled, encoders=self.encoders)
        loaded = load_steps(cursor, begin, device=self.device, looks_ahead=self._steps_of.looks_ahead)
        return cursor, Prefetched(loaded, depth=self.steps_ahead, name="fcp-loader"), labelled

    def _follow(
        self,
        begin: Callable[[], _Followed],
        guards: Guards,
        mean_over: Literal["tokens", "rows"],
        model: nn.Module | GradientSync | None,
    ) -> Generator[Step, None, None]:
        requested, is_first = self.clock.mark(), True
        cursor, loaded, labelled = begin()
        try:
            for own in cursor.taken(loaded):
                step = self._step(own, guards, mean_over, labelled=labelled)
                if self.recorder is not None:
                    step.record = self.recorder.begin(step.index, step.predicted_seconds, requested)
                yield step
                if is_first and self.rank == 0 and isinstance(model, nn.Module):
                    _warn_of_dropout(model)  # only now: loops may call model.train() inside the first step
                is_first = False
                if self.recorder is not None:
                    self.recorder.end()
                requested = self.clock.mark()
                step.require_finished()
        finally:
            cursor.close()
            loaded.close()
            if self.recorder is not None:
                self.recorder.end()
                self.recorder.flush()

    def _step(
        self,
        own: RankMicroBatches[Shard],
        guards: Guards,
        mean_over: Literal["tokens", "rows"],
        *,
        labelled: bool,
    ) -> Step:
        """Return a step with its loss denominator, without the rows whose images failed to decode on any rank."""
        bad = self._bad_rows(picture_problems(own.shards))
        if bad:
            own = replace(own, shards=tuple(shard.without(bad) for shard in own.shards))
        tokens: int | Tensor = own.loss_tokens
        if mean_over == "rows":
            tokens = own.sequences - len(bad)
        # Also with bad rows: the plan's token count includes those that are skipped.
        elif labelled or bad:
            labelled_tokens = sum(shard.labelled_tokens for shard in own.shards)
            # A fill and a sum on the device: to copy a number from the host would wait for all queued work.
            tokens = torch.full((), labelled_tokens, dtype=torch.int64, device=self.device)
            self.world.all_reduce_sum(tokens)
        return Step(self, guards, own, tokens, bad)

    def state_dict(self) -> dict[str, Any]:
        """Return the index of the next step to train, for a checkpoint of any framework."""
        return {"next_step": self.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make `steps` resume after the last step of a checkpoint.

        Raises:
            RunError: the state was not saved by `state_dict` of a session.
        """
        if not isinstance(state.get("next_step"), int):
            raise RunError(
                "the checkpoint's state of the session has no next_step, but "
                f"{', '.join(map(str, state)) or 'nothing'}; save the result of session.state_dict()"
            )
        self._first_step = self.next_step = state["next_step"]

    def outside(self) -> AbstractContextManager[None]:
        """Return `outside()`: a context manager to run models outside the plan, e.g. for evaluation or generation."""
        return outside()

    def _bad_rows(self, problems: Mapping[int, str]) -> tuple[int, ...]:
        """Return the manifest rows whose images failed to decode on any rank; the same on all ranks.

        Raise RunError for the first of this rank's unless bad rows are skipped.
        """
        if self.skip_bad_rows:
            return agree_on_bad_rows(self.world, self.device, tuple(problems))
        for problem in problems.values():
            raise RunError(f"{problem}; to train on without such rows: --bad-rows skip, or start(skip_bad_rows=True)")
        return ()

    def close(self) -> None:
        """Leave the job; destroy the process group if `start` created it."""
        if self.recorder is not None:
            self.recorder.close()
        if self.watch is not None:
            self.watch.stop()
        if self.owns_process_group and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _warn_of_dropout(model: nn.Module) -> None:
    """Warn if a model drops activations: with other random numbers than one process, whose losses then differ."""
    rates = {
        f"{path}.{name}".strip("."): rate
        for path, module in model.named_modules()
        if module.training
        for name, rate in vars(module).items()
        if isinstance(rate, float) and rate > 0
        if "dropout" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
    }
    for place, rate in islice(rates.items(), 1):
        print(
            f"fcp: warning: the model trains with dropout ({place} is {rate:g}; {len(rates)} in all), whose random "
            "numbers are not those of one process: losses differ from its losses; set it to 0 to compare them",
            file=sys.stderr,
            flush=True,
        )


def _warn_if_begun_again(first_step: int, begins_with: int, rank: int) -> None:
    """Warn on rank 0 if Slurm requeued this job but the script has loaded no checkpoint."""
    restarts = os.environ.get(_RESTARTS, "")
    if rank == 0 and restarts.isdecimal() and int(restarts) and first_step == begins_with:
        print(
            f"fcp: Slurm has started this job before ({_RESTARTS} {restarts}), and it begins with step {first_step} "
            "again; a script that resumes loads its checkpoint first, with session.load_state_dict",
            file=sys.stderr,
            flush=True,
        )


# Run a training loop under a plan, which decides a rank's micro-batches, their rings and when gradients are reduced.
#
# session = fcp_cli.runtime.start("plan.parquet", fetch)
# for step in session.steps(model):
#     for microbatch in step:
#         logits = model(microbatch.input_ids, microbatch.position_ids)
#         microbatch.loss(logits).backward()
#     optimizer.step()
#     optimizer.zero_grad()


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
        if online.options.refit_every is not None:  # refits need measured steps
            metrics = metrics or os.environ.get(METRICS_VARIABLE) or path.with_name(f"{path.stem}.metrics.jsonl")
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
    session._steps_of.connect(session)
    if device.type == "cuda":
        from fcp_cli.runtime.kernel_agreement import compile_ring_operators

        compile_ring_operators(metadata, device, session.grad_ring_dtype)
    if session.watch is not None:
        session.watch.start()
    return session


def _agree_on_kernels(world: ProcessWorld, device: torch.device, metadata: PlanMetadata) -> None:
    """Choose the attention kernels of CUDA devices. Other devices have a single kernel."""
    if device.type == "cuda":
        from fcp_cli.runtime.kernel_agreement import prefer_agreed_kernels

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


# Run a model outside the plan, between steps or inside one: evaluation, generation, a second model.
#
#     with fcp.outside():
#         with torch.no_grad():
#             validation_loss = evaluate(model)
#
# Inside the block no micro-batch is current: `attention` attends over the whole batch it is given, and a model that
# an integration prepared uses its original attention, masks and cache.

_switches: WeakKeyDictionary[Any, Callable[[Any], AbstractContextManager[None]]] = WeakKeyDictionary()


def switch_outside(model: Any, switch: Callable[[Any], AbstractContextManager[None]]) -> None:
    """Register a context manager `switch(model)` that `outside` enters; dropped when the model is freed."""
    _switches[model] = switch


@contextmanager
def outside() -> Iterator[None]:
    """Leave the plan for a `with` block, on one rank or on all.

    FSDP2 gathers weights in every forward, so with a sharded model all ranks must run the same number of forwards.
    """
    ring, was_outside = current_ring.get(), runs_outside.get()
    with ExitStack() as stack:
        if not was_outside:
            # Iterate over a copy: a model freed meanwhile removes itself from the dictionary.
            for model, switch in list(_switches.items()):
                stack.enter_context(switch(model))
        current_ring.set(None)
        runs_outside.set(True)
        try:
            yield
        finally:
            current_ring.set(ring)
            runs_outside.set(was_outside)
