"""One rank that trains cases of `zero_cases` in turn on one process group; rank 0 leaves `CASE.pickle` files.

Run by torchrun as `-m tests.training.workers.zero_worker FOLDER [full]`: the examples, or every case. The folder holds
the plans and the model.
"""

from __future__ import annotations

import faulthandler
import pickle
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fcp_cli.errors import FcpError
from fcp_cli.runtime.choices import OnNan
from fcp_cli.runtime.session import start
from fcp_cli.runtime.step import LocalMicroBatch, Step
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.training.data import open_data
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.trainer import Trainer
from tests.patience import PATIENCE_SECONDS
from tests.runtime.workers.leave import leave_job
from tests.training.zero_cases import (
    CASES,
    EXACT,
    EXAMPLES,
    NOT_FINITE,
    RESUMING,
    RESUMING_EXAMPLES,
    SAVED_STEPS,
    SAVING,
    STEPS,
    VOCAB_SIZE,
    Case,
    Trained,
)

FORWARD = "forward"  # a mark in the record of collectives


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collectives of this rank, and where its micro-batches begin."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname not in ("send", "recv_"):
            self.seen.append(func._opname.strip("_"))
        return func(*args, **(kwargs or {}))


class WatchedTrainer(Trainer):
    """The bundled trainer; looks at the gradients before each update, and at what a checkpoint is made of."""

    def watch(self, record: Collectives) -> None:
        self.record, self.collectives = record, list[list[str]]()
        self.gradients, self.norms = list[dict[str, np.ndarray]](), list[float]()
        self.saved = dict[int, Trained]()
        self.model.register_forward_pre_hook(lambda *ignored: record.seen.append(FORWARD))

    def _update(self, step: Step) -> tuple[float, Tensor]:
        self.collectives.append(list(self.record.seen))
        self.gradients.append(self.whole({name: weight.grad for name, weight in self.weights.items()}))
        rate, norm = super()._update(step)
        self.norms.append(float(norm))
        return rate, norm

    def _train_step(self, *arguments: Any) -> Any:
        self.record.seen.clear()  # of the step before: what ranks measured
        return super()._train_step(*arguments)

    def _save(self, finished: int) -> None:
        super()._save(finished)
        self.saved[finished] = self.state()

    def state(self) -> Trained:
        """What training has come to; one message for all of it, since this is asked for some hundred times."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.trained]
        names = ("exp_avg", "exp_avg_sq")
        moments_held = {f"{i} {name}": state.get(name) for i, state in enumerate(states) for name in names}
        found = self.whole({**self.weights, **moments_held})
        weights = {name: found[name] for name in self.weights}
        for name, parameter in self.model.named_parameters():  # a replica computes with what was updated
            if not isinstance(parameter, DTensor):
                held = torch.as_tensor(weights[name]).to(parameter.dtype)
                assert torch.equal(parameter.detach(), held), name
        moments = [{name: found[f"{i} {name}"] for name in names if f"{i} {name}" in found} for i in range(len(states))]
        return Trained(gradients=[], norms=[], weights=weights, moments=moments)

    def whole(self, parts: Mapping[str, Tensor | None]) -> dict[str, np.ndarray]:
        """What all ranks keep of something that is cut as weights are; equal in every copy."""
        local = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in parts.items()}
        arrays = {name: part.detach().double().numpy() for name, part in local.items() if part is not None}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, arrays)
        found, count = {}, self.shares.count
        for name in arrays:
            pieces = [theirs[name] for theirs in everyone]
            copies = [np.concatenate(pieces[first : first + count]) for first in range(0, len(pieces), count)]
            assert all(np.array_equal(copy, copies[0], equal_nan=True) for copy in copies), name
            found[name] = copies[0]
        return found


@contextmanager
def trainer_of(settings: TrainSettings) -> Iterator[WatchedTrainer]:
    fetch = open_data(settings.plan, (), vocab_size=VOCAB_SIZE, seed=0)
    with start(settings.plan, fetch) as session, closing(WatchedTrainer(settings, session)) as trainer:
        trainer.watch(Collectives())
        yield trainer


def train(trainer: WatchedTrainer, *, recorded: bool = False) -> Trained:
    with trainer.record if recorded else nullcontext():  # a record looks at every operation of PyTorch
        assert trainer.run(StopRequest())
    return replace(trainer.state(), gradients=trainer.gradients, norms=trainer.norms)


def train_case(folder: Path, name: str, case: Case) -> tuple[Trained, list[list[list[str]]]]:
    """What came out, and the collectives of each step of each rank."""
    with trainer_of(case.settings(folder, folder / name, checkpoint_every=0)) as trainer:
        after = train(trainer, recorded=name in EXACT)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trainer.collectives)
        return after, everyone


def save(folder: Path, name: str, case: Case) -> dict[str, Trained]:
    """Train all steps, with a checkpoint on the way; what it was made of, and what came out."""
    with trainer_of(case.settings(folder, folder / f"saved {name}", checkpoint_every=SAVED_STEPS)) as trainer:
        after = train(trainer)
        return {"saved": trainer.saved[SAVED_STEPS], "after": after}


def resume(folder: Path, then: str, now: str) -> dict[str, Trained]:
    """Train the last step in one way on what another one saved; what was loaded, and what came out."""
    run_dir = folder / f"{then} to {now}"
    if dist.get_rank() == 0:
        # Without its owner, which is this process.
        shutil.copytree(folder / f"saved {then}", run_dir, ignore=shutil.ignore_patterns("owner.json"))
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    dist.barrier()
    # No launcher keeps metrics of these jobs.
    with trainer_of(SAVING[now].settings(folder, run_dir, resume=True, accept_unrecorded=True)) as trainer:
        assert trainer.first_step == SAVED_STEPS
        return {"loaded": trainer.state(), "after": train(trainer)}


def not_finite(folder: Path, name: str, case: Case, on_nan: OnNan) -> dict[str, Any]:
    """Train on while rank 1's loss, or every rank's gradient, is not finite in step 1; what came out, or was said."""
    settings = case.settings(
        folder, folder / f"not finite {name} {case.zero} {on_nan}", on_nan=on_nan, checkpoint_every=1
    )
    with trainer_of(settings) as trainer:
        at: list[int] = []
        whole, parameter = trainer._loss, next(trainer.model.parameters())

        def loss(microbatch: LocalMicroBatch) -> Tensor:
            at[:] = [microbatch.row.step]
            made = whole(microbatch)
            if name == "loss" and at == [1] and trainer.session.rank == 1:
                return microbatch.normalised(made * float("nan"))
            return made

        if name != "loss":
            parameter.register_hook(lambda gradient: gradient * (float("inf") if at == [1] else 1.0))  # type: ignore[no-untyped-call]
        trainer._loss = loss  # type: ignore[method-assign]
        try:
            after = train(trainer)
        except FcpError as error:
            return {"said": str(error)}
        return {"saved": trainer.saved, "after": after}


def main(folder: Path, *, full: bool) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))

    def leave(name: str, result: Any) -> None:
        if dist.get_rank() == 0:
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(result))

    for name, case in CASES.items():
        if full or name in EXAMPLES:
            leave(name, train_case(folder, name, case))
    for name, case in SAVING.items():
        leave(f"saved {name}", save(folder, name, case))
    for then, now in RESUMING:
        if full or (then, now) in RESUMING_EXAMPLES:
            leave(f"{then} to {now}", resume(folder, then, now))
    for name, case, on_nan in NOT_FINITE:
        leave(f"{name} {case.zero} {on_nan}", not_finite(folder, name, case, on_nan))
    try:
        train_case(folder, "refused", Case(zero=1, shard_ranks=3))
    except FcpError as error:
        leave("refused", str(error))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), full="full" in sys.argv[2:])
