from __future__ import annotations

import time
from typing import Any

import pytest

from fcp_cli.cost.recipe import Recipe
from fcp_cli.profiling.points import Point

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.mark.parametrize(
    ("degree", "crosses", "groups"),
    [
        (1, False, [(0,), (1,), (2,), (3,)]),
        (2, False, [(0, 1), (2, 3)]),
        (2, True, [(0, 2), (1, 3)]),
        (3, False, []),
        (3, True, [(0, 1, 2)]),
        (4, True, [(0, 1, 2, 3)]),
    ],
)
def test_groups_fill_the_ranks_inside_or_across_two_nodes(
    degree: int, crosses: bool, groups: list[tuple[int, ...]]
) -> None:
    from fcp_cli.profiling.workload import groups_of

    point = Point(lengths=(64,), degree=degree, crosses_nodes=crosses)
    assert groups_of(point, world=4, ranks_per_node=2) == groups


def test_one_rank_runs_a_member_of_any_ring_with_finite_gradients() -> None:
    gradients = _gradients(Recipe(precision="fp32"), degrees=(1, 2, 3))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(precision="fp32", recompute="full"),
        Recipe(precision="fp32", recompute="selective"),
        Recipe(precision="fp32", loss="plain"),
        Recipe(precision="fp32", recompute="full", offload="activations"),
        Recipe(precision="amp", recompute="selective"),
        Recipe(precision="bf16"),
    ],
    ids=lambda recipe: recipe.describe(),
)
def test_packs_run_under_every_recipe_with_the_same_gradients(recipe: Recipe) -> None:
    exact, found = _gradients(Recipe(precision="fp32")), _gradients(recipe)
    bound = 1e-5 if recipe.precision == "fp32" else 5e-2
    wanted, seen = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in (exact, found))
    assert seen.dtype == torch.float32  # bf16's gradients are summed in fp32, as a job keeps them
    assert (seen - wanted).norm() <= bound * wanted.norm()


def _gradients(recipe: Recipe, degrees: tuple[int, ...] = (1,)) -> list[Any]:
    """Gradients after each member of rings of these degrees ran, what it would receive being its own."""
    from fcp_cli.models.model import load_model
    from fcp_cli.profiling.workload import SilentTransport, Workload, build_model

    cpu = torch.device("cpu")
    torch.manual_seed(0)
    drawn = build_model(load_model("qwen3-tiny"), 2, cpu, Recipe(precision="fp32")).state_dict()
    model = build_model(load_model("qwen3-tiny"), 2, cpu, recipe)
    model.load_state_dict(drawn)
    workload = Workload(model, cpu, recipe, SilentTransport())
    for degree in degrees:
        for index in range(degree):
            workload.microbatch((65, 31), range(degree), index)()
    found = [holder.grad for holder in workload.gradient_holders()]
    assert len(found) == len(list(workload.model.parameters())) and all(one is not None for one in found)
    return found


def test_the_end_of_a_step_updates_a_share_and_leaves_the_weights() -> None:
    from fcp_cli.models.model import load_model
    from fcp_cli.profiling.workload import SilentTransport, UpdateStep, Workload, build_model, state_bytes
    from fcp_cli.verification.emulation import Meeting, ThreadWorld

    cpu, recipe = torch.device("cpu"), Recipe(precision="bf16")
    workload = Workload(build_model(load_model("qwen3-tiny"), 1, cpu, recipe), cpu, recipe, SilentTransport())
    before = [parameter.clone() for parameter in workload.model.parameters()]
    workload.microbatch((64,), (0,), 0)()
    sizes = []
    for share in (1.0, 0.25):
        step = UpdateStep(workload, ThreadWorld(Meeting(1), 0), share=share)
        step.run()
        sizes.append(state_bytes(step.optimizer))
    assert 0.25 * sizes[0] <= sizes[1] < sizes[0]
    assert all(map(torch.equal, before, workload.model.parameters()))


def test_fewer_layers_leave_the_others_without_gradient() -> None:
    from fcp_cli.models.model import load_model
    from fcp_cli.profiling.workload import SilentTransport, Workload, build_model

    cpu = torch.device("cpu")
    recipe = Recipe(precision="fp32")
    model: Any = build_model(load_model("qwen3-tiny"), 2, cpu, recipe)
    workload = Workload(model, cpu, recipe, SilentTransport())
    workload.set_layers(1)
    workload.microbatch((64,), (0,), 0)()
    first, second = model.model.layers
    assert first.mlp.up_proj.weight.grad is not None
    assert second.mlp.up_proj.weight.grad is None


def test_a_stopwatch_shows_the_time_that_was_computed() -> None:
    from fcp_cli.profiling.timing import Stopwatch

    computed = 0.0

    def work() -> None:
        nonlocal computed
        begin = time.thread_time()
        torch.ones(256, 256) @ torch.ones(256, 256)
        computed = time.thread_time() - begin

    seconds = Stopwatch(torch.device("cpu")).measure(work)
    assert seconds >= computed > 0


class FakeClock:
    """Shows what it is set to."""

    now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@pytest.mark.parametrize(("shares_cores", "seconds"), [(True, 50.0), (False, 20.0)])
def test_waiting_for_a_core_counts_only_where_ranks_share_cores(
    shares_cores: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.profiling import timing

    clock, waited = FakeClock(), [0.0]
    monkeypatch.setattr(timing, "clock_for", lambda _: clock)
    monkeypatch.setattr(timing, "run_queue_seconds", lambda: waited[0])

    def work() -> None:
        clock.now += 50.0
        waited[0] += 30.0  # of these another process had the core

    assert timing.Stopwatch(torch.device("cpu"), shares_cores=shares_cores).measure(work) == seconds
