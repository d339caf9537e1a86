"""The engine of MindSpeed-MM: a subclass that takes its micro-batches from the plan trains; the engine as it is, is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.runtime.integrations.own_loops import refuse_mindspeed_mm
from fcp_cli.verification.replay import take_gradient
from tests.runtime.models import Case, expected
from tests.runtime.wrong_loops import Rank, run

pytestmark = pytest.mark.torch
STEPS = 2


class TrainEngine:
    """A stand-in with the shape of MindSpeed-MM's loop: a fixed number of batches per step, their mean, one update."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.iteration = 0
        self.losses: list[float] = []
        self.gradients: list[Any] = []

    def train_step(self, train_dataloader_iter: Iterator[Any] | None) -> dict[str, float]:
        total = 0.0
        for _ in range(2):
            assert train_dataloader_iter is not None
            loss: Tensor = self.model(**next(train_dataloader_iter), use_cache=False).loss / 2
            torch.autograd.backward(loss)
            total += float(loss)
        return {"loss": total}

    def train(self) -> None:
        while self.iteration < STEPS:
            losses = self.train_step(None)
            self.losses.append(losses["loss"])
            self.gradients.append(take_gradient(self.model))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.iteration += 1


def planned_engine(at: Rank) -> TrainEngine:
    class PlannedEngine(TrainEngine):
        """As docs/how-to/mindspeed.md has it."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.steps = iter(at.session.steps(self.model))

        def train_step(self, train_dataloader_iter: Any) -> dict[str, float]:
            step = next(self.steps)
            for microbatch in step:
                torch.autograd.backward(microbatch.loss(at.logits(microbatch)))
            return {"loss": step.reduced_loss()}

    return PlannedEngine(at.model, torch.optim.SGD(at.model.parameters(), lr=0.0))


def test_a_subclass_over_the_plans_micro_batches_has_losses_and_gradients_of_one_process(tmp_path: Path) -> None:
    def train(at: Rank) -> TrainEngine:
        engine = planned_engine(at)
        engine.train()
        return engine

    engines = run(tmp_path, train, steps=STEPS)
    alone = expected(Case(), tmp_path / "plan.parquet")
    for engine in engines:
        np.testing.assert_allclose(engine.losses, alone.losses, rtol=0.0, atol=1e-12)
        np.testing.assert_allclose(np.stack(engine.gradients), alone.gradients, rtol=0.0, atol=1e-12)


def test_the_engine_as_it_is_says_what_to_write() -> None:
    class Engine(TrainEngine):
        pass

    module = ModuleType("mindspeed_mm.fsdp.train.train_engine")
    module.TrainEngine = Engine  # type: ignore[attr-defined]
    refuse_mindspeed_mm(module)
    with pytest.raises(RunError, match=r"^MindSpeed-MM's TrainEngine takes .*; give a subclass a train_step over the "):
        Engine(nn.Linear(1, 1), None)  # type: ignore[arg-type]

    class Planned(Engine):
        def train_step(self, train_dataloader_iter: Any) -> dict[str, float]:
            return {}

    assert isinstance(Planned(nn.Linear(1, 1), None), Engine)  # type: ignore[arg-type]


def test_a_version_without_the_engine_is_named() -> None:
    with pytest.raises(RunError, match=r"^this MindSpeed-MM has no other\.TrainEngine\.train_step; "):
        refuse_mindspeed_mm(ModuleType("other"))
