from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from inline_snapshot import snapshot

from fcp_cli.cost.profile import dump_cost_profile, load_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError
from tests.messages import raises

DOCUMENT: dict[str, Any] = {
    "format": "fcp-cost-profile/1",
    "model": "qwen3-8b",
    "cluster": "example-8x8",
    "origin": "assumed",
    "coefficients": {
        "attention_seconds_per_token2": 6.451e-9,
        "linear_seconds_per_token": 2.838e-4,
        "ring_bytes_per_token": 442368,
        "microbatch_seconds": 0.1,
    },
    "bandwidth_bytes_per_second": {"intra_node": 50.0e9, "inter_node": 12.0e9},
}


def _text(path: str, value: Any) -> str:
    document = copy.deepcopy(DOCUMENT)
    *blocks, key = path.split(".")
    block = document
    for name in blocks:
        block = block[name]
    if value is None:
        del block[key]
    else:
        block[key] = value
    return yaml.safe_dump(document)


LINEAR = "coefficients.linear_seconds_per_token"
# What is wrong with a profile -> the path of a figure, and what stands there; None removes it.
BROKEN: dict[str, tuple[str, Any]] = {
    "no figure": (LINEAR, None),
    "a negative figure": (LINEAR, -1.0),
    "no number": (LINEAR, math.nan),
    "an infinite figure": (LINEAR, math.inf),
    "a text": (LINEAR, "fast"),
    "a truth value": (LINEAR, True),
    "a misspelt key": ("coefficients.linear_second_per_token", 1.0),
    "no bandwidth inside a node": ("bandwidth_bytes_per_second.intra_node", 0.0),
    "no bandwidths": ("bandwidth_bytes_per_second", None),
    "a misspelt block": ("coefficents", {}),
    "an unknown origin": ("origin", "guessed"),
    "a block that is a list": ("coefficients", [1.0]),
    "a model that is a number": ("model", 8),
    "a later format": ("format", "fcp-cost-profile/2"),
    "a plan": ("format", "fcp-plan/1"),
    "an exposed share without a common ground": ("coefficients.exposed_ring_share", 0.25),
    "an unknown recomputation": ("recipe", {"recompute": "some"}),
    "an unknown stage of ZeRO": ("recipe", {"zero_stage": 4}),
    "an unknown key of the recipe": ("recipe", {"zero": 2}),
    "an unknown sync": ("sync", "never"),
}
BROKEN_MESSAGES = snapshot(
    {
        "no figure": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is missing; 'fcp profile show' lists a whole profile",
        "a negative figure": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is -1.0; it must be a non-negative number; 'fcp profile show' lists a whole profile",
        "no number": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is nan; it must be a finite number",
        "an infinite figure": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is inf; it must be a finite number",
        "a text": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is 'fast'; it must be a non-negative number; 'fcp profile show' lists a whole profile",
        "a truth value": "ProfileError: profile.yaml: coefficients.linear_seconds_per_token is True; it must be a non-negative number; 'fcp profile show' lists a whole profile",
        "a misspelt key": "ProfileError: profile.yaml: unknown key coefficients.linear_second_per_token; did you mean coefficients.linear_seconds_per_token? 'fcp profile show' lists a whole profile",
        "no bandwidth inside a node": "ProfileError: profile.yaml: bandwidth_bytes_per_second.intra_node is 0.0; it must be a positive number; 'fcp profile show' lists a whole profile",
        "no bandwidths": "ProfileError: profile.yaml: the block bandwidth_bytes_per_second is missing; 'fcp profile show' lists a whole profile",
        "a misspelt block": "ProfileError: profile.yaml: unknown key coefficents; did you mean coefficients? 'fcp profile show' lists a whole profile",
        "an unknown origin": "ProfileError: profile.yaml: origin is 'guessed'; it must be one of analytic, assumed, fitted, measured; 'fcp profile show' lists a whole profile",
        "a block that is a list": "ProfileError: profile.yaml: coefficients is [1.0]; it must be a mapping; 'fcp profile show' lists a whole profile",
        "a model that is a number": "ProfileError: profile.yaml: model is 8; it must be a text; 'fcp profile show' lists a whole profile",
        "a later format": "ProfileError: profile.yaml is fcp-cost-profile/2; this fcp reads fcp-cost-profile/1; make it again with 'fcp profile'",
        "a plan": "ProfileError: profile.yaml is not a cost profile: expected 'format: fcp-cost-profile/1', found 'fcp-plan/1'",
        "an exposed share without a common ground": "ProfileError: profile.yaml: the block common_ground is missing; beside coefficients.exposed_ring_share it holds the fit without one, which strategies are compared under",
        "an unknown recomputation": "ProfileError: profile.yaml: recipe.recompute is 'some'; it must be one of activation, as-needed, elementwise, full, none, selective; 'fcp profile show' lists a whole profile",
        "an unknown stage of ZeRO": "ProfileError: profile.yaml: recipe.zero_stage is 4; it must be one of 0, 1, 2, 3; 'fcp profile show' lists a whole profile",
        "an unknown key of the recipe": "ProfileError: profile.yaml: unknown key recipe.zero; known: freeze, freeze_vision, lora, loss, offload, precision, recompute, reduce, shard_ranks, zero_stage; 'fcp profile show' lists a whole profile",
        "an unknown sync": "ProfileError: profile.yaml: sync is 'never'; it must be one of iteration, microbatch or absent; 'fcp profile show' lists a whole profile",
    }
)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_profile_is_rejected_by_the_path_of_its_figure(case: str) -> None:
    with raises(BROKEN_MESSAGES[case]):
        parse_cost_profile(_text(*BROKEN[case]), name="profile.yaml")


def test_a_file_that_is_no_yaml_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("a: [1, 2")
    with pytest.raises(ProfileError, match=r"profile.yaml is not valid YAML"):
        load_cost_profile(path)


def test_a_missing_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with raises(
        snapshot(
            "ProfileError: there is no cost profile FOLDER/profile.yaml; make one with 'fcp profile -o FOLDER/profile.yaml'"
        )
    ):
        load_cost_profile(tmp_path / "profile.yaml")


def test_a_profile_survives_writing_and_reading() -> None:
    profile = parse_cost_profile(yaml.safe_dump(DOCUMENT), name="x")
    assert parse_cost_profile(dump_cost_profile(profile), name="x") == profile


def test_the_terms_of_a_step_survive_and_are_absent_where_they_say_nothing() -> None:
    step = {"wave_floor_seconds": 0.9, "tail_seconds": 0.3, "update_seconds": 0.05, "lockstep": True}
    plain = parse_cost_profile(yaml.safe_dump(DOCUMENT), name="x")
    assert plain.step.closing_seconds("iteration") == plain.step.floor_seconds("microbatch") == 0.0
    assert "step" not in yaml.safe_load(dump_cost_profile(plain))
    profile = parse_cost_profile(yaml.safe_dump({**DOCUMENT, "step": step}), name="x")
    assert yaml.safe_load(dump_cost_profile(profile))["step"] == step
    assert parse_cost_profile(dump_cost_profile(profile), name="x") == profile
    # Waves that gather sum their own gradients; a step without waves, or with none to gather, sums them at its end.
    assert profile.step.closing_seconds("microbatch") == 0.05
    assert profile.step.closing_seconds("iteration") == pytest.approx(0.35)
    assert profile.step.floor_seconds("iteration") == 0.0


def test_recipe_and_sync_survive_writing_and_reading() -> None:
    recipe = {"zero_stage": 3, "shard_ranks": 8, "reduce": "step", "precision": "bf16", "recompute": "selective"}
    profile = parse_cost_profile(yaml.safe_dump({**DOCUMENT, "recipe": recipe, "sync": "microbatch"}), name="x")
    assert profile.recipe == Recipe(zero_stage=3, shard_ranks=8, reduce="step", precision="bf16", recompute="selective")
    assert parse_cost_profile(dump_cost_profile(profile), name="x") == profile
    alone = replace(profile, recipe=Recipe(), sync=None)
    assert parse_cost_profile(dump_cost_profile(alone), name="x") == alone


def _with_common_ground(**coefficients: float) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    ground = {name: document[name] for name in ("coefficients", "bandwidth_bytes_per_second")}
    return {
        **document,
        "coefficients": {**document["coefficients"], "microbatch_seconds": 0.05, **coefficients},
        "common_ground": ground,
    }


def test_an_exposed_share_survives_writing_and_reading() -> None:
    profile = parse_cost_profile(yaml.safe_dump(_with_common_ground(exposed_ring_share=0.25)), name="x")
    text = dump_cost_profile(profile)
    assert text.startswith("format: fcp-cost-profile/1")
    assert parse_cost_profile(text, name="x") == profile


def test_the_common_ground_is_a_profile_without_an_exposed_share() -> None:
    profile = parse_cost_profile(yaml.safe_dump(_with_common_ground(exposed_ring_share=0.25)), name="x")
    ground = profile.on_common_ground()
    assert ground == parse_cost_profile(yaml.safe_dump(DOCUMENT), name="x")
    assert ground.text.startswith("format: fcp-cost-profile/1")
    assert "exposed" not in ground.text


def test_the_common_ground_is_read_as_strictly_as_the_rest() -> None:
    document = _with_common_ground(exposed_ring_share=0.25)
    document["common_ground"]["coefficients"]["exposed_ring_share"] = 0.25
    with raises(
        snapshot(
            "ProfileError: x: common_ground.coefficients.exposed_ring_share is 0.25; it must be absent, since the common ground is the fit without one"
        )
    ):
        parse_cost_profile(yaml.safe_dump(document), name="x")
    del document["common_ground"]["coefficients"]
    with pytest.raises(ProfileError, match=r"the block common_ground\.coefficients is missing"):
        parse_cost_profile(yaml.safe_dump(document), name="x")


def test_more_than_the_whole_ring_cannot_be_exposed() -> None:
    with raises(
        snapshot(
            "ProfileError: x: coefficients.exposed_ring_share is 1.5; it must be a share from 0 to 1; 'fcp profile show' lists a whole profile"
        )
    ):
        parse_cost_profile(yaml.safe_dump(_with_common_ground(exposed_ring_share=1.5)), name="x")


def test_measured_points_are_written_one_a_line() -> None:
    points = [{"lengths": [512, 64], "degree": 2, "seconds": 0.5}, {"lengths": [64], "degree": 1, "seconds": 0.25}]
    document = {**DOCUMENT, "origin": "measured", "measurement": {"points": points}}
    profile = parse_cost_profile(yaml.safe_dump(document), name="x")
    text = dump_cost_profile(profile)
    assert "- {degree: 2, lengths: [512, 64], seconds: 0.5}" in text
    assert yaml.safe_load(text)["measurement"]["points"] == points


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    text = _text("coefficients.ring_bytes_per_token", "5e5").replace("'5e5'", "5e5")
    assert parse_cost_profile(text, name="x").coefficients.ring_bytes_per_token == 5e5


@pytest.mark.parametrize("least", [0.0, 1e-320])
def test_a_profile_under_which_tokens_take_no_time_is_refused(least: float) -> None:
    attention, linear = "coefficients.attention_seconds_per_token2", "coefficients.linear_seconds_per_token"
    for path in (attention, linear):
        assert parse_cost_profile(_text(path, least), name="profile.yaml")
    free = yaml.safe_load(_text(attention, least))
    free["coefficients"]["linear_seconds_per_token"] = least
    with raises(
        f"ProfileError: profile.yaml: coefficients.attention_seconds_per_token2 is {least:g} and "
        f".linear_seconds_per_token {least:g}: tokens take no time, so that no plan is quicker than another; 'fcp profile "
        "--analytic' computes them"
    ):
        parse_cost_profile(yaml.safe_dump(free), name="profile.yaml")
