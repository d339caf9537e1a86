"""Checks that a trainer can follow a plan, each with a one-line RunError; a plan would otherwise ignore it in silence.

Settings, models and schedules are checked before the first step, methods that a script overrides as they run.
"""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from fcp_cli.errors import FcpError, RunError
from fcp_cli.integrations.base import Refusals, Signatures, advice, refuse, require
from fcp_cli.integrations.hugging_face.packing import ReplacedPacking, replaced_packing
from fcp_cli.plan.metadata import OTHER_BATCHES_VARIABLE, PlanMetadata, is_launched_without_plan
from fcp_cli.runtime.plan_agreement import require_training
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.words import counted
from fcp_cli.vision.families import FAMILIES

OWN_LOOP = "follow the plan in a loop of your own (docs/how-to/training-loop.md)"
_ACCEPT = "accept the plan's batches with 'fcp launch --accept-other-batches'"
TRL_KNOWN_TO_WORK = ("1.16.0",)
LOSSES = {
    "transformers.trainer": "Trainer",
    "trl.trainer.sft_trainer": "SFTTrainer",
    "trl.trainer.dpo_trainer": "DPOTrainer",
}
"""Module -> trainer class whose `compute_loss` has a planned implementation."""
RELIED_ON_OF_TRL: Signatures = {
    "add_fused_lm_head": ("model", "outputs"),
    "FusedCausalLMOutput": ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"),
}
"""Functions of `trl.trainer.utils` that are called."""
COUNTED_BY_TRL = ("_metrics", "_total_train_tokens")
"""Attributes of TRL's trainers that hold metrics to be logged."""
_SAME_UPDATES = 0.05
"""Relative difference up to which numbers of updates count as equal: frameworks pack in blocks of rows."""
_LOSSES_OF_A_BATCH = ("aot", "aot_unpaired", "sft")


def check_trl(utils: ModuleType, trainer: Any) -> None:
    """Check that TRL has the fused head, and that a trainer has the attributes of its logged metrics."""
    import trl

    found, remedy = f"trl {trl.__version__}", advice("trl", TRL_KNOWN_TO_WORK)
    require(utils, RELIED_ON_OF_TRL, found=found, advice=remedy)
    kind = type(trainer).__name__
    refuse(
        (not hasattr(trainer, name), f"{found}: {kind} has no {name}, in which it kept what it logs; {remedy}")
        for name in COUNTED_BY_TRL
    )


def check_trainer(trainer: Any) -> None:
    """Raise RunError for trainer settings, overrides and models that cannot follow a plan."""
    refuse(_override_refusals(trainer), _settings_refusals(trainer), _model_refusals(trainer), _trl_refusals(trainer))


UNTRAINED: Final[WeakSet[Any]] = WeakSet()
"""Trainers that the script has created and not trained yet."""


def check_one_data_set(trainer: Any) -> None:
    """Raise RunError if a trainer that the script trains later has another number of rows than the one that begins."""
    UNTRAINED.discard(trainer)
    data: Any = [getattr(one, "train_dataset", None) for one in (trainer, *UNTRAINED)]
    first, *others = (len(rows) if hasattr(rows, "__len__") else None for rows in data)
    for other in filter(None, others):
        if first is not None and other != first:
            raise RunError(
                f"the script has a second trainer with other training data ({other} rows, {first} in the first), and a "
                "job follows one plan; train each in a job of its own"
            )


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


def _override_refusals(trainer: Any) -> Refusals:
    """Yield the refusals of overridden methods that would never run."""
    owner = owner_of(trainer, "compute_loss")
    yield (
        find_override(trainer, "compute_loss") is None and owner is not loss_class(trainer),
        f"{owner.__name__} computes a loss that has no planned form: a rank has only a part of each sequence; a plan "
        f"follows {', '.join(LOSSES.values())}, and rollouts as in docs/how-to/rl.md",
    )
    step = find_override(trainer, "training_step")
    yield (
        step is not None and owner_of(trainer, "training_step").__module__.startswith("fcp_cli."),
        f"{step} stands behind FollowsPlan, which runs steps in its place; derive FollowsPlan's class from "
        "transformers' trainer and your own class from that one",
    )


def _settings_refusals(trainer: Any) -> Refusals:
    args, accelerator = trainer.args, trainer.accelerator
    has_function, strategy = trainer.compute_loss_func is not None, args.train_sampling_strategy
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
    yield (
        strategy not in ("random", "sequential", "group_by_length"),
        f"the script draws its rows by {strategy}, but a plan balances the ranks itself; remove it",
    )
    yield (
        strategy == "group_by_length" and OTHER_BATCHES_VARIABLE not in os.environ,
        "the script puts rows of similar length into a step (group_by_length), but a plan's steps have random rows, "
        f"which is another training; remove the setting (a plan balances the ranks itself), or {_ACCEPT}",
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
        f"the script sets {', '.join(f'{name}_size' for name in others)} (parallelism_config); a plan makes the groups "
        "itself: remove it",
    )


def _model_refusals(trainer: Any) -> Refusals:
    model, config = trainer.model, getattr(trainer.model, "config", None)
    kind = type(getattr(model, "get_base_model", lambda: model)()).__name__  # inside adapters
    has_head = getattr(model, "get_output_embeddings", lambda: True)() is not None
    yield (
        not has_head or bool(getattr(config, "is_encoder_decoder", False)) or kind.endswith("ForMaskedLM"),
        f"{kind} is not a decoder language model, whose tokens a plan splits over ranks and whose loss is a mean over "
        "tokens; start the script without fcp",
    )
    yield (
        not getattr(trainer, "_loss_shifts_labels", True)
        and trainer.model_accepts_loss_kwargs
        and trainer.compute_loss_func is None
        and loss_kind(trainer) == "Trainer",
        f"for {kind}, the Trainer also counts each row's first token, which is never predicted, in the mean of the "
        "loss, but a plan does not; set model.loss_type = 'ForCausalLM' before you create the trainer",
    )
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


def _trl_refusals(trainer: Any) -> Refusals:
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


def rows_per_pass(trainer: Any) -> int:
    """Return the rows of a rank's batch; with `split_batches`, ranks share one of `per_device_train_batch_size`."""
    args = trainer.args
    return int(args.per_device_train_batch_size // (args.world_size if trainer.accelerator.split_batches else 1))


def check_schedule(trainer: Any, metadata: PlanMetadata, plan: Any, lengths: IntArray, *, in_order: bool) -> None:
    """Check that the trainer's global batch size and steps are the plan's, since its schedules and logs count them.

    `lengths` are the tokens [rows] of the manifest's rows, 0 if not planned; `in_order` is of `visits_in_order`.
    """
    args = trainer.args
    spread = "with split_batches" if trainer.accelerator.split_batches else f"x {args.world_size} ranks"
    batches_of_rank = args.gradient_accumulation_steps * args.world_size
    if (packing := replaced_packing()) is None:
        check_global_batch(
            metadata,
            rows_per_pass(trainer) * batches_of_rank,
            f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps} {spread}",
        )
    else:
        require_training(metadata)
        _check_updates(metadata, packing, lengths, rows_per_pass(trainer), batches_of_rank)
    wanted = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * metadata.steps_per_epoch)
    asked = f"max_steps {args.max_steps}" if args.max_steps > 0 else f"num_train_epochs {args.num_train_epochs}"
    check_steps(metadata, plan, wanted, asked)
    keeps_last = metadata.last_batch == "keep" and metadata.planned_rows % metadata.global_batch_size > 0
    if args.dataloader_drop_last and keeps_last:
        raise RunError(
            "the script drops an epoch's last, partial batch (dataloader_drop_last), but the plan keeps it; plan with "
            "'fcp plan --last-batch drop'"
        )
    if in_order and metadata.shuffle:
        by = _order_overrides(trainer) or "the script"
        raise RunError(
            f"{by} visits the rows in the data's order, but the plan shuffles them; plan with 'fcp plan --no-shuffle'"
        )


def _check_updates(
    metadata: PlanMetadata, packing: ReplacedPacking, lengths: IntArray, rows: int, batches: int
) -> None:
    """Raise RunError if a plan makes other updates than the packing, of `batches` of `rows` each, unless accepted."""
    lengths = lengths[lengths > 0]
    own, found = math.ceil(packing.packed_rows(lengths) / (rows * batches)), metadata.steps_per_epoch
    if abs(found - own) > _SAME_UPDATES * own and OTHER_BATCHES_VARIABLE not in os.environ:
        raise RunError(
            f"{packing.setting} makes {counted(own, 'update')} an epoch, of {len(lengths) / own:,.0f} sequences each; "
            f"a plan packs itself, and its batches count sequences: {found} of {metadata.global_batch_size}, which is "
            f"another training; turn packing off and give batches of {max(1, round(len(lengths) / own / batches))} "
            f"rows a rank for as many updates, or {_ACCEPT}"
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


# Methods overridden by a script's trainer, checked by running them.
#
# Overrides run unchanged. A `training_step` must call the Trainer's own exactly once and return its result; a loader
# may be built in any way, as long as it visits rows at random or in order. `own_loss` checks `compute_loss`.

_ORDER = ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
_KNOWN_PACKAGES = ("transformers", "trl", "fcp_cli")
_MOST_BATCHES = 1000
"""Maximum number of batches of a loader that are compared, to limit the time on large data sets."""


class Override(NamedTuple):
    """A method of the script's own class that overrides the Trainer's."""

    owner: str
    name: str
    place: str

    def __str__(self) -> str:
        return f"{self.owner}.{self.name} ({self.place})"


def refusal(method: object, why: str, remedy: str = "remove the method") -> RunError:
    """Return the error of a script's method or function that a plan cannot follow."""
    return RunError(f"{method} {why}; {remedy}, or {OWN_LOOP}")


def require_known(method: object, given: Mapping[str, Any], known: Collection[str], unnamed: int) -> None:
    """Raise RunError if a script's method gives the model other arguments than the known ones, or `unnamed` ones."""
    others = sorted(name for name, value in given.items() if name not in known and value not in (None, False))
    if others or unnamed > 0:
        named = ", ".join(others) or "arguments without names"
        raise refusal(method, f"gives the model {named}, which a plan does not follow")


def owner_of(trainer: Any, method: str) -> type:
    """Return the class that defines the method used by a trainer."""
    return next(kind for kind in type(trainer).__mro__ if method in vars(kind))


def find_override(trainer: Any, method: str) -> Override | None:
    """Return a trainer's method if it is defined outside transformers, TRL and fcp, else None."""
    kinds = (kind for kind in type(trainer).__mro__ if not kind.__module__.startswith("fcp_cli."))
    owner = next(kind for kind in kinds if method in vars(kind))
    if owner.__module__.split(".")[0] in _KNOWN_PACKAGES:
        return None
    return Override(owner.__name__, method, place_of(vars(owner)[method]))


def place_of(function: Callable[..., Any]) -> str:
    """Return the file and line of a function; the file is relative to its folder on sys.path."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"a {type(function).__name__}"
    file = Path(code.co_filename)
    roots = [Path(root) for root in sys.path if root and file.is_relative_to(root)]
    nearest = max(roots, key=lambda root: len(root.parts), default=None)
    return f"{file.relative_to(nearest) if nearest else file}:{code.co_firstlineno}"


def visits_in_order(trainer: Any, loader: Any) -> bool:
    """Return whether a trainer's loader visits rows in the data's order instead of at random.

    Raises:
        RunError: methods of the script's own class visit rows in another order, or not once an epoch.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:  # a stream is rejected by `CollatedRows`
        return False
    if not (by := _order_overrides(trainer)):
        return isinstance(getattr(own_batches_of(loader), "sampler", None), SequentialSampler)
    with _same_random_state():
        first, second = (_drawn(batches, epoch) for epoch in range(2))
    rows = [row for batch in first for row in batch]
    largest, allowed = max(map(len, first), default=0), rows_per_pass(trainer)
    if not all(isinstance(row, (int, np.integer)) for row in rows):
        raise RunError(f"{by} packs rows into batches, but the plan packs; leave packing off")
    if len(set(rows)) != len(rows) or largest > allowed:
        raise RunError(
            f"{by} visits {len(rows)} rows, {len(set(rows))} of them distinct, in batches of up to {largest}; under a "
            f"plan every row is visited once an epoch, in batches of {allowed}"
        )
    if first == second and rows != sorted(rows):
        unshuffled = "" if is_launched_without_plan() else ", and plan with 'fcp plan --no-shuffle'"
        raise RunError(
            f"{by} visits the rows in the same order in every epoch, which is neither random nor the data's own; a "
            f"plan would replace it: sort the data set in its place{unshuffled}"
        )
    return first == second


def own_batches_of(loader: Any) -> Any:
    """Unwrap the batch samplers that distribute batches over ranks: return the script's own."""
    batches = loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


def _order_overrides(trainer: Any) -> str:
    """Return, for messages, the methods of the script's own class that determine the order of the rows, or ""."""
    return " and ".join(str(found) for name in _ORDER if (found := find_override(trainer, name)) is not None)


def _drawn(batches: Any, epoch: int) -> list[list[Any]]:
    for part in (batches, getattr(batches, "batch_sampler", None), getattr(batches, "sampler", None)):
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    return [list(batch) for batch in islice(batches, _MOST_BATCHES)]


@contextmanager
def _same_random_state() -> Iterator[None]:
    own, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)  # noqa: NPY002


class WatchedMethods:
    """Wraps a trainer's overridden methods to check their results while it follows a plan.

    Args:
        trainer: the script's trainer.
        loader: returns the loader of the plan's steps, even if a subclass overrides the method.

    Attributes:
        answers: results of plan steps since the current call of the script's `training_step` began.
    """

    def __init__(self, trainer: Any, loader: Callable[[], Any]) -> None:
        self._trainer = trainer
        self.answers: list[Any] = []
        replaced: dict[str, Callable[..., Any]] = {}
        if any(find_override(trainer, name) for name in _ORDER):
            replaced["get_train_dataloader"] = lambda *_, **__: loader()
        if (step := find_override(trainer, "training_step")) is not None:
            replaced["training_step"] = self._checked_step(step, trainer.training_step)
        if (batches := find_override(trainer, "get_batch_samples")) is not None:
            replaced["get_batch_samples"] = _checked_batches(batches, trainer.get_batch_samples)
        for name, method in replaced.items():
            setattr(trainer, name, method)
        self._replaced = tuple(replaced)

    def release(self) -> None:
        """Restore the trainer's own methods."""
        for name in self._replaced:
            delattr(self._trainer, name)

    def _checked_step(self, judged: Override, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.answers.clear()
            try:
                result = own(*args, **kwargs)
            except FcpError:
                raise
            except Exception as error:
                if self.answers:
                    raise
                raise RunError(
                    f"{judged} cannot run a step of the plan, whose tokens the Trainer's own training_step fetches: "
                    f"{type(error).__name__}: {error}; {OWN_LOOP}"
                ) from error
            if len(self.answers) != 1:
                times = f"calls the Trainer's own training_step {len(self.answers)} times"
                raise refusal(judged, f"{times}, and a plan's step runs in one call")
            if result is not self.answers[0]:
                raise refusal(judged, "changes the result of the Trainer's own training_step")
            return result

        return training_step


def _checked_batches(judged: Override, own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def get_batch_samples(epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        expected = list(islice(epoch_iterator, num_batches))
        batches, items = own(iter(expected), num_batches, *args, **kwargs)
        if len(batches) != len(expected) or any(one is not other for one, other in zip(batches, expected, strict=True)):
            raise RunError(
                f"{judged} changes the batches of an optimizer step, but under a plan they come from the plan; remove "
                "the method"
            )
        return batches, items

    return get_batch_samples
