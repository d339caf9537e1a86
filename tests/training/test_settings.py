from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Lora, Recipe, parse_lora
from fcp_cli.errors import UsageError
from fcp_cli.training.settings import TrainSettings, parse_settings

REQUIRED: dict[str, Any] = {"plan": Path("plan.parquet"), "model": "qwen3-tiny", "run_dir": Path("run dir")}


@given(
    steps=st.none() | st.integers(1, 10**9),
    learning_rate=st.floats(0, 10, allow_nan=False),
    precision=st.sampled_from(["auto", "fp32", "bf16"]),
    resume=st.booleans(),
    manifest=st.sampled_from([(), (Path("a b.parquet"),), (Path("a b.parquet"), Path("c"))]),
)
def test_settings_survive_the_command_line(
    steps: int | None,
    learning_rate: float,
    precision: Literal["auto", "fp32", "bf16"],
    resume: bool,
    manifest: tuple[Path, ...],
) -> None:
    before = TrainSettings(
        **REQUIRED, steps=steps, learning_rate=learning_rate, precision=precision, resume=resume, manifest=manifest
    )
    assert parse_settings(before.argv()) == before


def test_defaults_are_not_spelt_out() -> None:
    assert TrainSettings(**REQUIRED).argv() == [
        "--plan", "plan.parquet", "--model", "qwen3-tiny", "--run-dir", "run dir"
    ]  # fmt: skip


def test_plan_and_run_dir_come_from_the_environment_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCP_PLAN", "/jobs/plan.parquet")
    monkeypatch.setenv("FCP_RUN_DIR", "/jobs/run")
    parsed = parse_settings(["--model", "qwen3-tiny"])
    assert (parsed.plan, parsed.run_dir) == (Path("/jobs/plan.parquet"), Path("/jobs/run"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, snapshot("--steps is 0; it must be at least 1")),
        ("learning_rate", float("nan"), snapshot("--learning-rate is nan; it must be at least 0")),
        ("keep", 0, snapshot("--keep is 0; it must be at least 1")),
        ("precision", "fp8", snapshot("--precision is 'fp8'; it must be one of auto, bf16, amp, fp32, fp64")),
        (
            "lora",
            "r=8,rank=4",
            snapshot("--lora is 'r=8,rank=4', where 'rank=4' is unknown; write r=16,alpha=32,target=q_proj+v_proj"),
        ),
        ("lora", "r=1.5", snapshot("--lora is 'r=1.5'; r must be a whole number")),
        ("lora", "alpha=-1", snapshot("--lora is 'alpha=-1'; alpha must be a number above 0")),
        (
            "lora",
            "target=q_proj+lm_head",
            snapshot(
                "--lora is 'target=q_proj+lm_head', where 'lm_head' cannot have an adapter; name linear layers, as q_proj+v_proj, or all-linear"
            ),
        ),
        ("freeze", " ,", snapshot("--freeze is empty; give patterns of names, as 'visual.*'")),
        ("device", "tpu", snapshot("--device is 'tpu'; it must be one of auto, cpu, cuda, npu")),
    ],
)
def test_impossible_settings_are_one_line(name: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as error:
        TrainSettings(**{**REQUIRED, name: value})
    assert str(error.value) == message


def test_layers_that_recompute_as_needed_need_a_plan_with_levels() -> None:
    settings, planned = TrainSettings(**REQUIRED, recompute="as-needed"), Recipe(precision="fp32", recompute="full")
    for other, made in ((planned, "was made for --recompute full"), (None, "names no recipe")):
        with pytest.raises(
            UsageError, match=f"--recompute as-needed takes its levels from the plan, and this one {made}"
        ):
            settings.recipe(other, sync="iteration", device="cpu")
    followed = replace(planned, recompute="as-needed")
    assert settings.recipe(followed, sync="iteration", device="cpu").recompute == "as-needed"


def test_adapters_and_frozen_patterns_exclude_each_other() -> None:
    with pytest.raises(UsageError) as error:
        TrainSettings(**REQUIRED, lora="r=8", freeze="visual.*")
    assert str(error.value) == snapshot(
        "--freeze and --lora exclude each other: with adapters every other weight is frozen; say with target= where adapters go"
    )


def test_what_is_left_out_of_adapters_is_usual() -> None:
    assert str(parse_lora("r=8")) == "r=8,alpha=16,target=q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
    assert parse_lora(str(parse_lora("alpha=4, target=all-linear"))) == Lora(alpha=4, targets=("all-linear",))


def test_every_setting_is_documented() -> None:
    documented = TrainSettings.__doc__ or ""
    undocumented = {f.name for f in fields(TrainSettings) if not re.search(rf"\b{f.name}\b[\w, ]*:", documented)}
    assert undocumented == {
        *("weight_decay", "seed", "device", "resume"),
        *("warmup_steps", "wsd_decay_ratio", "min_learning_rate_ratio"),
    }
