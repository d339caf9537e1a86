"""The cases of `trainer_worker` for Lightning's Trainer that optimises automatically; started in the same way."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch.loops.fit_loop
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fcp_cli.integrations.lightning.hooks import hook_fit_loop
from fcp_cli.util import processes
from tests.runtime.models import hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH
from tests.runtime.workers.accelerate_worker import ITERATION, NEW, REPLACED, UNPLANNED, WAVES, made_again, rows
from tests.runtime.workers.trainer_worker import Cases, collate, main


class Module(lightning.LightningModule):  # type: ignore[misc]
    """As in any script: nothing in it knows of plans."""

    def __init__(self, *, own_loss: bool = False, head: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = hugging_face("qwen3", torch.float32)
        self.head = nn.Linear(2, 2) if head else None
        self.own_loss = own_loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.own_loss:
            logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        output = self.model(**batch)
        self.log("loss", output.loss, sync_dist=True)
        self.log_dict({"lr": self.optimizers().param_groups[0]["lr"]})
        return {"loss": output.loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

    def configure_model(self) -> None:
        """Nothing to do; strategies that shard ask for it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.5, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Log(lightning.Callback):  # type: ignore[misc]
    """What a trainer's log holds of each step."""

    def __init__(self) -> None:
        self.entries: list[dict[str, float]] = []
        self.norm = 0.0

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        self.norm = float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.entries.append({"lr": float(trainer.callback_metrics["lr"]), "grad_norm": self.norm})
        if trainer.accumulate_grad_batches == 1:  # else Lightning shows the loss of the last batch, not of the step
            self.entries[-1]["loss"] = float(trainer.callback_metrics["loss"])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.entries.append({"eval_loss": float(trainer.callback_metrics["eval_loss"])})


class Reloaded(lightning.LightningDataModule):  # type: ignore[misc]
    """Makes its data set for every epoch, perhaps with other tokens from the second on."""

    def __init__(self, size: int, *, changes: bool) -> None:
        super().__init__()
        self._size, self._changes, self._made = size, changes, 0

    def train_dataloader(self) -> DataLoader[Any]:
        self._made += 1
        data = made_again(changed=self._changes and self._made > 1)
        return DataLoader(data, self._size, collate_fn=collate, sampler=in_order(data))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(rows().select(range(4)), batch_size=2, collate_fn=collate)


def in_order(data: Any) -> Any:
    return torch.utils.data.DistributedSampler(
        data, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), shuffle=False
    )


def fit(
    folder: Path,
    *,
    changes: bool | None = None,
    resume: Path | str | None = None,
    module: dict[str, bool] | None = None,
    batch: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    ranks = int(os.environ["WORLD_SIZE"])
    updates = settings.get("accumulate_grad_batches", 1)
    given: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "strategy": "ddp",
        "max_epochs": 1,
        "gradient_clip_val": 0.5,
        "default_root_dir": folder,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [Log()],
        "use_distributed_sampler": False,  # with rows in the plan's order, ranks would else have others than without
    }
    trainer = lightning.Trainer(**{**given, **settings})
    own = Module(**(module or {}))
    size = batch or GLOBAL_BATCH // updates // ranks
    if changes is None:
        data = rows()
        trainer.fit(
            own,
            DataLoader(data, batch_size=size, collate_fn=collate, sampler=in_order(data)),
            DataLoader(data.select(range(4)), batch_size=2, collate_fn=collate),
            ckpt_path=resume,
        )
    else:
        trainer.fit(own, datamodule=Reloaded(size, changes=changes))
    return {"log": trainer.callbacks[0].entries, "weights": own.model.state_dict()}


def resumed(folder: Path) -> dict[str, Any]:
    """Under a plan, go on inside the epoch after one of three steps, with another module and trainer.

    Without one, Lightning would begin with the epoch's first rows again: there, train without a stop.
    """
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    found = fit(folder, enable_checkpointing=True, callbacks=[log := Log(), saves])
    if folder.parent.name == "planned":
        log = Log()
        found = fit(folder, resume=folder / "step=1.ckpt", callbacks=[log])
    return {**found, "log": log.entries[-3:]}


class Asked(lightning.Callback):  # type: ignore[misc]
    """A request that reaches rank 1 alone, in the first step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.global_rank == 1:
            os.kill(os.getpid(), processes.STOP)


def stopped(folder: Path) -> dict[str, Any]:
    """Under a plan, stop after the first step, and go on from the checkpoint; as `resumed` without one."""
    if folder.parent.name != "planned":
        return resumed(folder)
    saves = ModelCheckpoint(folder / "saved")
    try:
        fit(folder, enable_checkpointing=True, callbacks=[Log(), saves, Asked()])
        raise AssertionError("it trained on")
    except SystemExit as ended:
        assert ended.code == 130
    assert [path.name for path in (folder / "saved").iterdir()] == ["last.ckpt"]
    found = fit(
        folder, enable_checkpointing=True, resume="last", callbacks=[log := Log(), ModelCheckpoint(folder / "saved")]
    )
    return {**found, "log": log.entries[-3:]}


RELOADED: dict[str, Any] = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
CASES: Cases = {
    "fit": (ITERATION, fit),
    "fit waves": (WAVES, fit),
    "accumulating fit": (ITERATION, partial(fit, accumulate_grad_batches=2)),
    "resumed fit": (ITERATION, resumed),
    "stopped fit": (ITERATION, stopped),
    "unplanned fit": (UNPLANNED, partial(fit, max_epochs=2, accumulate_grad_batches=2)),
    "repeated fit": (UNPLANNED, partial(fit, max_epochs=2, accumulate_grad_batches=2)),
    "unplanned fit of a data module": (NEW, partial(fit, **RELOADED, changes=False)),
}
REFUSALS: Cases = {
    "own loss": (ITERATION, partial(fit, module={"own_loss": True})),
    "head": (ITERATION, partial(fit, module={"head": True})),
    "other batch": (ITERATION, partial(fit, batch=2)),
    "more epochs": (ITERATION, partial(fit, max_epochs=2)),
    "fsdp2": (ITERATION, lambda folder: fit(folder, strategy=ModelParallelStrategy())),
    "changing data module": (REPLACED, partial(fit, **RELOADED, changes=True)),
    "limited": (ITERATION, partial(fit, limit_train_batches=0.5)),
}


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    main(
        Path(sys.argv[1]),
        sys.argv[2:],
        CASES,
        REFUSALS,
        hook=lambda: hook_fit_loop(lightning.pytorch.loops.fit_loop),
    )
