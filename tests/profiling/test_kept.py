"""Profiles are kept for later jobs on the same hardware with the same model, and never used elsewhere."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from fcp_cli.cost.profile import CostProfile, load_cost_profile
from fcp_cli.machine.accelerators import Accelerators
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling import kept
from fcp_cli.profiling.computed.analytic import analytic_profile
from fcp_cli.profiling.kept import KeptKey, keep, keep_measured, kept_profile, key_of, under_kept_times
from fcp_cli.recipe import Recipe

_RECIPE = Recipe(precision="fp32")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "cpu_name", lambda: "Some CPU")
    monkeypatch.setattr(kept, "usable_cores", lambda: 2)


def key(model: str = "qwen3-tiny", ranks: int = 2, recipe: Recipe = _RECIPE) -> KeptKey:
    found = key_of(model, recipe, device="cpu", ranks_per_node=ranks)
    assert found is not None
    return found


def measured(model: str = "qwen3-tiny") -> CostProfile:
    cluster = load_cluster("h100-8x8")
    profile = analytic_profile(load_model(model), cluster, recipe=_RECIPE, sync="iteration", ranks=2)
    found = {"device": "cpu", "ranks": 2, "ranks_per_node": 2, "date": "2026-01-01T00:00:00+00:00"}
    coefficients = replace(profile.coefficients, linear_seconds_per_token=0.125)
    return replace(profile, origin="measured", coefficients=coefficients, measurement=found)


def test_a_measured_profile_is_found_by_jobs_on_the_same_hardware_with_the_same_model() -> None:
    assert keep_measured(measured(), "qwen3-tiny") == key().path

    found, told = kept_profile(key())

    assert found is not None and found.coefficients.linear_seconds_per_token == 0.125
    age = (datetime.now(timezone.utc) - datetime(2026, 1, 1, tzinfo=timezone.utc)).days
    assert told == f"measured by 'fcp profile' {age} days ago, kept in {key().path}"
    assert load_cost_profile(key().path).model == "qwen3-tiny"  # a profile like any other


def test_a_profile_of_today_says_so() -> None:
    now = (datetime.now(timezone.utc) - timedelta(hours=2)).isoformat()
    keep(replace(measured(), origin="fitted", measurement={"date": now}), key())

    assert kept_profile(key())[1] == f"fitted to a training today, kept in {key().path}"


@pytest.mark.parametrize(
    "other",
    [{"model": "qwen3-8b"}, {"ranks": 3}, {"recipe": Recipe(precision="bf16")}, {"recipe": Recipe(lora="r=8")}],
    ids=str,
)
def test_a_profile_of_another_model_number_of_ranks_or_recipe_is_not_used(other: dict[str, object]) -> None:
    keep_measured(measured(), "qwen3-tiny")

    assert kept_profile(key(**other))[0] is None  # type: ignore[arg-type]


def test_a_profile_of_other_hardware_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_measured(measured(), "qwen3-tiny")
    monkeypatch.setattr(kept, "cpu_name", lambda: "Another CPU")

    assert kept_profile(key()) == (
        None,
        "computed; the kept profile of this model is of other hardware (2x-some-cpu-2-cores)",
    )


def test_a_profile_of_another_model_is_mentioned() -> None:
    keep_measured(measured(), "qwen3-tiny")

    found, told = kept_profile(key("qwen3-8b"))

    assert (found, told) == (None, "computed; the profiles kept of this hardware are of other models or settings")


def test_a_damaged_file_is_named_in_one_line_and_not_used() -> None:
    keep_measured(measured(), "qwen3-tiny")
    key().path.write_text("format: fcp-cost-profile/1\norigin: nobody\n")

    found, told = kept_profile(key())

    assert found is None
    assert told.startswith(f"computed, since the kept profile is damaged, remove it: {key().path}: ")
    assert "\n" not in told


def test_a_file_under_the_name_of_other_hardware_is_not_used() -> None:
    keep_measured(measured(), "qwen3-tiny")
    key().path.rename(key(ranks=4).path)

    found, told = kept_profile(key(ranks=4))

    assert found is None
    assert told == (
        f"computed, since {key(ranks=4).path} is of other hardware, model or settings than its name says; remove it"
    )


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "fcp").write_text("no folder")

    assert keep(measured(), key()) is None
    assert kept_profile(key())[0] is None


def test_memory_and_step_terms_stay_the_jobs_own() -> None:
    job = replace(measured(), origin="analytic", memory=replace(measured().memory, capacity_bytes=7.0))
    found = under_kept_times(job, replace(measured(), step=replace(measured().step, update_seconds=9.0)))

    assert found.coefficients.linear_seconds_per_token == 0.125
    assert (found.memory, found.step, found.origin) == (job.memory, job.step, "measured")
    assert load_cost_profile_text(found) == found


def load_cost_profile_text(profile: CostProfile) -> CostProfile:
    from fcp_cli.cost.profile import parse_cost_profile

    return parse_cost_profile(profile.text, name="the profile")


def test_an_accelerator_without_a_name_has_no_kept_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "find_accelerators", lambda: Accelerators(kind="cuda", name="", count=8))
    assert key_of("qwen3-8b", _RECIPE, device="cuda", ranks_per_node=8) is None

    monkeypatch.setattr(kept, "find_accelerators", lambda: Accelerators(kind="cuda", name="NVIDIA H200", count=8))
    found = key_of("qwen3-8b", _RECIPE, device="cuda", ranks_per_node=8)
    assert found is not None and found.path.name.endswith("-8x-nvidia-h200.yaml")
