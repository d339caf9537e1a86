"""Unmodified scripts that train vision-language models by the Trainer compute under a plan what they compute without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import torchrun
from tests.runtime.trainer_outcomes import Outcomes, read_outcomes, require_equal
from tests.runtime.vision_models import Family
from tests.runtime.vision_trainer_plans import write_vision_plan

pytestmark = [pytest.mark.hf, pytest.mark.distributed]

_CASES = ("qwen3_vl", "gemma3")
_REMAINING = ("qwen3_vl frozen", "qwen2_5_vl", "internvl", "gemma3 frozen")
_FOUR_RANKS = ("qwen3_vl", "internvl frozen")
_FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "internvl", "gemma3")


def run(tmp_path_factory: pytest.TempPathFactory, *names: str, num_ranks: int = 2) -> Outcomes:
    folder: Path = tmp_path_factory.mktemp("vision-trainer")
    for family in _FAMILIES:
        write_vision_plan(folder, family, num_ranks)
    torchrun(
        "-m", "tests.runtime.workers.vision_trainer_worker", str(folder), str(num_ranks), *names, num_ranks=num_ranks
    )
    return read_outcomes(folder, num_ranks)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(tmp_path_factory, *_CASES)


@pytest.fixture(scope="module")
def remaining(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(tmp_path_factory, *_REMAINING)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(tmp_path_factory, *_FOUR_RANKS, num_ranks=4)


@pytest.mark.parametrize("name", _CASES)
def test_losses_norms_and_weights_are_those_of_the_script_without_a_plan(outcomes: Outcomes, name: str) -> None:
    require_equal(outcomes, name, most=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", _REMAINING)
def test_so_they_are_of_the_other_families_frozen_recomputed_and_in_other_batches(
    remaining: Outcomes, name: str
) -> None:
    require_equal(remaining, name, most=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", _FOUR_RANKS)
def test_so_they_are_on_four_ranks(on_four_ranks: Outcomes, name: str) -> None:
    require_equal(on_four_ranks, name, most=1e-6)
