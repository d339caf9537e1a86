"""Evaluates a model during training: losses of held-out rows under a separate plan, forward only.

Leaves the training state unchanged: no gradients, random numbers or weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcp_cli.cost.recipe import Recipe, check_recipe
from fcp_cli.errors import RunError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import PlanMetadata
from fcp_cli.runs.metrics import evaluation_record
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.runtime import Fetch, LocalMicroBatch, Session
from fcp_cli.runtime.choices import IGNORED
from fcp_cli.runtime.connections import planned_hops
from fcp_cli.runtime.gradients import GradientSync, gradient_sync
from fcp_cli.runtime.loss import Labels, head_loss_sum, token_loss_sum
from fcp_cli.runtime.plan_agreement import agree_on_plan
from fcp_cli.training.settings import TrainSettings

_BUCKETS = 48  # bucket b holds sequences of more than 2^(b-1) and up to 2^b tokens


def open_held_out(settings: TrainSettings, session: Session, open_fetch: Callable[[TrainSettings], Fetch]) -> Session:
    """Open the held-out rows under their plan, which is made here if not given. Collective.

    Args:
        settings: settings of the run, with an evaluation manifest.
        session: training session.
        open_fetch: opens the data named by settings.
    """
    assert settings.eval_manifest is not None
    plan = settings.eval_plan or _planned(settings, session)
    metadata = agree_on_plan(session.world, plan, session.device)
    found = read_manifest(settings.eval_manifest, length_column=settings.length_column)
    if found.content_hash() != metadata.manifest.content_hash:
        raise RunError(
            f"{plan} was not made from {settings.eval_manifest}; plan again with 'fcp plan {settings.eval_manifest} "
            f"--ranks {session.metadata.num_ranks}', or drop --eval-plan"
        )
    check_recipe(
        settings.recipe(session.metadata.recipe, sync=metadata.sync, device=session.device.type), sync=metadata.sync
    )
    fetch = open_fetch(replace(settings, plan=plan, manifest=(settings.eval_manifest,)))
    return held_out_session(plan, metadata, session, fetch)


def held_out_session(plan: Path, metadata: PlanMetadata, session: Session, fetch: Fetch) -> Session:
    """Return a second session for evaluation on the training processes. Collective."""
    session.connections.open_all(planned_hops(plan))
    return Session(
        plan=plan,
        metadata=metadata,
        fetch=fetch,
        world=session.world,
        transport=session.transport,
        device=session.device,
        skip_bad_rows=session.skip_bad_rows,
    )


def _planned(settings: TrainSettings, session: Session) -> Path:
    """Plan a pass over the held-out rows, in order, for the ranks and budget of the training."""
    plan = RunPaths(run_dir=settings.run_dir).evaluation_plan
    if session.rank == 0:
        _make_plan(plan, settings, session.metadata)
    dist.barrier()
    return plan


def _make_plan(path: Path, settings: TrainSettings, metadata: PlanMetadata) -> None:
    from fcp_cli.planning.batches import BatchSettings
    from fcp_cli.planning.make_plan import make_plan
    from fcp_cli.planning.problem import problem_of
    from fcp_cli.planning.settings import PlanInputs

    assert settings.eval_manifest is not None
    table = read_manifest(settings.eval_manifest, length_column=settings.length_column)
    if path.is_file() and PlanReader(path).metadata.manifest.content_hash == table.content_hash():
        return  # from the resumed run
    if not metadata.cost_profile.strip():
        raise UsageError(
            f"{settings.plan} has no cost profile to plan {settings.eval_manifest} with; give its plan by --eval-plan"
        )
    batches = BatchSettings(global_batch_size=min(metadata.global_batch_size, len(table)), shuffle=False)
    problem = problem_of(metadata, name=str(settings.plan))
    path.parent.mkdir(parents=True, exist_ok=True)
    make_plan(path, PlanInputs(table=table, problem=problem, settings=batches), workers=1)


def evaluate(
    held_out: Session,
    model: nn.Module,
    followed: nn.Module | GradientSync,
    recipe: Recipe,
    *,
    step: int,
    precision: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Any]:
    """Return the `eval` record with the mean loss over trained tokens of all held-out rows. Collective.

    Args:
        held_out: session of the held-out rows.
        model: the trained model.
        followed: module or gradient sync of its weights, as in `Session.steps`.
        recipe: training recipe.
        step: the optimizer step after which it runs.
        precision: returns the forward context.
    """
    begin = time.perf_counter()
    sums = torch.zeros(2, _BUCKETS, dtype=torch.float64)  # summed losses, and numbers of tokens with a loss
    sync = _ForwardOnly(gradient_sync(followed, held_out.world, held_out.metadata.sync, recipe.reduce))
    with _evaluating(model), torch.no_grad():
        for one in held_out.steps(sync):
            for microbatch in one:
                with precision():
                    _add_losses(sums, microbatch, model, is_chunked=recipe.loss == "chunked")
    dist.all_reduce(sums)
    losses, tokens = sums.tolist()
    buckets = [(1 << k, int(tokens[k]), losses[k]) for k in range(_BUCKETS) if tokens[k]]
    return evaluation_record(step, seconds=time.perf_counter() - begin, buckets=buckets)


class _ForwardOnly(GradientSync):
    """Wraps a gradient sync: prepares weights for forward, without gradient reduction."""

    def __init__(self, inner: GradientSync) -> None:
        self._inner = inner

    def begin(self) -> None:
        self._inner.begin()

    def before_microbatch(self, *, is_last: bool) -> None:
        self._inner.before_microbatch(is_last=False)

    def restore(self) -> None:
        self._inner.restore()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FSDPModule

    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _forget_forward(module)


def _forget_forward(module: Any) -> None:
    """Free gathered weights, and clear FSDP2's forward order, from which the next backward would prefetch."""
    module.reshard()
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()


def _add_losses(sums: Tensor, microbatch: LocalMicroBatch, model: Any, *, is_chunked: bool) -> None:
    """Run a micro-batch forward, and add this rank's losses and tokens to the buckets of their sequence lengths."""
    rows = _labelled_rows(microbatch)
    inputs = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
    found: dict[int, Tensor] = {}
    if is_chunked:
        # Give the head no rows: the hook computes a loss per length bucket from the same hidden states.
        nothing = torch.zeros(0, dtype=torch.int64, device=microbatch.labels.device)
        microbatch.ring.context.labels = Labels(values=microbatch.labels, rows=nothing)

        def add(head: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
            for bucket, own in rows.items():
                found[bucket] = head_loss_sum(args[0], head, Labels(values=microbatch.labels, rows=own))

        handle = model.get_output_embeddings().register_forward_hook(add)
        try:
            model(**inputs, labels=microbatch.labels)
        finally:
            handle.remove()
    else:
        logits = model(**inputs).logits
        for bucket, own in rows.items():
            found[bucket] = token_loss_sum(logits.index_select(1, own), microbatch.labels.index_select(1, own))
    for bucket, loss in found.items():
        sums[0, bucket] += float(loss)
        sums[1, bucket] += len(rows[bucket])


def _labelled_rows(microbatch: LocalMicroBatch) -> dict[int, Tensor]:
    """Return this rank's labelled tokens by sequence length bucket."""
    layout, labels = microbatch.ring.layout, microbatch.labels
    member = microbatch.ring.index
    if not layout.tokens(member):
        return {}
    lengths = np.array(layout.lengths, dtype=np.int64)
    sequences = np.searchsorted(np.cumsum(lengths), layout.index(member), side="right")
    buckets = np.ceil(np.log2(lengths)).astype(np.int64)[sequences]
    buckets[(labels[0] == IGNORED).cpu().numpy()] = -1
    return {
        int(bucket): torch.from_numpy(np.flatnonzero(buckets == bucket)).to(labels.device)
        for bucket in np.unique(buckets[buckets >= 0])
    }
