"""The command that a message suggests makes the same plan again, never over the user's file."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fcp_cli.plan.file import PlanReader
from fcp_cli.plan.metadata import Continuation
from fcp_cli.plan.replan_command import plan_again
from tests.cli.planning_folder import fcp
from tests.cli.test_plan_cli import SMALL_CONFIG

COMPUTED = ("--model", "qwen3-8b", "--cluster", "h200-1x4")
# Speeds of ranks are searched for seconds a step with more ranks.
AT_SPEEDS = ("--model", "qwen3-8b", "--cluster", "h200-1x4", "--ranks", "2", "--rank-speeds", "1=0.5")


def planned(folder: Path, *options: str) -> Path:
    (folder / "lengths.txt").write_text("\n".join(map(str, range(100, 3000, 100))))
    result = fcp("plan", "lengths.txt", "--global-batch-size", "10", "--steps", "2", *options, cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "plan.parquet"


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that tests only read, with a computed profile."""
    return planned(tmp_path_factory.mktemp("computed"), *COMPUTED)


def again(plan: Path, **changes: object) -> list[str]:
    words = shlex.split(plan_again(PlanReader(plan).metadata, Path(plan.name), **changes))  # type: ignore[arg-type]
    assert words[0] == "fcp"
    return words[1:]


@pytest.mark.examples(3)
@pytest.mark.lengthy
@pytest.mark.parametrize(
    "options",
    [
        (*COMPUTED,),
        (*COMPUTED, "--seed", "3", "--no-shuffle", "--epochs", "2", "--last-batch", "drop"),
        (*COMPUTED, "--zero", "1", "--recompute", "full", "--sync", "microbatch", "--max-peers", "3"),
        (*COMPUTED, "--tokens-per-rank", "1024", "--max-length", "2000", "--overlong", "truncate", "--padded-rings"),
        (*COMPUTED, "--solver", "usp", "--lora", "r=8,target=q_proj"),
        AT_SPEEDS,
        ("--model", "qwen3-8b", "--cluster", "h200-2x8", "--tensor-parallel", "2", "--max-degree", "1"),
    ],
    ids=" ".join,
)
def test_the_command_makes_the_same_plan_under_another_name(tmp_path: Path, options: tuple[str, ...]) -> None:
    plan = planned(tmp_path, *options)
    before = plan.read_bytes()
    result = fcp(*again(plan), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert PlanReader(tmp_path / "plan-2.parquet").metadata.plan_hash == PlanReader(plan).metadata.plan_hash
    assert plan.read_bytes() == before


def test_limits_are_kept(computed: Path) -> None:
    metadata = PlanReader(computed).metadata
    for options, words in (({"max_peers": 4}, "--max-peers 4"), ({"max_groups": 5}, "--max-groups 5")):
        assert f" {words} " in plan_again(replace(metadata, solver_options=options), Path("plan.parquet"))


def test_for_other_ranks_it_keeps_model_cluster_batch_and_steps(computed: Path) -> None:
    result = fcp(*again(computed, ranks=2), cwd=computed.parent)
    assert result.returncode == 0, result.stderr
    metadata = PlanReader(computed.with_name("plan-2-ranks.parquet")).metadata
    assert (metadata.num_ranks, metadata.global_batch_size, metadata.steps) == (2, 10, 2)
    assert "model: qwen3-8b" in metadata.cost_profile
    assert "cluster: h200-1x4" in metadata.cost_profile


def test_a_change_replaces_the_plans_own_option(computed: Path) -> None:
    words = again(computed, changes=["--recompute", "full"])
    assert words.count("--recompute") == 1
    assert words[words.index("--recompute") + 1] == "full"


def test_another_model_gets_a_recipe_of_its_own(computed: Path) -> None:
    words = again(computed, model="qwen3-tiny")
    assert words[words.index("--model") + 1] == "qwen3-tiny"
    assert "--zero" not in words


def test_a_checkpoint_is_named_by_the_path_that_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        checkpoint(tmp_path / "models" / name)
    (tmp_path / "data").mkdir()
    metadata = PlanReader(planned(tmp_path / "data", "--model", "../models/mine", *COMPUTED[2:])).metadata
    path = Path("data/plan.parquet")

    words = shlex.split(plan_again(metadata, path, ranks=2, given_model="models/mine"))

    assert words[:5] == ["fcp", "plan", "data/lengths.txt", "--model", "models/mine"]
    assert fcp(*words[1:], cwd=tmp_path).returncode == 0
    assert " --model PATH/TO/mine " in plan_again(metadata, path, given_model="models/other")
    checkpoint(tmp_path / "data" / "mine")
    assert " --model data/mine " in plan_again(metadata, path)


def checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL_CONFIG))


def test_names_of_files_that_exist_are_not_taken(
    computed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan-2.parquet").touch()
    assert again(computed)[-2:] == ["-o", "plan-3.parquet"]


def test_a_plan_with_a_measured_profile_asks_for_the_profile_again(computed: Path) -> None:
    metadata = PlanReader(computed).metadata
    measured = replace(metadata, cost_profile=metadata.cost_profile.replace("origin: analytic", "origin: measured"))
    assert "--profile profile.yaml" in plan_again(measured, Path("plan.parquet"))


def test_a_plan_that_continues_a_run_is_made_from_the_run(computed: Path) -> None:
    metadata = PlanReader(computed).metadata
    trained = Continuation(plan_hash="a" * 64, num_ranks=4, first_step=1, trained="")
    assert (
        plan_again(replace(metadata, continues=trained), Path("plan.parquet"), ranks=2)
        == "fcp plan --continue-from RUN --ranks 2 -o plan-2-ranks.parquet"
    )
