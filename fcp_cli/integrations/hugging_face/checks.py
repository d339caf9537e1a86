"""Rejects trainer settings that a plan would silently ignore, before the first step, with a one-line RunError."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.overrides import OWN_LOOP, find_override, owner_of, place_of
from fcp_cli.integrations.requirements import advice, require_all
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.runtime.agreement.plan_agreement import require_training
from fcp_cli.vision.families import FAMILIES

KNOWN_TO_WORK = ("5.23.0",)
TRL_KNOWN_TO_WORK = ("1.16.0",)
LOSSES = {
    "transformers.trainer": "Trainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.dpo_trainer": "DPOTrainer",
}
"""Module -> trainer class whose `compute_loss` has a planned implementation."""
RELIED_ON: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Trainer.train", ("resume_from_checkpoint",)),
    ("Trainer._inner_training_loop", ("args",)),
    ("Trainer.get_train_dataloader", ()),
    ("Trainer.training_step", ("model", "inputs", "num_items_in_batch")),
    ("Trainer.compute_loss", ("model", "inputs", "num_items_in_batch")),
    ("Trainer.compute_loss_context_manager", ()),
    ("Trainer.get_total_train_batch_size", ("args",)),
    ("Trainer.create_accelerator_and_postprocess", ()),
)
"""Methods of `transformers.trainer` that are replaced or called, with the arguments passed to them by name."""
RELIED_ON_OF_TRL: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("add_fused_lm_head", ("model", "outputs")),
    (
        "FusedCausalLMOutput",
        ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"),
    ),
)
"""Functions of `trl.trainer.utils` that are called, with their arguments."""
COUNTED_BY_TRL = ("_metrics", "_total_train_tokens")
"""Attributes of TRL's trainers that hold metrics to be logged."""
_LOSSES_OF_A_BATCH = ("aot", "aot_unpaired", "sft")


def check_trainer_module(trainer: ModuleType) -> None:
    """Check that the methods of `transformers.trainer.Trainer` that are hooked or called exist."""
    import transformers

    found = f"transformers {transformers.__version__}"
    require_all(trainer, RELIED_ON, package="transformers", found=found, versions=KNOWN_TO_WORK)


def check_trl(utils: ModuleType, trainer: Any) -> None:
    """Check that TRL has the fused head, and that a trainer has the attributes of its logged metrics."""
    import trl

    found = f"trl {trl.__version__}"
    require_all(utils, RELIED_ON_OF_TRL, package="trl", found=found, versions=TRL_KNOWN_TO_WORK)
    for name in COUNTED_BY_TRL:
        if not hasattr(trainer, name):
            raise RunError(
                f"{found}: {type(trainer).__name__} has no {name}, in which it kept what it logs; "
                f"{advice('trl', TRL_KNOWN_TO_WORK)}"
            )


def check_trainer(trainer: Any) -> None:
    """Raise RunError for trainer settings, overrides and models that cannot follow a plan."""
    for refusals in (_refused_overrides, _refused_settings, _refused_models, _refused_of_trl):
        for is_refused, reason in refusals(trainer):
            if is_refused:
                raise RunError(reason)


def loss_class(trainer: Any) -> Any:
    """Return a trainer's base class in `LOSSES`, whose `compute_loss` has a planned implementation."""
    return next(kind for kind in type(trainer).__mro__ if (kind.__module__, kind.__name__) in LOSSES.items())


def loss_kind(trainer: Any) -> str:
    """Return the name of `loss_class`."""
    return str(loss_class(trainer).__name__)


def loss_function_of(trainer: Any) -> str | None:
    """Return, for messages, the name and location of the trainer's `compute_loss_func`; None if it has none."""
    function = trainer.compute_loss_func
    return None if function is None else f"compute_loss_func ({place_of(function)})"


def check_schedule(trainer: Any, metadata: PlanMetadata, plan: Any) -> None:
    """Check that the trainer's global batch size and steps are the plan's, since its schedules and logs count them."""
    args = trainer.args
    check_global_batch(
        metadata,
        trainer.get_total_train_batch_size(args),
        f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
        f"{args.gradient_accumulation_steps} x {args.world_size} ranks",
    )
    wanted = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * metadata.steps_per_epoch)
    asked = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"num_train_epochs {args.num_train_epochs}"
    check_steps(metadata, plan, wanted, asked)
    if (
        args.dataloader_drop_last
        and metadata.last_batch == "keep"
        and metadata.planned_rows % metadata.global_batch_size
    ):
        raise RunError(
            "the script drops an epoch's last, partial batch (dataloader_drop_last), but the plan keeps it; plan with "
            "'fcp plan --last-batch drop'"
        )
    if getattr(args, "train_sampling_strategy", "") == "sequential" and metadata.shuffle:
        raise RunError(
            "the script trains the rows in order (train_sampling_strategy='sequential'), but the plan shuffles them; "
            "plan with 'fcp plan --no-shuffle'"
        )


def check_global_batch(metadata: PlanMetadata, batch: int, made_of: str) -> None:
    """Raise RunError unless the plan is for training with the script's global batch size.

    Args:
        metadata: metadata of the plan.
        batch: global batch size of the script, in sequences.
        made_of: script settings that determine it.
    """
    require_training(metadata)
    size = metadata.global_batch_size
    if batch != size:
        raise RunError(
            f"the script trains on {batch} sequences a step ({made_of}), but the plan on {size}; plan with 'fcp plan "
            f"--global-batch-size {batch}', or give the script the plan's"
        )


def check_steps(metadata: PlanMetadata, plan: Any, wanted: int, asked: str) -> None:
    """Raise RunError if a script trains more steps than the plan has.

    Args:
        metadata, plan: metadata of the plan and its file.
        wanted: number of steps of the script.
        asked: script setting that determines it.
    """
    if wanted > metadata.end_step:
        epochs = math.ceil(wanted / max(metadata.steps_per_epoch, 1))
        raise RunError(
            f"the script trains {wanted} steps ({asked}), but the plan {plan} ends after {metadata.end_step}; plan "
            f"more with 'fcp plan --epochs {epochs}', or set max_steps={metadata.end_step}"
        )


def _refused_overrides(trainer: Any) -> Iterable[tuple[bool, str]]:
    """Yield (is refused, message) for overridden methods that cannot follow a plan."""
    owner = owner_of(trainer, "compute_loss")
    yield (
        find_override(trainer, "compute_loss") is None and owner is not loss_class(trainer),
        f"{owner.__name__} computes its own loss (compute_loss), which a plan would skip: a rank has only a part of "
        f"each sequence; remove it, or {OWN_LOOP}",
    )
    step = find_override(trainer, "training_step")
    yield (
        step is not None and owner_of(trainer, "training_step").__module__.startswith("fcp_cli."),
        f"{step} stands behind FollowsPlan, which runs steps in its place; derive FollowsPlan's class from "
        "transformers' trainer and your own class from that one",
    )


def _refused_settings(trainer: Any) -> Iterable[tuple[bool, str]]:
    args, accelerator = trainer.args, trainer.accelerator
    has_function = trainer.compute_loss_func is not None
    yield (
        has_function and loss_kind(trainer) != "Trainer",
        f"{loss_kind(trainer)} has a compute_loss_func, which a plan would skip: a rank has only a part of each "
        f"sequence; remove it, or {OWN_LOOP}",
    )
    yield (
        not args.average_tokens_across_devices and (trainer.model_accepts_loss_kwargs or has_function),
        "average_tokens_across_devices=False weighs tokens by the rank that they are on, which the plan chooses; "
        "remove it",
    )
    strategy = getattr(args, "train_sampling_strategy", "group_by_length" if _old_grouping(args) else "random")
    yield (
        strategy not in ("random", "sequential"),
        f"the script groups rows by {strategy}, but a plan balances the steps itself; remove it",
    )
    yield (
        bool(args.auto_find_batch_size),
        "auto_find_batch_size changes the batch, which the plan fixes; remove it",
    )
    yield (
        trainer.neftune_noise_alpha is not None,
        "neftune_noise_alpha scales noise by a sequence's length, of which a rank has a part; remove it",
    )
    yield (
        trainer.is_deepspeed_enabled,
        "deepspeed= cannot follow a plan through the Trainer; remove it (DDP), or use fsdp=, or a loop of your own "
        "around the engine",
    )
    optimizer = str(getattr(args.optim, "value", args.optim))
    yield "lomo" in optimizer, f"the optimizer {optimizer} steps inside each backward; a plan's step has several"
    parallel = getattr(accelerator, "parallelism_config", None)
    others = [name for name in ("tp", "cp", "sp") if (getattr(parallel, f"{name}_size", None) or 1) > 1]
    yield (
        bool(others),
        f"the script sets {', '.join(f'{name}_size' for name in others)}; a plan makes the groups itself: remove it",
    )


def _refused_models(trainer: Any) -> Iterable[tuple[bool, str]]:
    config = getattr(trainer.model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    yield (
        bool(getattr(text, "output_router_logits", False)),
        "the model adds an auxiliary loss of its experts (output_router_logits), which is made of one rank's tokens of "
        "a micro-batch, which the plan chooses; set it to False (TRL: router_aux_loss_coef=0.0)",
    )
    if config is not None and hasattr(config, "vision_config"):
        yield (
            loss_kind(trainer) == "DPOTrainer",
            f"pairs of answers of a {config.model_type} model have pictures, which a plan of pairs does not follow; "
            "train a language model, or follow the plan with the Trainer or SFTTrainer",
        )
        yield (
            config.model_type not in FAMILIES,
            f"the images of a {config.model_type} model cannot follow a plan, those of {', '.join(FAMILIES)} can; see "
            "docs/how-to/images-and-videos.md",
        )


def _old_grouping(args: Any) -> bool:
    return bool(getattr(args, "group_by_length", False))


def _refused_of_trl(trainer: Any) -> Iterable[tuple[bool, str]]:
    args = trainer.args
    yield bool(getattr(args, "packing", False)), "the script sets packing=True; leave it off: the plan packs"
    yield (
        bool(getattr(args, "activation_offloading", False)),
        "activation_offloading=True counts on one forward and backward a step; remove it (gradient_checkpointing "
        "keeps memory low, too)",
    )
    yield (
        loss_kind(trainer) == "SFTTrainer" and bool(args.label_smoothing_factor),
        "label_smoothing_factor needs logits that SFTTrainer does not make; remove it",
    )
    yield (
        bool(getattr(args, "precompute_ref_log_probs", False)),
        "precompute_ref_log_probs=True puts the reference's numbers beside the tokens, where the plan does not look; "
        "remove it: the reference then runs on the plan's rings, too",
    )
    kinds = [kind for kind in getattr(trainer, "loss_types", ()) if kind in _LOSSES_OF_A_BATCH]
    yield (
        bool(kinds),
        f"the loss {', '.join(kinds)} compares pairs of one micro-batch with each other, which the plan chooses; use "
        "another loss_type",
    )
