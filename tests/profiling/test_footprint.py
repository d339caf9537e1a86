"""What the ranks that measure hold, beside what a job holds."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from fcp_cli.cost.recipe import PrecisionName, Recipe, Recompute
from fcp_cli.models.model import load_model
from fcp_cli.profiling.choices import default_layers, default_vision_layers
from fcp_cli.profiling.points import Footprint, Point

H100 = 80e9
WORKER = Footprint(spec=load_model("qwen3-8b"), recipe=Recipe(), layers=6, ranks=8, device_bytes=H100)


@pytest.mark.parametrize("precision", ["bf16", "amp", "fp32"])
@pytest.mark.parametrize("recompute", get_args(Recompute)[:-1])  # the last mixes others
@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-vl-8b", "llama3-8b", "internvl3-8b"])
def test_every_part_of_a_measurement_of_an_8b_model_fits_80_gb(
    model: str, precision: PrecisionName, recompute: Recompute
) -> None:
    spec, recipe = load_model(model), Recipe(zero_stage=2, precision=precision, recompute=recompute)
    layers = default_layers(spec, recipe, device="cuda", device_bytes=H100, ranks=8)
    assert len(layers) == 2 and layers[1] >= 3  # two counts to extrapolate from, apart enough to tell their slope
    worker = Footprint(
        spec=spec,
        recipe=recipe,
        layers=layers[1],
        vision_layers=max(default_vision_layers(spec, layers, device="cuda"), default=0),
        ranks=8,
        device_bytes=H100,
    )
    assert worker.room_tokens >= 8192
    packs = worker.memory().total_bytes(worker.room_tokens)
    update = worker.memory().total_bytes(0) + worker.optimizer_share(8) * worker.optimizer_bytes
    assert max(packs, update) <= worker.capacity_bytes
    assert worker.optimizer_share(8) == 1 / 8


def test_an_optimizer_that_does_not_fit_whole_is_as_large_as_fits() -> None:
    crowded = replace(WORKER, device_bytes=32e9)
    share = crowded.optimizer_share(1)
    assert 0 < share < 1
    assert crowded.memory().total_bytes(0) + share * crowded.optimizer_bytes == pytest.approx(crowded.capacity_bytes)
    assert WORKER.optimizer_share(1) == 1.0


def test_packs_that_need_more_memory_than_a_rank_has_are_left_out() -> None:
    points = [Point(lengths=(tokens,), degree=degree) for tokens in (8192, 131_072) for degree in (1, 8)]
    kept = WORKER.fitting(points)
    assert [(point.tokens, point.degree) for point in kept] == [(8192, 1), (8192, 8), (131_072, 8)]
    assert replace(WORKER, device_bytes=1e9).fitting(points) == ()


def test_recomputation_makes_room_for_longer_packs() -> None:
    again = replace(WORKER, recipe=Recipe(recompute="full"))
    assert again.room_tokens > 1.5 * WORKER.room_tokens


def test_layers_of_several_kinds_are_measured_in_whole_periods() -> None:
    spec = load_model("qwen3-next")
    assert spec.layer_period == 4
    assert load_model("glm-4.5").layer_period == load_model("qwen3-8b").layer_period == 1
    assert default_layers(spec, Recipe(), device="cpu", device_bytes=H100) == (4, 8)
    assert default_layers(spec, Recipe(), device="cuda", device_bytes=20 * H100, ranks=8) == (8, 24)
