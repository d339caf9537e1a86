"""Hooks `transformers.Trainer`, TRL's trainers based on it, and accelerate's `Accelerator` to follow the plan.

Of a Trainer, the training loop, the creation of the training loader, and the training step follow the plan. `train`
also resumes a stopped run, and the trainer's accelerator is marked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import Signatures, advice, require

KNOWN_TO_WORK = ("5.23.0",)
TRAINER: Signatures = {
    "Trainer.train": ("resume_from_checkpoint",),
    "Trainer._inner_training_loop": ("args",),
    "Trainer.get_train_dataloader": (),
    "Trainer.training_step": ("model", "inputs", "num_items_in_batch"),
    "Trainer.save_model": ("output_dir",),
    "Trainer.compute_loss": ("model", "inputs", "num_items_in_batch"),
    "Trainer.compute_loss_context_manager": (),
    "Trainer.create_accelerator_and_postprocess": (),
}
"""Methods of `transformers.trainer` that are hooked or called."""


def hook_trainer(trainer: ModuleType) -> None:
    """Hook `transformers.trainer` right after its import, before the importing module uses it."""
    import transformers

    from fcp_cli.integrations.hugging_face.trainer import following, planned_loader, planned_step

    found = f"transformers {transformers.__version__}"
    require(trainer, TRAINER, found=found, advice=advice("transformers", KNOWN_TO_WORK))
    kind: Any = trainer.Trainer
    train, get_loader, run_step = kind._inner_training_loop, kind.get_train_dataloader, kind.training_step

    @wraps(train)
    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        with following(self):
            return train(self, *args, **kwargs)

    @wraps(get_loader)
    def get_train_dataloader(self: Any) -> Any:
        return planned_loader(self, lambda: get_loader(self))

    @wraps(run_step)
    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return planned_step(self, partial(run_step, self), model, inputs, num_items_in_batch)

    begin = kind.train

    @wraps(begin)
    def resumed_train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        from fcp_cli.integrations.hugging_face.trainer import checkpoint_to_resume  # imports transformers

        return begin(self, checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)

    kind.train = resumed_train
    save = kind.save_model

    @wraps(save)
    def save_model(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        from fcp_cli.integrations.hugging_face.trainer import note_saved

        save(self, output_dir, *args, **kwargs)
        note_saved(self, output_dir)

    kind.save_model = save_model
    make_accelerator = kind.create_accelerator_and_postprocess

    @wraps(make_accelerator)
    def create_accelerator_and_postprocess(self: Any) -> None:
        from fcp_cli.integrations.hugging_face.checks import UNTRAINED  # imports torch

        UNTRAINED.add(self)
        make_accelerator(self)
        setattr(self.accelerator, OF_TRAINER, True)

    kind.create_accelerator_and_postprocess = create_accelerator_and_postprocess
    kind._inner_training_loop = _inner_training_loop
    kind.get_train_dataloader = get_train_dataloader
    kind.training_step = training_step


# The `Accelerator` methods called by plain training loops.
#
# The Trainer's own accelerator is exempt, since the Trainer itself is hooked.

ACCELERATE_KNOWN_TO_WORK = ("1.15.0",)
OF_TRAINER = "_fcp_of_trainer"
"""Attribute of an accelerator created by a Trainer."""
_LOOP = "_fcp_loop"
Hooked = Callable[..., Any]
_MEETINGS = ("gather", "reduce", "wait_for_everyone", "save_state")

ACCELERATOR: Signatures = {
    "Accelerator.prepare": ("args",),
    "Accelerator.backward": ("loss",),
    "Accelerator._do_sync": (),
    "Accelerator.clip_grad_norm_": ("parameters", "max_norm"),
    "Accelerator.clip_grad_value_": ("parameters", "clip_value"),
    "Accelerator.load_state": ("input_dir",),
    "Accelerator.skip_first_batches": ("dataloader", "num_batches"),
    **{f"Accelerator.{name}": () for name in _MEETINGS},
    "GradientState._set_sync_gradients": ("sync_gradients",),
    "DataLoaderDispatcher.total_batch_size": (),
}
"""Methods of `accelerate.accelerator` that are hooked or called."""


def hook_accelerator(accelerator: ModuleType) -> None:
    """Hook `accelerate.accelerator` right after its import, before the importing module uses it."""
    import accelerate

    found = f"accelerate {accelerate.__version__}"
    require(accelerator, ACCELERATOR, found=found, advice=advice("accelerate", ACCELERATE_KNOWN_TO_WORK))
    kind: Any = accelerator.Accelerator
    hooks: tuple[tuple[str, Hooked], ...] = (
        ("prepare", _prepare),
        ("backward", _backward),
        ("_do_sync", _do_sync),
        ("clip_grad_norm_", _clip),
        ("clip_grad_value_", _clip),
        ("load_state", _load_state),
        ("skip_first_batches", _skip_first_batches),
        *((name, _meet) for name in _MEETINGS),
    )
    for name, hooked in hooks:
        setattr(kind, name, _with_loop(getattr(kind, name), hooked))


def _with_loop(own: Callable[..., Any], hooked: Hooked) -> Callable[..., Any]:
    """Return a method that calls `hooked(loop, own, ...)` while a plan is followed, else the original."""

    @wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        loop = vars(self).get(_LOOP)
        if loop is None and (hooked is not _prepare or vars(self).get(OF_TRAINER)):
            return own(self, *args, **kwargs)
        return hooked(self, own, *args, **kwargs)

    return method


def _prepare(accelerator: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Prepare as usual, but hook a trained model before, and wrap loaders after."""
    from torch import nn

    from fcp_cli.integrations.hugging_face.loops import AcceleratedLoop, PlannedBatches

    if any(type(found).__name__ == "DummyOptim" for found in args) or str(accelerator.distributed_type).endswith(
        "SPEED"
    ):
        raise RunError("accelerate's DeepSpeed cannot follow a plan; remove it, or write the loop around the engine")
    if not hasattr(accelerator, _LOOP):
        if not any(isinstance(found, nn.Module) or hasattr(found, "dataset") for found in args):
            return own(accelerator, *args, **kwargs)
        setattr(accelerator, _LOOP, AcceleratedLoop(accelerator))
    loop = getattr(accelerator, _LOOP)
    trained = [place for place, found in enumerate(args) if isinstance(found, nn.Module) and loop.adopt(found)]
    found = own(accelerator, *args, **kwargs)
    prepared = list(found) if len(args) > 1 else [found]
    for place in trained:
        loop.model = prepared[place]
    prepared = [PlannedBatches(loop, one) if hasattr(one, "total_batch_size") else one for one in prepared]
    return tuple(prepared) if len(args) > 1 else prepared[0]


def _backward(accelerator: Any, own: Callable[..., Any], loss: Any, **kwargs: Any) -> Any:
    loop = getattr(accelerator, _LOOP)
    loop.require_microbatch()
    own(accelerator, loss, **kwargs)
    loop.after_backward()


def _do_sync(accelerator: Any, own: Callable[..., Any]) -> None:
    current = getattr(accelerator, _LOOP).current
    if current is None:
        own(accelerator)
    else:
        accelerator.gradient_state._set_sync_gradients(current.is_last)


def _clip(accelerator: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Clip only fully accumulated gradients: between micro-batches the optimizer does not step either."""
    import torch

    if getattr(accelerator, _LOOP).current is not None:
        return torch.zeros((), device=accelerator.device)
    return own(accelerator, *args, **kwargs)


def _meet(accelerator: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    loop = getattr(accelerator, _LOOP)
    loop.require_whole_step(own.__name__)
    found = own(accelerator, *args, **kwargs)
    if own.__name__ == "save_state":
        loop.save(found)
    return found


def _load_state(accelerator: Any, own: Callable[..., Any], input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    if input_dir is None:
        raise RunError("load_state() was given no folder, which the plan's step is read from; pass input_dir")
    own(accelerator, input_dir, *args, **kwargs)
    getattr(accelerator, _LOOP).load(Path(input_dir))


def _skip_first_batches(accelerator: Any, own: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
    from fcp_cli.integrations.hugging_face.loops import PlannedBatches

    if not isinstance(dataloader, PlannedBatches):
        return own(accelerator, dataloader, num_batches)
    getattr(accelerator, _LOOP).check_skipped(dataloader.own, num_batches)
    return dataloader
