from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer
from fcp_cli.training.settings import TrainSettings

pytestmark = pytest.mark.torch


def settings_with(**values: float) -> TrainSettings:
    return TrainSettings(plan=Path("p"), model="m", run_dir=Path("r"), **values)  # type: ignore[arg-type]


def test_the_schedule_rises_to_the_peak_and_falls_to_the_floor() -> None:
    given = settings_with(learning_rate=1.0, warmup_steps=3, min_learning_rate_ratio=0.1)
    rates = [learning_rate_at(step, settings=given, plan_steps=13) for step in range(15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[8] == pytest.approx(0.55)  # half way down
    assert rates[13:] == [pytest.approx(0.1)] * 2


@given(warmup=st.integers(0, 50), steps=st.integers(1, 200), step=st.integers(0, 300))
def test_the_rate_is_positive_and_never_above_the_peak(warmup: int, steps: int, step: int) -> None:
    chosen = settings_with(learning_rate=0.5, warmup_steps=warmup)
    assert 0 < learning_rate_at(step, settings=chosen, plan_steps=steps) <= 0.5


def test_stopping_early_does_not_change_the_schedule() -> None:
    whole, early = settings_with(), settings_with(steps=5)
    assert learning_rate_at(4, settings=whole, plan_steps=20) == learning_rate_at(4, settings=early, plan_steps=20)


def test_only_matrices_are_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    groups = make_optimizer(list(model.parameters()), settings_with(weight_decay=0.2)).param_groups
    assert [(group["weight_decay"], sorted(p.ndim for p in group["params"])) for group in groups] == [
        (0.2, [2]),
        (0.0, [1, 1, 1]),
    ]


def test_clipping_scales_to_the_norm_and_tells_the_norm_before() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(clip_gradients(list(model.parameters()), 1.0)) == pytest.approx(5.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))


def test_zero_leaves_gradients_alone() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert float(clip_gradients(list(model.parameters()), 0.0)) == pytest.approx(5.0)
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
