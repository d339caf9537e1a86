"""Training shared out in every way computes what one process does: one launch of four gloo ranks runs the examples."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inline_snapshot import snapshot

from tests.runtime.launch import torchrun
from tests.training.workers.zero_worker import FORWARD
from tests.training.zero_cases import (
    CASES,
    COARSE,
    EXACT,
    EXAMPLES,
    LAYER_GROUPS,
    NUM_RANKS,
    RESUMING,
    RESUMING_EXAMPLES,
    SINGLE,
    STEPS,
    Case,
    Trained,
    train_alone,
    write_inputs,
)

pytestmark = [pytest.mark.hf, pytest.mark.distributed]


@cache
def job(*, full: bool) -> dict[str, Any]:
    """Case -> what the ranks left, and "alone SYNC PRECISION" -> what one process computes; full: of every case."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder)
        torchrun("-m", "tests.training.workers.zero_worker", name, *(["full"] if full else []), num_ranks=NUM_RANKS)
        found = {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.pickle")}
        alone = {
            f"alone {sync} {precision}": train_alone(folder, Case(sync=sync, precision=precision))
            for sync in ("iteration", "microbatch")
            for precision in ("fp64", "fp32")
        }
        return {**found, **alone}


def job_of(name: str) -> dict[str, Any]:
    """The launch that a case is tested by."""
    return job(full=name not in EXAMPLES)


def alone(name: str, precision: str) -> Trained:
    trained: Trained = job_of(name)[f"alone {CASES[name].sync} {precision}"]
    return trained


def examples(names: Iterable[str]) -> list[Any]:
    """Names of cases for parametrisation, of which all but the examples wait for `make test-full`."""
    return [pytest.param(name, marks=() if name in EXAMPLES else pytest.mark.full) for name in names]


def flat(tensors: dict[str, np.ndarray], like: Trained) -> np.ndarray:
    assert tensors.keys() == like.weights.keys()
    return np.concatenate([tensors[name].ravel() for name in like.weights])


def distance(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], like: Trained) -> float:
    """Relative L2 distance."""
    reference = flat(wanted, like)
    return float(np.linalg.norm(flat(found, like) - reference) / np.linalg.norm(reference))


def after_the_comparison(seen: list[str]) -> list[str]:
    """The collectives of a step after its first, which compares what the members of each ring have loaded."""
    assert seen[0] == "allreduce"
    return seen[1:]


@pytest.mark.parametrize("name", examples(EXACT))
def test_fp64_gradients_and_weights_after_three_steps_are_those_of_one_process(name: str) -> None:
    """Unequal micro-batches, recomputation, tied weights, clipping in every step, shares of unequal size or none."""
    found, wanted = job_of(name)[name][0], alone(name, "fp64")
    assert min(wanted.norms) > 0.1  # else nothing is clipped
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert np.abs(flat(ours, wanted) - flat(theirs, wanted)).max() <= 1e-12
    assert np.abs(np.array(found.norms) - wanted.norms).max() <= 1e-12
    assert np.abs(flat(found.weights, wanted) - flat(wanted.weights, wanted)).max() <= 1e-12


@pytest.mark.parametrize("name", examples(SINGLE))
def test_fp32_gradients_and_weights_are_those_of_one_process_up_to_the_order_of_sums(name: str) -> None:
    """2e-6 relative (L2): some ten roundings of 1.2e-7 each, of sums over tokens and ranks in another order."""
    found, wanted = job_of(name)[name][0], alone(name, "fp32")
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert distance(ours, theirs, wanted) <= 2e-6
    assert distance(found.weights, wanted.weights, wanted) <= 2e-6


@pytest.mark.parametrize("name", examples(COARSE))
def test_bfloat16_stays_near_and_every_stage_computes_the_same(name: str) -> None:
    """4e-2 of fp32: roundings of 4e-3 each through two layers. Between stages only the order of fp32 sums differs."""
    found, wanted = job_of(name)[name][0], alone(name, "fp32")
    for ours, theirs in zip(found.gradients, wanted.gradients, strict=True):
        assert 1e-4 < distance(ours, theirs, wanted) <= 4e-2
    if COARSE[name].sync == "iteration":
        same = job_of(name)[f"0 iteration, {COARSE[name].precision}"][0]
        assert distance(found.gradients[0], same.gradients[0], wanted) <= 2e-6


@pytest.mark.parametrize("name", examples(name for name, case in EXACT.items() if case.zero < 3))
def test_no_collective_runs_between_micro_batches_and_weights_are_gathered_once_a_step(name: str) -> None:
    case = EXACT[name]
    copied = case.shard_ranks is not None
    for steps in job_of(name)[name][1]:
        assert len(steps) == STEPS
        for seen in map(after_the_comparison, steps):
            first, last = seen.index(FORWARD), len(seen) - seen[::-1].index(FORWARD)
            assert set(seen[first:last]) == {FORWARD}
            gathers, reductions = seen[:first], seen[last:]
            assert gathers == (["allgather_base"] * LAYER_GROUPS if case.zero == 2 else [])
            if case.zero == 2:
                assert reductions.count("reduce_scatter_base") == LAYER_GROUPS
                assert reductions.count("allreduce") == (LAYER_GROUPS if copied else 0)
            else:  # whether a rank misses a gradient, then one message of this small model
                scattered = ["reduce_scatter_base"] if case.zero == 1 else []
                assert reductions == ["allreduce", *scattered, *(["allreduce"] if copied or not case.zero else [])]


@pytest.mark.parametrize("name", examples(name for name, case in EXACT.items() if case.zero == 3))
def test_stage_3_reduces_in_every_wave_or_once_a_step_and_sums_copies_once(name: str) -> None:
    case = EXACT[name]
    for steps in job_of(name)[name][1]:
        for seen in map(after_the_comparison, steps):
            waves = seen.count(FORWARD)
            assert seen.count("reduce_scatter_base") == LAYER_GROUPS * (waves if case.reduce == "wave" else 1)
            assert seen.count("allreduce") == (LAYER_GROUPS if case.shard_ranks else 0)
    assert max(seen.count(FORWARD) for seen in job_of(name)[name][1][0]) == 2


@pytest.mark.parametrize(
    ("then", "now"),
    [pytest.param(*pair, marks=() if pair in RESUMING_EXAMPLES else pytest.mark.full) for pair in RESUMING],
)
def test_a_run_resumes_under_any_stage_with_the_same_bits(then: str, now: str) -> None:
    """Weights (of bf16: their fp32 masters) and Adam's moments; the next step is the same under the same stage."""
    found = job(full=(then, now) not in RESUMING_EXAMPLES)
    saved, resumed = found[f"saved {then}"], found[f"{then} to {now}"]
    loaded, wanted = resumed["loaded"], saved["saved"]
    assert loaded.weights.keys() == wanted.weights.keys()
    assert all((loaded.weights[name] == wanted.weights[name]).all() for name in wanted.weights)
    assert len(loaded.moments) == len(wanted.moments) == len(wanted.weights)
    for ours, theirs in zip(loaded.moments, wanted.moments, strict=True):
        assert all((ours[name] == theirs[name]).all() and theirs[name].any() for name in ("exp_avg", "exp_avg_sq"))
    straight = found[f"saved {now}"]["after"]
    if then == now:
        assert all((resumed["after"].weights[name] == straight.weights[name]).all() for name in straight.weights)
    else:
        assert distance(resumed["after"].weights, straight.weights, straight) <= 2e-6


def test_master_weights_hold_what_bfloat16_cannot() -> None:
    weights = flat(job(full=False)["1 iteration, bf16"][0].weights, job(full=False)["alone iteration fp32"]).astype(
        np.float32
    )
    truncated = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert (weights != truncated).mean() > 0.9


def test_a_number_of_ranks_that_does_not_divide_is_one_line() -> None:
    assert job(full=False)["refused"] == snapshot(
        "--shard-ranks is 3, which does not divide the 4 ranks; give --shard-ranks 2, or remove it to shard one copy over all ranks"
    )


@pytest.mark.parametrize("name", ["loss 1", "loss 3", "gradient 0"])
def test_a_step_that_is_not_finite_is_left_out_by_all_ranks_and_the_next_goes_on(name: str) -> None:
    """One rank's loss, or the gradients alone; weights and moments stay as the step found them."""
    found = job(full=False)[f"{name} skip-step"]
    first, skipped, last = (found["saved"][step] for step in (1, 2, 3))
    assert np.isnan(found["after"].norms[1]) or np.isinf(found["after"].norms[1])
    for weight, before in first.weights.items():
        np.testing.assert_array_equal(skipped.weights[weight], before)
        assert np.isfinite(last.weights[weight]).all()
    assert any((last.weights[weight] != before).any() for weight, before in first.weights.items())
    for before, after in zip(first.moments, skipped.moments, strict=True):
        for moment in before:
            np.testing.assert_array_equal(after[moment], before[moment])


def test_a_run_stops_at_gradients_that_are_not_finite() -> None:
    assert job(full=False)["gradient 0 stop"]["said"].startswith("step 1: the norm of the gradients is ")
    assert job(full=False)["gradient 0 stop"]["said"].endswith(
        "; lower --learning-rate, or skip such steps with --on-nan skip-step"
    )
