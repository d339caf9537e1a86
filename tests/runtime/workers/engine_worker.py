"""The cases of `trainer_worker` for loops around DeepSpeed's engines; started in the same way."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler

from fcp_cli.integrations.deepspeed.hooks import hook_deepspeed
from tests.runtime.models import hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH
from tests.runtime.workers.accelerate_worker import ITERATION, NEW, REPLACED, WAVES, made_again, rows
from tests.runtime.workers.trainer_worker import Cases, collate, main


def in_order(data: Any) -> Any:
    return DistributedSampler(data, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), shuffle=False)


def engine_of(stage: int, batch: int, accumulates: int, data: Any) -> Any:
    """Return the engine and the loader that DeepSpeed makes of a configuration, as in its own examples."""
    model = hugging_face("qwen3", torch.float32)
    model.train()
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        training_data=data,
        collate_fn=collate,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_accumulation_steps": accumulates,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    engines.append(engine)
    return engine, loader


engines: list[Any] = []


def refused(run: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A loop that stops in the midst, as its process would."""

    def train(folder: Path) -> Any:
        try:
            return run(folder)
        finally:
            engines[-1].eval()

    return train


def loop(
    folder: Path,
    *,
    stage: int = 1,
    accumulates: int = 1,
    epochs: int = 1,
    whole: bool = False,
    data: Callable[[], Any] = rows,
    next_data: Callable[[], Any] | None = None,
    resumed: bool = False,
    backward_twice: bool = False,
) -> dict[str, Any]:
    """Nothing in it knows of plans; `whole`: all rows are a step, so that the order of DeepSpeed's loader is none."""
    torch.manual_seed(0)
    own, ranks = data(), int(os.environ["WORLD_SIZE"])
    batch = (len(own) if whole else GLOBAL_BATCH) // accumulates // ranks
    engine, loader = engine_of(stage, batch, accumulates, own if whole else None)
    if not whole:
        loader = DataLoader(own, batch_size=batch, collate_fn=collate, sampler=in_order(own))
    if resumed:
        engine.load_checkpoint(str(folder / "saved"), tag="3")
    log, total = [], torch.zeros(())
    for epoch in range(1 if resumed else 0, epochs):
        if epoch and next_data is not None:
            own = next_data()
            loader = DataLoader(own, batch_size=batch, collate_fn=collate, sampler=in_order(own))
        engine.train()
        for inputs in loader:
            inputs = {name: value.to(engine.device) for name, value in inputs.items()}
            loss = engine(**inputs).loss
            engine.backward(loss, retain_graph=backward_twice)
            if backward_twice:
                engine.backward(loss)
            total += loss.detach() / accumulates
            is_whole = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_whole:
                torch.distributed.all_reduce(total)
                log.append({"loss": float(total / ranks), "grad_norm": float(engine.get_global_grad_norm())})
                total = torch.zeros(())
        if folder.parent.name == "planned" and epochs == 2 and not resumed:
            engine.save_checkpoint(str(folder / "saved"), tag=str(engine.global_steps))
    engine.eval()
    with torch.no_grad():
        losses = [float(engine(**inputs).loss) for inputs in DataLoader(rows(), batch_size=8, collate_fn=collate)]
    log.append({"eval_loss": sum(losses) / len(losses)})
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    return {"log": log, "weights": weights}


def resumed(folder: Path) -> dict[str, Any]:
    """Under a plan: train two epochs, and the second again from the checkpoint between them."""
    found = loop(folder, epochs=2)
    if folder.parent.name == "planned":
        found = loop(folder, epochs=2, resumed=True)
    return {**found, "log": found["log"][-4:]}


UNPLANNED = "unplanned-engine.parquet"
CASES: Cases = {
    "engine": (ITERATION, loop),
    "engine in waves": (WAVES, partial(loop, stage=2, accumulates=2)),
    "unplanned engine": (UNPLANNED, partial(loop, epochs=2, accumulates=2)),
    "repeated engine": (UNPLANNED, partial(loop, epochs=2, accumulates=2)),
    "resumed engine": ("unplanned-resumed.parquet", resumed),
    "unplanned engine, zero 3": ("unplanned-zero3.parquet", partial(loop, stage=3, epochs=2)),
    "unplanned engine, its own loader": ("unplanned-whole.parquet", partial(loop, whole=True, epochs=2)),
    "unplanned engine, its data made again": (NEW, partial(loop, epochs=2, next_data=made_again)),
}
REFUSALS: Cases = {
    "engine that goes back twice": (ITERATION, refused(partial(loop, backward_twice=True))),
    "engine of other data": (
        REPLACED,
        refused(partial(loop, epochs=2, next_data=partial(made_again, changed=True))),
    ),
    "engine of fewer rows": (ITERATION, refused(partial(loop, data=lambda: rows().select(range(20))))),
}


if __name__ == "__main__":
    gc.disable()  # a loop that its script leaves writes its metrics at once, not when a collection closes it
    deepspeed.init_distributed("gloo")
    main(Path(sys.argv[1]), sys.argv[2:], CASES, REFUSALS, hook=lambda: hook_deepspeed(deepspeed))
