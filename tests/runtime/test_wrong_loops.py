"""Loops that would train wrong, in silence or without end, stop where they go wrong, with one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.runtime.choices import OnNan
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.guards import LossWatch
from fcp_cli.runtime.metrics import Clock
from fcp_cli.runtime.rank_agreement import digest
from fcp_cli.runtime.session import outside
from fcp_cli.verification.emulation import gradients_alone, replay_alone, synthetic_tokens, take_gradient
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, plain_attend
from tests.runtime.models import VOCAB_SIZE
from tests.runtime.wrong_loops import LOOPS, Rank, backward, random_labels, random_tokens, run, train

pytestmark = pytest.mark.torch

NO_BACKWARD = "no backward of its loss was run: gradients are summed over ranks when the loop over the step ends, so call backward inside it, for every micro-batch"
EQUALLY = r"run the model equally often in each micro-batch on every rank, and passes that only some ranks need in 'with fcp.outside\(\):'"
SAID = {
    "backward_after_the_loop": rf"step 0, micro-batch 0, rank \d: {NO_BACKWARD}",
    "backward_never": rf"step 0, micro-batch 0, rank \d: {NO_BACKWARD}",
    "backward_of_some": rf"step 0, micro-batch \d, rank \d: {NO_BACKWARD}",
    "mean_of_a_rank": r"step 0, micro-batch 0, rank \d: backward was called on a loss that the micro-batch did not make, and a mean of a rank's own weighs tokens by how the plan packed them: use microbatch.loss\(logits\), or microbatch.normalised\(sum of token losses\)",
    "second_model": r"step 0, micro-batch 0, rank \d: the loss trains (weight|bias) of a Linear, which is not in the model given to steps\(\), so its gradients would not be summed over the 2 ranks: give steps\(\) one module that holds all that is trained, for example an nn.ModuleList of them",
    "no_model": r"step 0, micro-batch 0, rank \d: steps\(\) was given no model, so nothing sums the gradients of [\w.]+ of a TinyLanguageModel over the 2 ranks: pass the model to steps\(\), or, where the script sums them itself, fcp_cli.runtime.GradientSync\(\)",
    "evaluation_inside": r"step 0, micro-batch 0, rank \d: the model was called with 40 tokens, but its shard of the micro-batch has 1\d: give it the micro-batch's own, and evaluate or generate in 'with fcp.outside\(\):'",
    "one_more_forward": r"step 0, micro-batch 3, rank 1: the forward of attention runs more often than in the micro-batches before \(2 times\), and the other ranks of its ring may not run it: run the model equally often in each micro-batch on every rank, and passes that only some ranks need in 'with fcp.outside\(\):'",
    "one_more_forward_at_once": rf"step 0, micro-batch 0, rank \d: this rank begins (forward 3 of attention, but rank 0 of its ring begins backward 1|backward 1 of attention, but rank 1 of its ring begins forward 3): {EQUALLY}",
    "one_more_forward_after_its_backward": rf"step 0, micro-batch [03], rank \d: this rank begins forward [13] of attention, but rank \d of its ring begins forward [13] in micro-batch [03]: {EQUALLY}",
    "one_more_forward_before_all_backwards": rf"step 0, micro-batch \d, rank \d: this rank begins forward [13] of attention, but rank \d of its ring begins forward [13] in micro-batch [03]: {EQUALLY}",
    "one_more_backward_at_once": rf"step 0, micro-batch [03], rank \d: this rank begins (backward 3|forward 1) of attention, but rank \d of its ring begins (backward 3|forward 1) in micro-batch [03]: {EQUALLY}",
    "one_more_backward": r"step 1, micro-batch 0, rank 1: the backward of attention runs more often than in the micro-batches before \(2 times\), and .*",
    "other_first_step": r"rank 1 begins with step 1, rank 0 with step 0: they were resumed from different checkpoints; load the same one on every rank, and pass its step as first_step",
    "infinite_loss": r"step 1, micro-batch 2, rank 1: the loss is nan \(rows 8 of the data\); look at these rows, lower the learning rate, or skip such steps with on_nan='skip-step' \(--on-nan skip-step\)",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_wrong_loop_is_stopped_with_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as stopped:
        run(tmp_path, LOOPS[name])
    assert re.fullmatch(SAID[name], str(stopped.value)), stopped.value


@pytest.mark.parametrize(
    ("fetch", "where"), [(random_tokens, "micro-batch 3: .* row 4"), (random_labels, "micro-batch 0: .* row 0")]
)
def test_ranks_of_a_ring_that_are_given_different_data_are_named(fetch: Any, where: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as stopped:
        run(tmp_path, right_loop, fetch=fetch)
    micro_batch, row = where.split(": .* ")
    assert str(stopped.value) == (
        f"step 0, {micro_batch}: fetch gave rank 1 other tokens or labels for {row} of the data than rank 0, and both "
        "train on parts of it; make fetch a function of the row alone (draw a random mask from a generator that is "
        "seeded with it)"
    )


def right_loop(at: Rank) -> Any:
    gradients = []
    for step in at.session.steps(at.model):
        train(step, at)
        gradients.append(take_gradient(at.model))
    return gradients


def test_digests_differ_by_content_and_by_place() -> None:
    ids = torch.arange(7)
    assert digest([ids, ids]) == digest([ids.clone(), ids])
    assert len({digest([ids]), digest([ids, ids]), digest([ids.flip(0)]), digest([torch.cat((ids, ids[:1]))])}) == 4


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_accumulated_over_steps(set_to_none: bool, tmp_path: Path) -> None:
    """As one process does: the sum over two steps, then two more."""

    def accumulate(at: Rank) -> list[Any]:
        found = []
        for step in at.session.steps(at.model):
            train(step, at)
            if step.index % 2:
                found.append(np.concatenate([p.grad.flatten().numpy() for p in at.model.parameters()]))  # type: ignore[union-attr]
                at.model.zero_grad(set_to_none=set_to_none)
        return found

    found = run(tmp_path, accumulate, steps=4)
    alone = replay_alone(tmp_path / "plan.parquet", TinyConfig()).gradients
    for rank in found:
        np.testing.assert_allclose(rank, [alone[0] + alone[1], alone[2] + alone[3]], rtol=0, atol=1e-12)


def test_a_script_may_say_that_it_sums_gradients_itself(tmp_path: Path) -> None:
    def own_sum(at: Rank) -> Any:
        for step in at.session.steps(GradientSync()):
            train(step, at)
            for parameter in at.model.parameters():
                at.session.world.all_reduce_sum(parameter.grad)  # type: ignore[arg-type]
        return take_gradient(at.model)

    found = run(tmp_path, own_sum, steps=1)
    alone = replay_alone(tmp_path / "plan.parquet", TinyConfig()).gradients[0]
    np.testing.assert_allclose(found, [alone, alone], rtol=0, atol=1e-12)


def test_several_models_are_trained_as_one_list(tmp_path: Path) -> None:
    def two(at: Rank) -> Any:
        torch.manual_seed(0)
        scale = nn.Linear(61, 61, dtype=torch.float64)
        both = nn.ModuleList([at.model, scale])
        for step in at.session.steps(both):
            for batch in step:
                backward(batch.loss(scale(at.logits(batch))))
        return take_gradient(both)

    first, second = run(tmp_path, two, steps=1)
    np.testing.assert_array_equal(first, second)


def bad_in_step_1(at: Rank, on_nan: OnNan) -> list[Any]:
    """Return (whether the step was skipped, whether the weights are finite) of each step."""
    optimizer = torch.optim.AdamW(at.model.parameters())
    found = []
    for step in at.session.steps(at.model, on_nan=on_nan):
        for batch in step:
            bad = at.rank == 1 and step.index == 1 and batch.row.order == 2
            logits = at.logits(batch)
            backward(batch.loss(logits * float("inf") if bad else logits))
        optimizer.step()
        optimizer.zero_grad()
        weights = torch.cat([parameter.flatten() for parameter in at.model.parameters()])
        found.append((step.is_skipped, float(weights.detach().sum())))
    return found


def test_a_step_without_a_finite_loss_is_skipped_by_all_ranks(tmp_path: Path) -> None:
    first, second = run(tmp_path, lambda at: bad_in_step_1(at, "skip-step"), steps=3)
    assert first == second
    assert [is_skipped for is_skipped, _ in first] == [False, True, False]
    sums = [total for _, total in first]
    assert sums[0] == sums[1] != sums[2]
    assert np.isfinite(sums).all()


def test_a_loop_may_go_on_after_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    for rank in run(tmp_path, lambda at: bad_in_step_1(at, "go-on")):
        assert not any(is_skipped for is_skipped, _ in rank)
        assert np.isnan(rank[1][1])


class LateClock(Clock):
    """A clock of a device that has not come to a mark before it is told."""

    def __init__(self) -> None:
        self.passed = False

    def mark(self) -> int:
        return 0

    def seconds(self, earlier: Any, later: Any) -> float:
        return 0.0

    def has_passed(self, mark: Any) -> bool:
        return self.passed


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loss_of_a_device_is_looked_at_when_it_is_there() -> None:
    clock = LateClock()
    watch = LossWatch(clock)
    watch.check("step 3, micro-batch 1, rank 0", (7,), torch.tensor(float("inf"), device="cuda"))
    torch.cuda.synchronize()
    watch.poll()
    clock.passed = True
    with pytest.raises(RunError, match=r"^step 3, micro-batch 1, rank 0: the loss is inf \(rows 7 of the data\)"):
        watch.poll()


def test_evaluation_outside_the_plan_gives_the_models_own_numbers(tmp_path: Path) -> None:
    """Between steps and inside a micro-batch, on some ranks alone, and nothing that is trained changes by it."""
    ids, positions = torch.arange(40)[None] % 61, torch.arange(40)[None]
    batch_of_two = torch.stack((ids[0], ids[0].flip(0)))

    def evaluate(at: Rank) -> tuple[Tensor, Tensor]:
        with outside(), torch.no_grad():
            return at.model(ids, positions), at.model(batch_of_two, positions.expand(2, -1))

    def loop(at: Rank) -> Any:
        found, gradients = [evaluate(at)], []
        for step in at.session.steps(at.model):
            for batch in step:
                loss = batch.loss(at.logits(batch))
                if at.rank == 0:
                    found.append(evaluate(at))
                backward(loss)
            with at.session.outside():
                found.append(evaluate(at))
            gradients.append(take_gradient(at.model))
        return found, gradients

    results = run(tmp_path, loop)
    alone = TinyLanguageModel(TinyConfig(), plain_attend)
    with torch.no_grad():
        expected, expected_of_two = alone(ids, positions), alone(batch_of_two, positions.expand(2, -1))
    gradients = replay_alone(tmp_path / "plan.parquet", TinyConfig()).gradients
    for found, of_rank in results:
        for one, two in found:
            torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(two, expected_of_two, rtol=0, atol=1e-12)
        np.testing.assert_allclose(of_rank, gradients, rtol=0, atol=1e-12)


def test_a_reference_model_may_run_beside_the_one_that_is_trained(tmp_path: Path) -> None:
    """On the same ring, without gradients: its attention follows the plan as that of the other does."""

    def distil(at: Rank) -> Any:
        reference = TinyLanguageModel(TinyConfig(), at.model.blocks[0].attend, seed=1)  # type: ignore[index, union-attr]
        values = []
        for step in at.session.steps(at.model):
            for batch in step:
                with torch.no_grad():
                    values.append(float(batch.loss(reference(batch.input_ids, batch.position_ids))))
                backward(batch.loss(at.logits(batch)))
        return take_gradient(at.model), np.sum(values)

    (first, a), (second, b) = run(tmp_path, distil, steps=1)
    alone = replay_alone(tmp_path / "plan.parquet", TinyConfig()).gradients[0]
    np.testing.assert_allclose([first, second], [alone, alone], rtol=0, atol=1e-12)
    other = TinyLanguageModel(TinyConfig(), plain_attend, seed=1)
    plan = tmp_path / "plan.parquet"
    assert a + b == pytest.approx(
        gradients_alone(plan, synthetic_tokens(plan, VOCAB_SIZE), other, other).losses[0], abs=1e-12
    )
