"""Follows a plan in a Megatron process: each call of the schedule runs the micro-batches of the plan's next step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import refuse
from fcp_cli.integrations.megatron import checks
from fcp_cli.integrations.megatron.data import (
    LOSS_MASK,
    LocalMicroBatches,
    LocalShard,
    PlannedData,
    PlannedMicroBatch,
    current_microbatch,
    load_shard,
    padding_report,
)
from fcp_cli.integrations.megatron.model import MegatronStack, device_of, recompute_as_needed, unwrapped
from fcp_cli.integrations.megatron.probe import probe
from fcp_cli.integrations.megatron.transformer_engine import PlanProcessGroups, make_rings, wants_rings
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.launcher import end_with_launcher
from fcp_cli.runtime.metrics import ClockMarks
from fcp_cli.runtime.plan_agreement import require_causal, require_training
from fcp_cli.runtime.rank_job import RankJob
from fcp_cli.runtime.ring import MicroBatchContext, Ring
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.runtime.transport import ProcessTransport

_PROBE_VARIABLE = "FCP_PROBE"


class Follower:
    """State of a process that follows a plan. Collective: created in the first training step; `run` runs one step.

    Args:
        plan: plan file.
        arguments: arguments of the schedule's first call.
        stack: stack of the model.
    """

    def __init__(self, plan: Path, arguments: Mapping[str, Any], stack: MegatronStack) -> None:
        end_with_launcher()
        self.stack = stack
        model = arguments["model"]
        self._chunks = list(model) if isinstance(model, list) else [model]  # one per virtual stage
        refuse(checks.sharding_refusals(self._chunks))
        self._config = get_model_config(self._chunks[0])  # the only one that the schedule reads
        models = [unwrapped(chunk) for chunk in self._chunks]
        for model in models:
            self.stack.check(model.config, model)
        self._device = device_of(models)
        self._plan = plan
        self._sharded = checks.is_sharded(self._chunks[0])
        tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
        self.metadata = self._agree_on_plan(tensor_parallel)
        # Processes with the same part of the model, one per rank of the plan.
        self._peers = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._job = RankJob.join(plan, self.metadata, self._device, peers=tuple(self._peers), records=computes_loss())
        self._rank, watch, transport = self._job.rank, self._job.watch, self._job.transport
        assert watch is not None and isinstance(transport, ProcessTransport)  # `join` makes both
        self.watch = watch
        self._multiple = tensor_parallel if self._config.sequence_parallel else 1
        self._balances = checks.balances_experts(self._config)
        self._engine = self._open_rings(models)
        self._even_chunks = self.stack.even_chunks or self._engine is not None
        self._load = partial(
            load_shard,
            rank=self._rank,
            multiple=self._multiple,
            even_chunks=self._even_chunks,
            places_ahead=getattr(self._config, "mtp_num_layers", None) or 0,
        )
        self._layers = [self.stack.hook(model, transport) for model in models]
        if levels := self._job.recompute_levels:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            for chunk, model in zip(self._chunks, models, strict=True):
                recompute_as_needed(chunk, model, levels, self.metadata.pipeline, stage)
        self.watch.start()
        self.measured = ScheduleRecorder(self._job)
        self._models = models
        self._is_announced = False
        self._loop = loop_settings(arguments["forward_step_func"])
        self._stop = StopRequest() if self._loop is None else StopRequest().install()
        self._data = PlannedData(
            plan,
            self.metadata,
            self._load,
            rank=self._rank,
            device=self._device,
            # Transformer Engine's rings follow their process group, whose ranks ascend.
            ascending=self._engine is not None,
        )

    def _agree_on_plan(self, tensor_parallel: int) -> PlanMetadata:
        """Return the plan's metadata, equal on all ranks; raise RunError if this model's schedule cannot run it."""
        pipeline_parallel = parallel_state.get_pipeline_model_parallel_world_size()
        metadata = RankJob.agree(
            self._plan, self._device, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel
        )
        require_training(metadata, self._plan, None if self.stack.recomputes_as_needed else self.stack.name)
        if not self.stack.follows_masks:
            require_causal(metadata, self._plan, self.stack.name)
        refuse(
            checks.interleaving_refusals(
                self._config,
                len(self._chunks),
                metadata.virtual_stages,
                stages=pipeline_parallel,
                is_sharded=self._sharded,
            ),
            checks.wave_refusals(
                pipeline_parallel,
                parallel_state.get_expert_model_parallel_world_size(),
                metadata.sync,
                times_pipelines=metadata.pipeline is not None,
                sharded=self._sharded,
            ),
        )
        if pipeline_parallel > 1:
            self._config.variable_seq_lengths = True  # makes stages exchange shapes
        return metadata

    def _open_rings(self, models: list[Any]) -> PlanProcessGroups | None:
        """Open fcp's peer connections if needed; return Transformer Engine's groups if it computes attention."""
        shares_heads = self.metadata.attention is not None
        engine, is_latent = None, bool(getattr(self._config, "multi_latent_attention", False))
        has_masks = self.metadata.masked_sequences is not None
        if self.stack.engine_rings and wants_rings(
            models, shares_heads=shares_heads, is_latent=is_latent, has_masks=has_masks
        ):
            engine = make_rings(models, self._plan, self._peers, self._device)
        if engine is None or self._balances:
            self._job.connect()
        return engine

    def run(self, schedule: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run the schedule on the plan's next step instead of the script's micro-batches; return its result."""
        # Megatron-FSDP gathers and reduces in every layer; its plans have `sync microbatch`, so ranks stay aligned.
        held = nullcontext() if self._sharded else reduced_after_backwards(self._chunks, self._config)
        if not self._sharded:
            gather_parameters(self._chunks)
        planned = self.planned(arguments)
        with self.stack.around_step(), held:
            reports = schedule(**planned)
        self.watch.end()
        self.measured.leave()
        if self._loop is not None and self._stop.agreed(self._job.world):
            self._loop.exit_interval = 1  # the loop saves, if the script has a --save, and exits after this step
        return self.stack.totals(reports)

    def planned(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the script's schedule arguments, adapted to the next step of the plan."""
        given = arguments["data_iterator"]
        # In an interleaved pipeline: one per chunk, None for chunks with neither the first nor the last layers.
        iterators = given if isinstance(given, list) else [given]
        first = next((each for each in iterators if each is not None), None)
        # With virtual stages, Megatron-Bridge wraps the loader's iterator anew in each step.
        step = self._data.next_step(getattr(first, "iterator", first))
        self._check_batch(step, arguments)
        is_first = not self._is_announced
        if is_first:
            self._announce(step, self._probe(step))
            self._is_announced = True
        self.measured.begin(step)
        last = len(self._chunks) - 1
        batches = [
            _Batches(self, step, chunk, is_last=chunk == last, counts_tokens=is_first) for chunk in range(last + 1)
        ]
        return {
            **arguments,
            "forward_step_func": partial(_planned_forward_step, arguments["forward_step_func"]),
            "data_iterator": batches if isinstance(given, list) else batches[0],
            "num_microbatches": len(step.shards),
            "micro_batch_size": 1,  # a row of the plan is one pack
        }

    def _probe(self, step: LocalMicroBatches) -> str:
        """Run the probe before the first step, if enabled and possible; return its outcome for the log."""
        # Rank 0 decides, since the run directory may no longer look new to nodes that start later.
        wanted = torch.tensor(int(os.environ.get(_PROBE_VARIABLE) != "0"), device=self._device)
        self._job.world.broadcast(wanted)
        if self._sharded:
            return "not probed (no rank holds a layer whole)"
        if not wanted:
            return f"not probed ({_PROBE_VARIABLE}=0)"
        difference = probe(
            self._models,
            step.rows,
            self.enter,
            load=partial(self._load, places_ahead=0),
            rank=self._rank,
            multiple=self._multiple,
            stack=self.stack,
        )
        return f"probe: attention within {difference:.0e}"

    def _announce(self, step: LocalMicroBatches, probed: str) -> None:
        if dist.get_rank() == 0:
            padding = ""
            if self._even_chunks:
                padding = f"; {padding_report(self._plan, self.metadata, tensor_parallel=self._multiple)}"
            print(
                f"fcp: following {self._plan} (plan hash {self.metadata.plan_hash[:12]}) from step {step.step} of "
                f"{self.metadata.steps}, {self.metadata.num_ranks} ranks, sync {self.metadata.sync}; "
                f"{self.stack.name}, {sum(self._layers)} attention layers hooked"
                f"{f' on {self._engine}' if self._engine is not None else ''}{padding}; {probed}",
                file=sys.stderr,
                flush=True,
            )

    def _check_batch(self, step: LocalMicroBatches, arguments: Mapping[str, Any]) -> None:
        """Raise RunError unless the script's global batch equals the plan's; its checkpoints count samples."""
        ranks = parallel_state.get_data_parallel_world_size()
        per_rank, size = arguments["num_microbatches"], arguments["micro_batch_size"]
        if per_rank * size * ranks != step.sequences:
            raise RunError(
                f"step {step.step} of the plan has {step.sequences} sequences, but the script trains on "
                f"{per_rank * size * ranks} ({ranks} ranks x {per_rank} micro-batches of {size}); give it "
                f"--global-batch-size {self.metadata.global_batch_size}, or plan with the script's"
            )

    def enter(self, shard: LocalShard) -> PlannedMicroBatch:
        """Return the micro-batch of a shard: on the device, with its ring, for one forward."""
        row, layout = shard.row, shard.layout
        ranks = tuple(self._peers[rank] for rank in row.ranks)
        tokens = shard.positions.shape[0]
        return PlannedMicroBatch(
            row=row,
            batch=shard.batch,
            ring=Ring(
                layout=layout,
                index=shard.member,
                ranks=ranks,
                transport=self._job.transport,
                grad_dtype=self._job.grad_ring_dtype,
                context=MicroBatchContext(buffers=self._job.buffers),
            ),
            positions=self._on_device(shard.positions),
            is_planned=self._on_device(shard.is_planned),
            longest_tokens=max(layout.lengths, default=1),
            owners=self._on_device(shard.owners) if self._balances else None,
            lengths=shard.lengths,
            ahead=None if shard.ahead is None else shard.ahead.mapped(self._on_device),
            # For Transformer Engine, the padding of an idle rank counts as a sequence.
            packed=None if self._engine is None else self._engine.sequences(ranks, layout.lengths or (tokens,)),
        )

    def _on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def check_forward(self, microbatch: PlannedMicroBatch, chunk: int, *, read: int) -> None:
        """Raise RunError if a chunk's forward did not read its batch, or attention layers skipped the ring."""
        place = f"step {microbatch.row.step}, micro-batch {microbatch.row.order}"
        # Other tensor-parallel processes may get their batch from this one, and middle stages read none.
        is_first = parallel_state.is_pipeline_first_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        if is_first and not chunk and not read:
            raise RunError(f"{place}: the script's forward step never asked its data iterator for the batch")
        if microbatch.ring.attention_calls != self._layers[chunk]:
            raise RunError(
                f"{place}: {microbatch.ring.attention_calls} of {self._layers[chunk]} attention layers ran on the "
                "plan's group; something in the model hides the call's packed_seq_params from them"
            )


def loop_settings(forward_step: Any) -> Any:
    """Return Megatron-Bridge's or Megatron-LM's settings, whose `exit_interval` is read after each step, or None."""
    for bound in getattr(forward_step, "args", ()):
        found = getattr(getattr(bound, "cfg", None), "train", None)
        if hasattr(found, "exit_interval"):
            return found
    global_vars: Any = sys.modules.get("megatron.training.global_vars")
    found = getattr(global_vars, "_GLOBAL_ARGS", None)
    return found if hasattr(found, "exit_interval") else None


def _planned_forward_step(
    forward_step: Callable[..., Any], batches: _Batches, model: Any, *rest: Any
) -> tuple[Any, Any]:
    """Run the script's forward step in the next micro-batch of a chunk, identified by its data iterator."""
    return batches.run(forward_step, model, *rest)


class _Batches:
    """Data iterator of the script in one step, for one model chunk: yields the batch of the running forward.

    A schedule runs each chunk through the micro-batches in order, however it interleaves chunks.

    `counts_tokens` compares the script's token count with its loss mask, which synchronizes with the device.
    """

    def __init__(
        self, follower: Follower, step: LocalMicroBatches, chunk: int, *, is_last: bool, counts_tokens: bool
    ) -> None:
        self._follower = follower
        self._chunk, self._is_last = chunk, is_last
        self._shards: Iterator[LocalShard] = iter(step.shards)
        self._microbatch: PlannedMicroBatch | None = None
        self._read = 0
        self._counts_tokens = counts_tokens

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Mapping[str, Any]:
        if self._microbatch is None or self._read:
            raise RunError(
                "the script asked its data iterator for a batch outside of a forward step, or for a second one; under "
                "a plan each forward step has one batch"
            )
        self._read += 1
        return self._microbatch.batch

    def run(self, forward_step: Callable[..., Any], model: Any, *rest: Any) -> tuple[Any, Any]:
        """Run the script's forward step within the chunk's next micro-batch."""
        microbatch = self._follower.enter(next(self._shards))
        # Its backward runs before the next forward, except in pipelines, which have several in flight.
        self._follower.watch.begin(microbatch.row.step, microbatch.row)
        self._follower.measured.go_on(microbatch.row, is_last_chunk=self._is_last)
        self._microbatch, self._read = microbatch, 0
        token = current_microbatch.set(microbatch)
        try:
            with self._follower.stack.around_script():
                output, loss_function = forward_step(self, model, *rest)
        finally:
            current_microbatch.reset(token)
        self._follower.check_forward(microbatch, self._chunk, read=self._read)
        counted = microbatch if self._counts_tokens else None
        return output, _checked_loss(loss_function, counted, self._follower)


def _checked_loss(
    loss_function: Callable[..., Any] | None, counted: PlannedMicroBatch | None, follower: Follower
) -> Callable[..., Any] | None:
    """Wrap a loss function to raise RunError if its loss would depend on how the plan packs tokens.

    Megatron averages a loss without a token count over micro-batches, which have different numbers of tokens.
    """
    if loss_function is None:
        return None

    def checked(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        with follower.stack.around_script():
            found = loss_function(output, *args, **kwargs)
        if not isinstance(found, tuple) or len(found) != 3:
            raise RunError(
                "the script's loss function returns (loss, report), a mean over its micro-batch; under a plan it must "
                "return (sum of token losses, number of tokens, report), as with --calculate-per-token-loss"
            )
        if counted is not None and LOSS_MASK in counted.batch:
            masked = int(counted.batch[LOSS_MASK].sum())
            if int(found[1]) != masked:
                raise RunError(
                    f"step {counted.row.step}, micro-batch {counted.row.order}: the script's loss function counts "
                    f"{int(found[1])} tokens, but its data iterator's loss mask has {masked}; it must return the sum "
                    "of that mask"
                )
        follower.measured.add_loss(found[0], found[1])
        return found

    return checked


# Communication of Megatron's DDP outside of the forwards and backwards of a planned step, where it could deadlock.
#
# Members of a ring may be at different points of their step: it is the last micro-batch of one and not of another. An
# all-rank reduction or gather between two hops of the ring would wait for a rank that itself waits for the next hop.
# So parameters are gathered before the step's first forward, and gradients reduced after the last backward,
# regardless of `overlap_grad_reduce` and `overlap_param_gather`.

_HELD = ("no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func")


def gather_parameters(chunks: Iterable[Any]) -> None:
    """Run all parameter gathers that Megatron would overlap with the forwards of the next step. Collective.

    There are none in the first step, in which Megatron disables its own hooks.
    """
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and config.overlap_param_gather and chunk.remove_forward_pre_hook_handles:
            _gather(_bucket_groups(chunk))


def _gather(groups: Sequence[Any]) -> None:
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


@contextmanager
def reduced_after_backwards(chunks: Sequence[Any], config: Any) -> Iterator[None]:
    """Defer the gradient reductions of a schedule run in this context until it finalizes gradients.

    Otherwise, `overlap_grad_reduce` would start them inside backwards.

    Args:
        chunks: model chunks, as passed to the schedule.
        config: configuration of the first chunk, which holds the schedule's reduction functions; restored on exit.
    """
    overlapping = [
        chunk for chunk in chunks if getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False)
    ]
    if not overlapping:
        yield
        return
    given = {name: getattr(config, name) for name in _HELD}
    finalize = given["finalize_model_grads_func"]
    held = ExitStack()
    for chunk in overlapping:
        held.enter_context(chunk.no_sync())

    def reduce() -> None:
        held.close()
        for chunk in overlapping:
            # In the first batch, newer versions start the reduction themselves when they finish it.
            if not any(getattr(group, "is_first_batch", False) for group in _bucket_groups(chunk)):
                chunk.start_grad_sync()

    def reduce_and_finalize(*args: Any, **kwargs: Any) -> Any:
        reduce()
        return finalize(*args, **kwargs)

    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    config.finalize_model_grads_func = None if finalize is None else reduce_and_finalize
    try:
        yield
        if finalize is None:  # the script finalizes after the schedule
            reduce()
    finally:
        held.close()
        for name, function in given.items():
            setattr(config, name, function)


def _bucket_groups(chunk: Any) -> list[Any]:
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


# Metrics of a Megatron job: micro-batch times, from one forward to the next, and the script's loss sums.
#
# With several model chunks, forwards of the last one delimit micro-batches, so that they do not overlap; work of
# other chunks in between counts for the previous micro-batch.


def computes_loss() -> bool:
    """Return whether this process computes its rank's loss: last stage, first tensor-parallel rank."""
    is_last_stage: bool = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    return is_last_stage and not parallel_state.get_tensor_model_parallel_rank()


class ScheduleRecorder:
    """Records the steps of one process; a no-op unless it computes its rank's loss.

    Args:
        job: job of this process, joined with `records=computes_loss()`.
    """

    def __init__(self, job: RankJob) -> None:
        self._recorder, self._clock = job.recorder, job.clock
        self._is_open = False
        self._record: ClockMarks | None = None
        self._running: tuple[int, Any] | None = None  # order and begin
        self._first: Any = None  # mark of the step's first forward
        self._sums: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def begin(self, step: LocalMicroBatches) -> None:
        """Begin a step, which also ends the previous one, including its optimizer step."""
        if self._recorder is None:
            return
        if not self._is_open:
            self._recorder.open(step.step)
            self._is_open = True
        self._record = self._recorder.begin(step.step, step.makespan_seconds)
        self._sums, self._tokens = [], []
        self._first = None

    def go_on(self, row: MicroBatch, *, is_last_chunk: bool) -> None:
        """Mark the start of a micro-batch's forward, which ends the previous micro-batch."""
        if self._recorder is None or self._record is None:
            return
        now = self._clock.mark()
        self._first = now if self._first is None else self._first
        if not is_last_chunk:
            return
        self._close(now)
        self._recorder.enter()
        # The first micro-batch of a step starts with the step's first forward, of any chunk.
        self._running = (row.order, now if self._record.microbatches else self._first)

    def add_loss(self, loss_sum: Any, tokens: Any) -> None:
        """Record a micro-batch's loss sum and number of tokens, as returned by the script's loss function."""
        if self._record is not None:
            self._sums.append(torch.as_tensor(loss_sum).detach().reshape(()))
            self._tokens.append(torch.as_tensor(tokens).detach().reshape(()))

    def leave(self) -> None:
        """Mark the end of all micro-batches, with complete gradients."""
        if self._record is None:
            return
        self._close(self._clock.mark())
        self._record.note_loss(self._sums, torch.stack(self._tokens).sum() if self._tokens else 0)
        self._record.is_whole = True

    def _close(self, now: Any) -> None:
        if self._running is not None and self._record is not None:
            order, begin = self._running
            self._record.microbatches.append((order, begin, now))
            self._running = None
