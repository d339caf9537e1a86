from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.profile import dump_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.errors import UsageError
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.settings import resolve_problem
from fcp_cli.profiling import choices
from fcp_cli.profiling.choices import choose_measurement, computed_profile
from fcp_cli.profiling.options import ProfileRequest
from fcp_cli.util.console import Assumptions
from fcp_cli.util.machine import LocalDevices

UNSET, SAMPLES = ProfileRequest(), Path("profile.samples.jsonl")
pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to run on a machine."""

    def pretend(device: str, num_devices: int, name: str = "", memory_bytes: float = 0.0) -> None:
        machine = LocalDevices(device=device, num_devices=num_devices, num_cores=4)
        monkeypatch.setattr(choices, "find_machine", lambda wanted: machine)
        monkeypatch.setattr(choices, "_device", lambda kind: (name, memory_bytes))

    return pretend


def test_a_cpu_measures_the_tiny_model_on_a_rank_per_core(on: Any) -> None:
    on("cpu", 0)
    assumptions = Assumptions()
    settings = choose_measurement(UNSET, SAMPLES, assumptions)
    assert (settings.model, settings.ranks, settings.degrees) == ("qwen3-tiny", 4, (1, 2, 3, 4))
    assert (settings.device, settings.layers) == ("cpu", (2,))
    assert (settings.recipe, settings.sync) == (Recipe(precision="fp32"), "iteration")
    assert settings.budget_seconds == 60
    assert assumptions.assumed["--model"] == "qwen3-tiny (small enough for a CPU)"


def test_more_ranks_than_cores_are_said_to_share_them(on: Any) -> None:
    on("cpu", 0)
    assumptions = Assumptions()
    choose_measurement(replace(UNSET, ranks=6), SAMPLES, assumptions)
    assert assumptions.assumed["times"] == snapshot("6 ranks sharing 4 cores (as in a job with as many ranks here)")


def test_one_accelerator_emulates_degrees_and_takes_bandwidths_from_its_like(on: Any) -> None:
    on("cuda", 1, "NVIDIA H200", 141e9)
    assumptions = Assumptions()
    settings = choose_measurement(UNSET, SAMPLES, assumptions)
    assert settings.emulate
    assert (settings.model, settings.cluster, settings.recipe.precision) == ("qwen3-vl-8b", "h200-8x8", "bf16")
    assert settings.degrees == (1, 2, 3, 4, 6, 8)
    assert settings.layers == (2, 6)  # 8 billion parameters in training leave too little of the memory
    assert "--cluster" in assumptions.assumed
    # Alone it stands for the ranks of the cluster, which share the model out.
    assert settings.recipe.zero_stage >= 2


def test_what_was_asked_for_of_the_recipe_is_measured_even_if_it_does_not_fit(on: Any) -> None:
    on("cuda", 8, "NVIDIA H100 80GB HBM3", 80e9)
    asked = RecipeRequest(zero="0", recompute="selective", precision="amp", loss="plain")
    assumptions = Assumptions()
    settings = choose_measurement(replace(UNSET, model="qwen3-8b", recipe=asked), SAMPLES, assumptions)
    as_asked = Recipe(zero_stage=0, recompute="selective", precision="amp", loss="plain")
    assert replace(settings.recipe, offload="none") == as_asked  # nobody asked to keep activations on the device
    assert "nothing fits" in assumptions.assumed["recipe"]


def test_eight_accelerators_measure_real_rings(on: Any) -> None:
    on("npu", 8, "Ascend910B3", 64e9)
    settings = choose_measurement(replace(UNSET, model="qwen3-1.7b"), SAMPLES, Assumptions())
    assert not settings.emulate
    assert (settings.cluster, settings.device, settings.layers) == ("ascend910b-8x8", "npu", (28,))


def test_levels_of_recomputation_are_computed_for_the_ranks_of_a_cluster_and_never_measured() -> None:
    asked = replace(UNSET, model="qwen3-8b", cluster="h100-8x8", recipe=RecipeRequest(recompute="as-needed", zero="3"))
    profile = computed_profile(asked, Assumptions())
    request = PlanRequest(model="qwen3-8b", cluster="h100-8x8", ranks=64, recipe=asked.recipe)
    planned = resolve_problem(request, Assumptions())[0].profile
    assert profile.recompute_levels == planned.recompute_levels and len(profile.recompute_levels) > 2
    assert parse_cost_profile(dump_cost_profile(profile), name="levels").recompute_levels == profile.recompute_levels
    with pytest.raises(UsageError, match="mixes levels, and a measurement runs one; add --analytic"):
        choose_measurement(asked, SAMPLES, Assumptions())
    with pytest.raises(
        UsageError, match="each pipeline stage choose by its own memory, which one profile cannot describe"
    ):
        computed_profile(replace(asked, pipeline_parallel=2), Assumptions())
