"""Hooks MindSpeed-MM's FSDP2 engine to follow the plan: prepares the model before sharding, and replaces its step.

Clipping, the optimizer step, the schedule, logs and checkpoints remain the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Refusals, refuse, require
from fcp_cli.plan.metadata import PlanMetadata

_FOUND, _ADVICE = "this MindSpeed-MM", "version known to work: master of 2026-08"
_OWN_GROUPS = "the plan makes the groups: set it to 1"
_STEPS = "_fcp_steps"


def hook_sharding(torch_parallelize: ModuleType) -> None:
    """Hook `mindspeed_mm.fsdp.distributed.torch_parallelize`, through which every model is sharded."""
    require(torch_parallelize, {"ParallelApplier.__call__": ("model",)}, found=_FOUND, advice=_ADVICE)
    kind: Any = torch_parallelize.ParallelApplier
    shard = kind.__call__

    @wraps(shard)
    def __call__(self: Any, model: Any) -> Any:
        _prepare(model)
        return shard(self, model)

    kind.__call__ = __call__


def hook_engine(train_engine: ModuleType) -> None:
    """Hook `mindspeed_mm.fsdp.train.train_engine`; a subclass that overrides the step keeps its own."""
    wanted = {"TrainEngine.train_step": ("self", "train_dataloader_iter"), "TrainEngine.evaluate": ("self",)}
    require(train_engine, wanted, found=_FOUND, advice=_ADVICE)
    kind: Any = train_engine.TrainEngine
    run_step, evaluate = kind.train_step, kind.evaluate

    @wraps(run_step)
    def train_step(self: Any, train_dataloader_iter: Any) -> dict[str, float]:
        if _STEPS not in vars(self):
            setattr(self, _STEPS, _planned_steps(self))
        return _run(self, getattr(self, _STEPS))

    kind.train_step = train_step
    kind.evaluate = _outside(evaluate)


def _outside(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def evaluate_outside(self: Any) -> Any:
        from fcp_cli.runtime.session import outside

        with outside():
            return evaluate(self)

    return evaluate_outside


def _prepare(model: Any) -> None:
    """Prepare the model for ring attention, unless the script has, and give it a loss head."""
    from fcp_cli.integrations.transformers.loss import put_loss_head
    from fcp_cli.integrations.transformers.preparation import NAME, base_model, prepare

    base: Any = base_model(model)
    if base.config.get_text_config()._attn_implementation != NAME:
        prepare(base)
    if put_loss_head(base) is None:
        head = type(base.get_output_embeddings()).__name__
        raise RunError(
            f"the model's head is a {head}, not a linear layer, of which the plan's loss is made (it never keeps all "
            "logits); drop features.enable_chunk_loss"
        )


def _planned_steps(engine: Any) -> Any:
    """Return the plan's steps for an engine, starting at its checkpoint's step."""
    from fcp_cli.integrations.hugging_face.checks import check_global_batch
    from fcp_cli.integrations.hugging_face.data import PlanSampler
    from fcp_cli.integrations.transformers.preparation import base_model
    from fcp_cli.runtime.cursor import plan_path
    from fcp_cli.runtime.plan_agreement import require_training
    from fcp_cli.runtime.session import start

    refuse(_refusals(engine.args))
    session = start(plan_path(None), device=next(engine.model.parameters()).device)
    require_training(session.metadata, session.plan, "MindSpeed-MM")
    check_global_batch(session.metadata, engine.args.training.global_batch_size, "training.global_batch_size")
    config = base_model(engine.model).config
    loader = engine.train_dataloader
    loader = getattr(loader, "base_dataloader", loader)  # unwrap the loader that counts tokens
    rows = _rows(loader, session.plan, session.metadata, config)
    session.fetch = rows.ahead(PlanSampler(session, first_step=engine.iteration))
    return session.steps(engine.model, first_step=engine.iteration)


def _refusals(args: Any) -> Refusals:
    parallel = args.parallel
    settings = (
        (parallel.ring_attention_size != 1, "parallel.ring_attention_size above 1", _OWN_GROUPS),
        (parallel.ulysses_parallel_size != 1, "parallel.ulysses_parallel_size above 1", _OWN_GROUPS),
        (parallel.expert_parallel_size != 1, "expert parallelism", "set parallel.expert_parallel_size to 1"),
        (
            args.features.loss_cfg.router_aux_loss_coef > 0,
            "router loss",
            "it is made of one rank's tokens: set features.loss_cfg.router_aux_loss_coef to 0",
        ),
    )
    for is_refused, name, instead in settings:
        yield is_refused, f"MindSpeed-MM's {name} cannot follow a plan; {instead}"


def _run(engine: Any, steps: Any) -> dict[str, float]:
    """Run the forward and backward passes of the plan's next step; return the engine's metrics to log."""
    step = next(steps, None)
    if step is None:
        raise RunError(
            f"the plan ends after {engine.iteration} steps, but training.train_iters is "
            f"{engine.args.training.train_iters}; plan more with --epochs"
        )
    for microbatch in step:
        inputs = {"input_ids": microbatch.input_ids, "position_ids": microbatch.position_ids}
        output = engine.model(**inputs, labels=microbatch.labels, use_cache=False)
        if getattr(output, "mtp_loss", None) is not None:
            raise RunError("multi-token prediction (MTP) shifts tokens from rank to rank and cannot follow a plan")
        torch.autograd.backward(microbatch.normalised(output.loss))
    return {"loss": step.reduced_loss()}


def _rows(loader: Any, plan: Path, metadata: PlanMetadata, config: Any) -> Any:
    """Return the rows of the engine's loader, dropping collated position_ids, which the plan replaces."""
    from fcp_cli.integrations.hugging_face.data import CollatedRows

    class EngineRows(CollatedRows):
        def read(self, batch: Mapping[str, Any], row: int) -> Any:
            return super().read({name: value for name, value in batch.items() if name != "position_ids"}, row)

    return EngineRows(loader, plan, metadata, config=config)
