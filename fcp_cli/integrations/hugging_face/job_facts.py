"""Inputs of a plan from a training loop (batch sizes, epochs, recipe, model), and the loop's session with its plan."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from fcp_cli.cost.recipe import Lora
from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.checks import own_batches_of, rows_per_pass
from fcp_cli.integrations.hugging_face.data import CollatedRows
from fcp_cli.integrations.hugging_face.packing import replaced_packing
from fcp_cli.integrations.hugging_face.row_sizes import LoadedLengths, config_text
from fcp_cli.plan.metadata import JobFacts, LastBatch, is_launched_without_plan, steps_per_epoch
from fcp_cli.runtime.online import ProcessControl
from fcp_cli.runtime.online_job import job_source
from fcp_cli.runtime.session import Session, start
from fcp_cli.runtime.transport import join_process_group
from fcp_cli.util.inputs import decode_json

_ENCODERS: Final = frozenset({"visual", "vision_tower"})


ZeroStage: TypeAlias = Literal["0", "1", "2", "3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Settings of a training loop that its plan must preserve.

    Attributes:
        loop: class of the loop, for messages.
        rows_per_pass: rows per batch of a rank.
        accumulates: gradient accumulation steps.
        epochs: number of epochs, possibly fractional; None if unknown.
        max_steps: maximum number of optimizer steps; None: no limit.
        drops_last: whether the last, partial batch of an epoch is dropped.
        shuffle, seed: order of the rows.
        zero: ZeRO stage equivalent to the loop's wrapper.
        is_mixed: whether fp32 weights are computed in 16 bits (mixed precision).
        recomputes: whether activations are recomputed in the backward pass.
        groups_by_length: see `JobFacts`.
    """

    loop: str
    rows_per_pass: int
    accumulates: int
    epochs: float | None = None
    max_steps: int | None = None
    drops_last: bool
    shuffle: bool
    seed: int
    zero: ZeroStage = "0"
    is_mixed: bool
    recomputes: bool
    groups_by_length: bool = False


def facts_of(settings: LoopSettings, loader: Any, model: Any, device: torch.device) -> JobFacts:
    """Return the facts about a loop in an initialized process group."""
    rows, world = len(loader.dataset), dist.get_world_size()
    batch = settings.rows_per_pass * settings.accumulates * world
    last: LastBatch = "drop" if settings.drops_last else "keep"
    per_epoch = steps_per_epoch(rows, batch, last)
    if not per_epoch:
        raise RunError(
            f"the training data has {rows} rows, fewer than a step of {batch} (the loader drops the last, partial "
            "batch); use smaller batches or fewer ranks"
        )
    limits = (None if settings.epochs is None else math.ceil(settings.epochs * per_epoch), settings.max_steps)
    wanted = min((one for one in limits if one is not None), default=None)
    packing = replaced_packing()
    joins = _concatenates(loader) if packing is None else packing.joins
    return JobFacts(
        loop=settings.loop,
        device=device.type,  # type: ignore[arg-type]  # a supported device type
        ranks=world,
        ranks_per_node=min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))),
        rows_per_pass=settings.rows_per_pass,
        global_batch_size=batch,
        epochs=None if wanted is None else math.ceil(wanted / per_epoch),
        steps=wanted if wanted is not None and wanted % per_epoch else None,
        seed=settings.seed,
        shuffle=settings.shuffle,
        last_batch=last,
        sync="microbatch" if settings.zero == "3" else "iteration",
        recipe=_recipe(settings, model),
        config=_config(model),
        packs_to=None if packing is None else packing.tokens,
        groups_by_length=settings.groups_by_length,
        concatenates=joins,
        masks_all_pairs=joins and model.config.get_text_config()._attn_implementation in ("sdpa", "eager"),
    )


def _concatenates(loader: Any) -> bool:
    """Return whether a loader's collator joins two rows to one, without padding."""
    with torch.random.fork_rng(devices=[]), suppress(Exception):  # a collator's errors are reported by its reader
        found = loader.collate_fn([loader.dataset[row] for row in range(2)])["input_ids"]
        return len(found) == 1
    return False


def trainer_settings(trainer: Any, kind: str, *, in_order: bool) -> LoopSettings:
    """Return the settings of a `transformers.Trainer` that is about to train, maybe on rows in the data's order."""
    args, has_limit = trainer.args, trainer.args.max_steps > 0
    return LoopSettings(
        loop=kind,
        rows_per_pass=rows_per_pass(trainer),
        accumulates=args.gradient_accumulation_steps,
        epochs=None if has_limit else args.num_train_epochs,
        max_steps=args.max_steps if has_limit else None,
        drops_last=args.dataloader_drop_last,
        shuffle=not in_order,
        seed=args.seed if args.data_seed is None else args.data_seed,
        zero=fsdp_stage(trainer.accelerator),
        is_mixed=args.bf16 or args.fp16,
        recomputes=args.gradient_checkpointing,
        groups_by_length=args.train_sampling_strategy == "group_by_length",
    )


def is_shuffled(loader: Any) -> bool:
    """Return whether a loop's loader visits rows at random instead of in order; raise RunError if neither."""
    if not hasattr(loader.dataset, "__len__"):
        return True  # a stream, rejected elsewhere with its own message
    batches = own_batches_of(loader)
    sampler: Any = getattr(batches, "sampler", None)
    if type(sampler) is DistributedSampler:  # Lightning's subclass wraps a sampler of another kind
        return bool(sampler.shuffle)
    if isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement):
        return isinstance(sampler, RandomSampler)
    raise RunError(
        f"the loader of the training data draws its rows by {type(batches if sampler is None else sampler).__name__}, "
        "but under a plan every row is visited once an epoch, at random or in order; use shuffle=True, or shuffle=False"
    )


def recomputes(model: Any) -> bool:
    """Return whether a transformers model recomputes its activations in the backward pass."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")  # the second: transformers before 5.20
    return next((bool(getattr(model, name)) for name in names if hasattr(model, name)), False)


def fsdp_stage(accelerator: Any) -> Literal["0", "2", "3"]:
    """Return the ZeRO stage equivalent to an accelerator's FSDP: 3 if it reshards after forward; 0 for DDP."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return "0"
    return "3" if plugin.reshard_after_forward else "2"


def _recipe(settings: LoopSettings, model: Any) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    precision = "bf16" if dtype in (torch.bfloat16, torch.float16) else "fp64" if dtype == torch.float64 else "fp32"
    if precision == "fp32" and settings.is_mixed:
        precision = "amp"
    recipe = {"zero": settings.zero, "precision": precision, "recompute": "full" if settings.recomputes else "none"}
    adapters = getattr(model, "peft_config", None) or {}
    texts = [text for adapter in adapters.values() if (text := _lora(adapter))]
    found: dict[str, Any] = recipe | ({"lora": texts[0]} if texts else {})
    return found | ({"freeze_vision": True} if _freezes_vision(model) and not texts else {})


def _lora(adapter: Any) -> str | None:
    """Return an adapter in the format of `fcp plan --lora`; None if the plan should assume full fine-tuning."""
    targets = adapter.target_modules
    if getattr(adapter, "r", None) is None or isinstance(targets, str) or not targets:
        return None
    names = tuple(sorted({name.rsplit(".", 1)[-1] for name in targets}))
    return str(Lora(rank=int(adapter.r), alpha=float(adapter.lora_alpha), targets=names))


def _config(model: Any) -> dict[str, Any]:
    """Return a model's config.json, including its name."""
    config = model.config
    name = Path(str(config.name_or_path or config.model_type)).name
    return {**decode_json(config_text(config)), "_name_or_path": name}


def _freezes_vision(model: Any) -> bool:
    """Return whether most weights of the vision encoder, if any, are frozen."""
    tower = [one for name, one in model.named_parameters() if _ENCODERS & set(name.split("."))]
    trained = sum(one.numel() for one in tower if one.requires_grad)
    return bool(trained < sum(one.numel() for one in tower) / 2)


def start_session(
    loader: Any,
    facts: Callable[[], JobFacts],
    *,
    device: torch.device,
    pairs: bool = False,
    plan: Path | None = None,
    config: Any = None,
) -> Session:
    """Start a loop's session with the job's plan, or with a plan made while it trains. Collective over all ranks.

    Args:
        loader: the script's own training loader.
        facts: returns the facts about the loop; called only if the job has no plan.
        device: device of this rank.
        pairs: whether a row is a preference pair.
        plan: plan file; defaults to FCP_PLAN.
        config: model config, if the collator may return images and videos; None: it returns none.
    """
    data = loader.dataset
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise RunError(
            f"the training data ({type(data).__name__}) is read in one go; a plan needs its rows by number: "
            "use a data set with random access (datasets.Dataset, not streaming)"
        )
    if plan is not None or not is_launched_without_plan():
        return start(plan, device=device)
    join_process_group(device)
    _end_planning()  # of an earlier loop in the same script
    path, control = Path(os.environ["FCP_PLAN"]), ProcessControl()
    if control.from_rank(0, bytes([path.exists()])) != bytes([False]):  # rank 0 decides: perhaps made earlier
        return start(path, device=device)
    lengths = LoadedLengths(loader, pairs=pairs, config=config)
    session = start(stream=job_source(path, control, lengths, facts), device=device)
    _begun.append(session)
    return session


_begun: list[Session] = []  # sessions whose plans are made while they train


@atexit.register  # hand-written loops end with the script
def _end_planning() -> None:
    """Write the plans of finished loops; a failed loop leaves its journal."""
    while _begun and not hasattr(sys, "last_value"):
        session = _begun.pop()
        assert session.source is not None
        session.source.close(session.next_step)


def rows_of(session: Session, loader: Any, *, pairs: bool = False, config: Any = None) -> CollatedRows:
    """Return a loader's rows in the form required by the session's plan."""
    lengths = None if session.source is None else session.source.lengths
    return CollatedRows(loader, session.plan, session.metadata, pairs=pairs, config=config, lengths=lengths)
