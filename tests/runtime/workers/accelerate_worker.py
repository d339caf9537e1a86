"""The cases of `trainer_worker` for plain loops around accelerate; started in the same way."""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

from fcp_cli.integrations.hugging_face.hooks import hook_accelerator
from fcp_cli.runtime import stopping
from fcp_cli.util import processes
from tests.runtime.models import VOCAB_SIZE, hugging_face
from tests.runtime.trainer_plans import GLOBAL_BATCH, LOOP_LENGTHS
from tests.runtime.workers.trainer_worker import Cases, Growing, collate, main


def rows() -> Dataset:
    """Rows of which one token is learned, so that a mean of means is the mean over tokens."""
    draw = torch.Generator().manual_seed(7)
    ids = [torch.randint(1, VOCAB_SIZE, (length,), generator=draw).tolist() for length in LOOP_LENGTHS]
    return Dataset.from_dict({"input_ids": ids, "labels": [[-100] * (len(row) - 1) + row[-1:] for row in ids]})


def made_again(*, changed: bool = False) -> Dataset:
    """The data set of a script that makes one for every epoch, perhaps with another token in row 13."""
    made = rows().to_list()
    if changed:
        made[13]["input_ids"][0] = 1 + made[13]["input_ids"][0] % 2
    return Dataset.from_list(made)


def loop(
    folder: Path,
    *,
    accumulates: int = 1,
    resumed: bool = False,
    stops: bool = False,
    gathers: bool = False,
    backward_twice: bool = False,
    epochs: int = 1,
    data: Callable[[], Any] = rows,
    next_data: Callable[[], Any] | None = None,
    sampler: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """A loop as in accelerate's own examples: nothing in it knows of plans."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulates)
    model = hugging_face("qwen3", torch.float32)
    model.train()
    batch = GLOBAL_BATCH // accumulates // accelerator.num_processes
    own = data()
    loader: Any = DataLoader(own, batch_size=batch, collate_fn=collate, sampler=sampler(own) if sampler else None)
    eval_loader = DataLoader(rows().select(range(4)), batch_size=2, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.5, total_iters=6)
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    log, done, total = [], 0, torch.zeros(())
    if resumed:
        accelerator.load_state(str(folder / "state"))
        loader, done = accelerator.skip_first_batches(loader, accumulates), 1
    for epoch in range(epochs):
        if epoch and next_data is not None:
            loader = accelerator.prepare(DataLoader(next_data(), batch_size=batch, collate_fn=collate))
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        model.train()
        for inputs in loader:
            with accelerator.accumulate(model):
                outputs = model(**inputs)
                accelerator.backward(outputs.loss, retain_graph=backward_twice)
                if backward_twice:
                    accelerator.backward(outputs.loss)
                total += outputs.loss.detach() / accumulates
                if gathers:
                    accelerator.gather(outputs.loss.detach())
                if accumulates == 1 or accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                loss = float(accelerator.gather(total[None]).mean())
                log.append({"loss": loss, "grad_norm": float(norm), "lr": scheduler.get_last_lr()[0]})
                total.zero_()
                if stops and not stopping() and accelerator.process_index == 1:  # reaches one rank alone
                    os.kill(os.getpid(), processes.STOP)
                if (done == 1 and not resumed) if not stops else stopping():
                    accelerator.save_state(str(folder / "state"))
                if stops:
                    break
        model.eval()
        with torch.no_grad():
            losses = [float(accelerator.gather(model(**inputs).loss[None]).mean()) for inputs in eval_loader]
        log.append({"eval_loss": sum(losses) / len(losses)})
    return {"log": log, "weights": accelerator.unwrap_model(model).state_dict()}


def heard(folder: Path) -> dict[str, Any]:
    """The loop, with what it wrote to stderr."""
    with redirect_stderr(io.StringIO()) as said:
        return {**loop(folder), "said": said.getvalue()}


def in_two_runs(folder: Path) -> dict[str, Any]:
    loop(folder)
    return loop(folder, resumed=True)


def stopped_and_resumed(folder: Path) -> dict[str, Any]:
    loop(folder, stops=True)
    return loop(folder, resumed=True)


def at_random(data: Any) -> Any:
    return torch.utils.data.WeightedRandomSampler([1.0] * len(data), len(data))


ITERATION, WAVES = "loop-iteration.parquet", "loop-waves.parquet"
UNPLANNED, GROWING, NEW, REPLACED = (f"unplanned-{name}.parquet" for name in ("loop", "growing", "new", "replaced"))
CASES: Cases = {
    "loop": (ITERATION, heard),
    "accumulating loop": (WAVES, partial(loop, accumulates=2)),
    "resumed loop": (ITERATION, in_two_runs),
    "stopped loop": (ITERATION, stopped_and_resumed),
    "unplanned loop": (UNPLANNED, partial(loop, epochs=2, accumulates=2)),
    "repeated loop": (UNPLANNED, partial(loop, epochs=2, accumulates=2)),
    "unplanned loop, its data made again": (NEW, partial(loop, epochs=2, next_data=made_again)),
}
REFUSALS: Cases = {
    "gathering loop": (ITERATION, partial(loop, gathers=True)),
    "loop that goes back twice": (ITERATION, partial(loop, backward_twice=True)),
    "weighted loop": (ITERATION, partial(loop, sampler=at_random)),
    "second loop": (NEW, partial(loop, data=lambda: rows().select(range(20)))),
    "loop of growing rows": (GROWING, partial(loop, epochs=2, data=lambda: Growing(rows()))),
    "loop of other data": (REPLACED, partial(loop, epochs=2, next_data=partial(made_again, changed=True))),
}


if __name__ == "__main__":
    gc.disable()  # a loop that its script leaves writes its metrics at once, not when a collection closes it
    main(Path(sys.argv[1]), sys.argv[2:], CASES, REFUSALS, hook=lambda: hook_accelerator(accelerate.accelerator))
