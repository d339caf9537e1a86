"""The vision encoder in `fcp profile`: what is measured, how it is run, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.cost.fitting import VisionCosts
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import Recipe, RecipeRequest
from fcp_cli.errors import UsageError
from fcp_cli.models.model import load_model
from fcp_cli.profiling.choices import default_vision_layers
from fcp_cli.profiling.fits import profile_from_samples
from fcp_cli.profiling.points import Footprint, Schedule, VisionPoint, vision_points
from fcp_cli.profiling.samples import SamplesFile, begin_samples, read_measurement, read_samples
from fcp_cli.report.profiles import reading
from tests.profiling import test_assemble

pytestmark = pytest.mark.torch

MEASUREMENT = replace(test_assemble.MEASUREMENT, model="qwen3-vl-tiny", layers=(3,), vision_layers=(3,))
TRAINED = VisionCosts(call_seconds=3e-3, seconds_per_patch=9e-6, seconds_per_patch2=8e-9)
FROZEN = VisionCosts(call_seconds=1e-3, seconds_per_patch=3e-6, seconds_per_patch2=2e-9)


@pytest.mark.parametrize("max_patches", [512, 1024, 4096, 131_072])
def test_calls_cover_sizes_and_numbers_of_parts_trained_and_frozen(max_patches: int) -> None:
    points = vision_points(max_patches, mixed=True)
    for trained in (False, True):
        own = [point for point in points if point.trained is trained]
        fitted = {point.sides for point in own if not point.held_out}
        held_out = {point.sides for point in own if point.held_out}
        assert len(fitted) >= 5 and len(held_out) >= 3 and not fitted & held_out
        assert len({side for sides in fitted for side in sides}) >= 3
    assert max(point.patches for point in points) <= min(max_patches, 65_536)
    assert all(side % 2 == 0 for point in points for side in point.sides)
    assert len({point.key for point in points}) == len(points)


def test_tiles_of_several_sizes_never_share_a_call() -> None:
    assert all(len(set(point.sides)) == 1 for point in vision_points(4096, mixed=False))


def test_a_call_is_named_by_its_parts_and_its_pass() -> None:
    assert VisionPoint(sides=(16, 16, 8), trained=True).key == "vision trained:16x2+8x1"
    assert VisionPoint(sides=(8,), trained=False).key == "vision frozen:8x1"


def test_a_resumed_measurement_goes_on_with_the_calls_that_are_missing() -> None:
    first, second = VisionPoint(sides=(8,), trained=False), VisionPoint(sides=(16,), trained=False)
    schedule = Schedule([first, second], (3,))
    schedule.resume({(3, first.key): [1.0] * 5})
    assert schedule.next(1e9) == 1


def test_a_request_with_calls_of_an_encoder_survives_its_file(tmp_path: Path) -> None:
    request = replace(MEASUREMENT, samples=tmp_path / "samples.jsonl")
    request.write(tmp_path / "request.json")
    found = read_measurement(tmp_path / "request.json")
    assert found == request
    assert found.vision_points() == vision_points(found.max_length, mixed=True)


@pytest.mark.parametrize(
    ("model", "layers", "device", "expected"),
    [
        ("qwen3-tiny", (2,), "cpu", ()),
        ("qwen3-vl-tiny", (3,), "cpu", (3,)),
        ("qwen3-vl-8b", (36,), "cuda", (27,)),
        ("qwen3-vl-8b", (2, 6), "cuda", (3, 7)),
        ("internvl3-8b", (1, 2), "cpu", (1, 2)),
    ],
)
def test_an_encoder_is_measured_whole_where_the_language_model_is(
    model: str, layers: tuple[int, ...], device: str, expected: tuple[int, ...]
) -> None:
    assert default_vision_layers(load_model(model), layers, device=device) == expected


def test_calls_beyond_a_rank_s_memory_are_left_out() -> None:
    spec, points = load_model("qwen3-vl-8b"), vision_points(65_536, mixed=True)
    footprint = Footprint(spec=spec, recipe=Recipe(), layers=2, vision_layers=27, device_bytes=20e9)
    kept = footprint.fitting_calls(points)
    assert 0 < len(kept) < len(points)
    assert max(point.patches for point in kept) < 16_384


def samples(*, observed: int | None = None) -> SamplesFile:
    """What ranks would have written if the encoder took what `TRAINED` and `FROZEN` say, 20 kB for a patch."""
    truth = test_assemble.TRUTH
    text = test_assemble.samples_of(truth, measurement=MEASUREMENT)
    lines = list(text.lines)
    for point in MEASUREMENT.vision_points()[:observed]:
        (seconds,) = (TRAINED if point.trained else FROZEN).predicted_seconds([point.part_patches]).tolist()
        lines.append({"kind": "observation", "point": point.key, "layers": 3, "seconds": [seconds] * 3})
    lines += [{"kind": "vision_memory", "patches": n, "peak_bytes": 1e5 + 2e4 * n} for n in (512, 1024, 2048)]
    return replace(text, lines=lines)


def vision_coefficients(profile: CostProfile) -> VisionCosts:
    found = profile.coefficients
    return VisionCosts(
        call_seconds=found.microbatch_seconds - test_assemble.TRUTH.coefficients.microbatch_seconds,
        seconds_per_patch=found.vision_seconds_per_patch,
        seconds_per_patch2=found.vision_seconds_per_patch2,
    )


@pytest.mark.parametrize(("freeze_vision", "truth", "name"), [(False, TRAINED, "trained"), (True, FROZEN, "frozen")])
def test_one_measurement_gives_the_profiles_of_a_trained_and_of_a_frozen_encoder(
    freeze_vision: bool, truth: VisionCosts, name: str
) -> None:
    profile = profile_from_samples(samples(), request=RecipeRequest(freeze_vision=freeze_vision))
    found = vision_coefficients(profile)
    assert found.seconds_per_patch == pytest.approx(truth.seconds_per_patch, rel=0.02)
    assert found.seconds_per_patch2 == pytest.approx(truth.seconds_per_patch2, rel=0.02)
    assert found.call_seconds == pytest.approx(truth.call_seconds, rel=0.1)
    record = profile.measurement["vision_encoder"]
    assert max(record[name]["held_out_error_percent"], record[name]["fitted_error_percent"]) < 0.5
    assert {point["held_out"] for point in record[name]["points"]} == {False, True}
    assert f"Vision encoder: timed trained and frozen; this profile is for a {name} one." in reading(profile, (2,))


def test_a_visual_token_takes_the_memory_of_its_patches_where_they_are_trained() -> None:
    trained, frozen = (
        profile_from_samples(samples(), request=RecipeRequest(freeze_vision=freeze)) for freeze in (False, True)
    )
    assert trained.memory.bytes_per_token - frozen.memory.bytes_per_token == pytest.approx(4 * 2e4)
    encoder = load_model("qwen3-vl-tiny").vision
    assert encoder is not None
    # Frozen, it has no gradients and no moments.
    states = [
        sum(profile.measurement["memory"]["items_bytes"].get(name, 0.0) for name in ("gradients", "optimizer"))
        for profile in (trained, frozen)
    ]
    assert states[0] - states[1] == pytest.approx(12 * encoder.parameters, rel=1e-5)


def test_an_encoder_of_which_too_little_was_observed_is_computed_and_said_to_be() -> None:
    profile = profile_from_samples(samples(observed=3))
    assert profile.coefficients.vision_seconds_per_patch > 0
    assumed = profile.measurement["assumed"]
    assert any("too few calls of the encoder were observed" in line for line in assumed)


def test_a_model_without_an_encoder_cannot_freeze_it() -> None:
    with pytest.raises(UsageError, match="--freeze-vision: qwen3-tiny has no vision encoder"):
        profile_from_samples(test_assemble.samples_of(test_assemble.TRUTH), request=RecipeRequest(freeze_vision=True))


@pytest.mark.torch
@pytest.mark.hf
@pytest.mark.parametrize(("model", "blocks"), [("qwen3-vl-tiny", "blocks.2."), ("internvl3-2b", "layer.2.")])
def test_what_is_timed_are_the_model_s_own_blocks_and_projector(model: str, blocks: str) -> None:
    torch: Any = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from fcp_cli.profiling.workload import VisionWorkload, build_encoder

    spec = load_model(model)
    assert spec.vision is not None
    small = replace(spec, vision=replace(spec.vision, depth=3)) if model == "internvl3-2b" else spec
    assert small.vision is not None
    cpu, recipe = torch.device("cpu"), Recipe(precision="fp32")
    workload = VisionWorkload(build_encoder(small, 3, cpu, recipe), cpu, recipe)
    parameters = dict(workload.encoder.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == small.vision.parameters
    workload.call(VisionPoint(sides=(4, 4), trained=False))()
    assert all(parameter.grad is None for parameter in parameters.values())
    workload.set_blocks(2)
    workload.call(VisionPoint(sides=(4, 4), trained=True))()
    for name, parameter in parameters.items():
        assert (parameter.grad is None) == (blocks in name), name


@pytest.mark.torch
@pytest.mark.hf
def test_a_worker_times_the_encoder_and_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from fcp_cli.profiling import worker

    monkeypatch.setattr(Schedule, "MOST_REPEATS", 1)
    monkeypatch.setattr(Schedule, "LEAST_REPEATS", 1)
    path = tmp_path / "samples.jsonl"
    request = replace(MEASUREMENT, ranks=1, degrees=(1,), max_length=512, samples=path, budget_seconds=250.0)
    begin_samples(request)
    request.write(tmp_path / "request.json")
    worker.main([str(tmp_path / "request.json")])
    found = read_samples(path)
    assert found.finished
    observed = found.seconds_by_point(3)
    assert {point.key for point in request.vision_points()} <= set(observed)
    assert min(seconds for key in observed for seconds in observed[key]) > 0
    assert [line["patches"] for line in found.of_kind("vision_memory")] == [128, 256, 512]
