from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.training.optimizer import clip_gradients, learning_rate_at, make_optimizer
from fcp_cli.training.settings import TrainSettings

pytestmark = [pytest.mark.torch, pytest.mark.hf]


def settings_with(**values: Any) -> TrainSettings:
    return TrainSettings(plan=Path("p"), model="m", run_dir=Path("r"), **values)


def rates_of(steps: int = 15, **values: Any) -> list[float]:
    chosen = settings_with(learning_rate=1.0, **values)
    return [learning_rate_at(step, settings=chosen, plan_steps=13) for step in range(steps)]


def test_the_schedule_rises_to_the_peak_and_falls_to_the_floor() -> None:
    rates = rates_of(warmup_steps=3, min_learning_rate_ratio=0.1)
    assert rates[:4] == [0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert rates[8] == pytest.approx(0.55)  # half way down
    assert rates[13:] == [pytest.approx(0.1)] * 2


@pytest.mark.parametrize(
    ("name", "theirs", "arguments"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 2}),
    ],
)
def test_a_schedule_is_that_of_its_name_in_transformers(name: str, theirs: str, arguments: dict[str, int]) -> None:
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = get_scheduler(theirs, optimizer, 3, 13, scheduler_specific_kwargs=arguments)
    wanted = []
    for _ in range(14):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates_of(14, lr_schedule=name, warmup_steps=3, min_learning_rate_ratio=0.0, wsd_decay_ratio=0.15) == wanted


def test_a_line_ends_at_the_floor_too_and_warm_up_may_be_a_share() -> None:
    rates = rates_of(lr_schedule="linear", warmup_steps=0.2, min_learning_rate_ratio=0.5)
    assert rates[3] == 1.0
    assert rates[8] == pytest.approx(0.75)
    assert rates[13:] == [pytest.approx(0.5)] * 2
    assert rates_of(lr_schedule="wsd", warmup_steps=0.999)[13:] == [1.0] * 2  # warm-up alone


@given(
    name=st.sampled_from(("constant", "linear", "cosine", "wsd")),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 200),
    step=st.integers(0, 300),
    floor=st.sampled_from((0.0, 0.1, 1.0)),
)
def test_the_rate_is_never_negative_nor_above_the_peak(
    name: Any, warmup: int, steps: int, step: int, floor: float
) -> None:
    chosen = settings_with(learning_rate=0.5, lr_schedule=name, warmup_steps=warmup, min_learning_rate_ratio=floor)
    assert 0 <= learning_rate_at(step, settings=chosen, plan_steps=steps) <= 0.5


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
