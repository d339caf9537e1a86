"""Hooks `transformers.Trainer`, and TRL's trainers based on it, to follow the plan.

The training loop, the creation of the training loader, and the training step follow the plan. `train` also resumes a
stopped run, and the trainer's accelerator is marked.
"""

from __future__ import annotations

from functools import partial, wraps
from types import ModuleType
from typing import Any

from fcp_cli.integrations.hugging_face.accelerate.hooks import OF_TRAINER


def hook_trainer(trainer: ModuleType) -> None:
    """Hook `transformers.trainer` right after its import, before the importing module uses it."""
    from fcp_cli.integrations.hugging_face.checks import check_trainer_module
    from fcp_cli.integrations.hugging_face.mixin import following, planned_loader, planned_step

    check_trainer_module(trainer)
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
        from fcp_cli.integrations.hugging_face.stopping import checkpoint_to_resume  # imports transformers

        return begin(self, checkpoint_to_resume(resume_from_checkpoint), *args, **kwargs)

    kind.train = resumed_train
    make_accelerator = kind.create_accelerator_and_postprocess

    @wraps(make_accelerator)
    def create_accelerator_and_postprocess(self: Any) -> None:
        make_accelerator(self)
        setattr(self.accelerator, OF_TRAINER, True)

    kind.create_accelerator_and_postprocess = create_accelerator_and_postprocess
    kind._inner_training_loop = _inner_training_loop
    kind.get_train_dataloader = get_train_dataloader
    kind.training_step = training_step
