"""Lightning's Fabric and Trainer on the ranks of a plan: `-m tests.runtime.workers.lightning_worker FOLDER`.

Each case leaves `CASE-RANK.pickle` in the folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from fcp_cli.integrations.lightning import PlannedSteps
from fcp_cli.runtime.session import Session, start
from fcp_cli.runtime.step import Step
from tests.runtime.loops.cases import (
    LEARNING_RATE,
    NUM_RANKS,
    SYNCS,
    Trained,
    flat,
    model_under_a_plan,
    norm_of,
    tokens_of,
)
from tests.runtime.workers.leave import join_job, leave_cases, leave_job


def by_fabric(plan: Path) -> Trained:
    """A loop of one's own, with Fabric's wrapper around DDP's around the model."""
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy="ddp")
    fabric.launch()
    inner = model_under_a_plan()
    model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=LEARNING_RATE))
    losses, norms = [], []
    for step in start(plan, tokens_of(plan)).steps(model):
        for batch in step:
            fabric.backward(batch.loss(model(batch.input_ids, batch.position_ids, batch.ring)))
        losses.append(step.reduced_loss())
        norms.append(norm_of(inner))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses=losses, norms=norms, weights=flat(inner))


class Model(lightning.LightningModule):  # type: ignore[misc]
    """Follows a plan in `training_step`, which is given a step."""

    automatic_optimization = False

    def __init__(self, plan: Path, loader: Callable[[Session, nn.Module], Any]) -> None:
        super().__init__()
        self.model = model_under_a_plan()
        self.plan, self.loader = plan, loader
        self.losses: list[float] = []
        self.norms: list[float] = []

    def train_dataloader(self) -> Any:
        return self.loader(start(self.plan, tokens_of(self.plan)), self.trainer.strategy.model)

    def training_step(self, step: Step, _: int) -> None:
        for batch in step:
            self.manual_backward(batch.loss(self.model(batch.input_ids, batch.position_ids, batch.ring)))
        self.losses.append(step.reduced_loss())
        self.norms.append(norm_of(self.model))
        self.optimizers().step()
        self.optimizers().zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


class Unsized(IterableDataset[Step]):
    """What a script would give a DataLoader."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        self.session, self.model = session, model

    def __iter__(self) -> Iterator[Step]:
        return self.session.steps(self.model)


def by_trainer(
    plan: Path, loader: Callable[[Session, nn.Module], Any] = PlannedSteps, resume: Path | None = None, **settings: Any
) -> Trained:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=bool(settings),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    model = Model(plan, loader)
    trainer.fit(model, ckpt_path=resume)
    return Trained(losses=model.losses, norms=model.norms, weights=flat(model.model))


def by_resumed_trainer(plan: Path, folder: Path) -> Trained:
    """Go on inside the epoch after one of three steps, with another module and trainer."""
    by_trainer(plan, callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)])
    return by_trainer(plan, resume=folder / "step=1.ckpt")


def cases(folder: Path) -> Mapping[str, Callable[[], Any]]:
    plans = {sync: folder / f"{sync}.parquet" for sync in SYNCS}

    def prefetched(session: Session, model: nn.Module) -> Any:
        return DataLoader(Unsized(session, model), batch_size=None)

    return {
        **{f"fabric {sync}": partial(by_fabric, plan) for sync, plan in plans.items()},
        **{f"trainer {sync}": partial(by_trainer, plan) for sync, plan in plans.items()},
        "resumed": partial(by_resumed_trainer, plans["iteration"], folder),
        "prefetched": partial(by_trainer, plans["iteration"], prefetched),
    }


if __name__ == "__main__":
    join_job()
    leave_cases(Path(sys.argv[1]), cases(Path(sys.argv[1])))
    leave_job()
