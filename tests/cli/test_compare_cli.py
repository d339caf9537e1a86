"""`fcp compare` as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fcp_cli.planning import fcp_solver
from fcp_cli.planning.fcp_solver import FcpSolver, compile_missing
from fcp_cli.planning.solvers import REGISTRY
from fcp_cli.util import pool
from tests.cli.planning_folder import fcp
from tests.planning.examples import PROFILE, example_problem

SETTINGS = ("--ranks", "8", "--ranks-per-node", "4", "--tokens-per-rank", "4096", "--global-batch-size", "48")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `dataset.parquet` and `profile.yaml`."""
    path = tmp_path_factory.mktemp("compare")
    lengths = np.random.default_rng(0).lognormal(6.5, 1.2, 96).astype(np.int64).clip(1, 20_000)
    lengths[::48] = 20_000
    pq.write_table(pa.table({"length": lengths}), path / "dataset.parquet")
    (path / "profile.yaml").write_text(PROFILE)
    return path


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    result = fcp(
        "compare", "dataset.parquet", *SETTINGS, "--solvers", "all", "--milp-seconds", "0.1", "--json", cwd=folder
    )
    assert result.returncode == 0, result.stderr
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_a_planner_that_was_never_compiled_here_is_not_waited_for_in_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled: list[str] = ["iteration"]
    monkeypatch.setattr(fcp_solver, "is_compiled", lambda sync: sync in compiled)
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    monkeypatch.setattr(FcpSolver, "parts_to_compile", lambda self: ([lambda: compiled.append(self.problem.sync)], []))
    problems = [example_problem("microbatch"), example_problem("iteration"), example_problem("microbatch")]
    compile_missing(problems)
    began, ended = capsys.readouterr().err.splitlines()
    assert began == "compiling the planner, once on this machine: about a minute of CPU time"
    assert re.fullmatch(r"compiled the planner in [\d.e-]+ (ms|s)", ended)
    assert compiled == ["iteration", "microbatch"]
    compile_missing(problems)
    assert capsys.readouterr().err == ""


@pytest.mark.lengthy
def test_every_strategy_is_compared_on_the_same_steps(document: dict[str, Any]) -> None:
    names = {strategy["name"] for strategy in document["strategies"]}
    published = {
        "static",
        "fcp-paper",
        "megatron-any-degree",
        "megatron-dynamic-cp",
        "megatron-packing",
        "flexsp",
        "bytescale",
        "karmarkar-karp",
        "wlb-llm",
        "hydraulis",
        "packing",
        "padded",
    }
    assert names - REGISTRY.packages().keys() == {"fcp", *published}  # whoever wrote a solver may have it installed
    assert document["steps"] == 2
    assert document["profile"]["origin"] == "assumed"


@pytest.mark.lengthy
def test_the_quickest_comes_first_and_none_beats_its_bound_or_the_budget(document: dict[str, Any]) -> None:
    seconds = [one["outcomes"][one["best_sync"]]["step_seconds"] for one in document["strategies"]]
    assert seconds == sorted(seconds)
    for strategy in document["strategies"]:
        for outcome in strategy["outcomes"].values():
            assert outcome["gap"] >= -1e-9 and outcome["over_budget"] == 0


@pytest.mark.lengthy
def test_flexsp_says_its_time_limit(document: dict[str, Any]) -> None:
    (flexsp,) = (strategy for strategy in document["strategies"] if strategy["name"] == "flexsp")
    assert flexsp["outcomes"]["iteration"]["options"]["milp_seconds"] == 0.1


def test_the_table_fits_80_columns(folder: Path) -> None:
    result = fcp("compare", "dataset.parquet", *SETTINGS, cwd=folder)
    assert result.returncode == 0
    rows = result.stdout[result.stdout.index("strategy") :].splitlines()
    assert max(len(row) for row in rows) <= 80
    assert "flexsp (minutes per step), hydraulis and executions without rings are skipped" in result.stderr
    assert "…" not in result.stdout
    assert "assumed --profile = profile.yaml" in result.stderr


def test_a_strategy_that_cannot_plan_the_batches_says_why(folder: Path) -> None:
    ranks = ("--ranks", "6", "--ranks-per-node", "6", "--tokens-per-rank", "4000", "--global-batch-size", "48")
    names = ("--solvers", "megatron-dynamic-cp,bytescale", "--sync", "iteration")
    result = fcp("compare", "dataset.parquet", *ranks, *names, cwd=folder)
    assert result.returncode == 0
    assert "megatron-dynamic-cp cannot plan a sequence of 20000 tokens: its degrees are powers of two" in result.stdout


def test_a_strategy_that_makes_no_plan_is_named_with_the_command_that_prices_it(folder: Path) -> None:
    result = fcp("plan", "dataset.parquet", *SETTINGS, "--solver", "padded", cwd=folder)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "error: --solver padded makes no plan; 'fcp compare MANIFEST --solvers fcp,padded' prices it"
    )
    assert not (folder / "plan.parquet").exists()


def test_an_unknown_strategy_is_one_line_and_status_2(folder: Path) -> None:
    result = fcp("compare", "dataset.parquet", "--solvers", "fcp,statik", cwd=folder)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --solvers 'fcp,statik': choose from fcp,")
    assert result.stderr.endswith(", or all; did you mean 'static'?\n")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_profile_with_an_exposed_share_is_compared_under_its_common_ground(folder: Path, tmp_path: Path) -> None:
    ground = yaml.safe_load(PROFILE)
    costs = {name: ground[name] for name in ("coefficients", "bandwidth_bytes_per_second")}
    richer = {**ground, "common_ground": costs}
    richer["coefficients"] = {**costs["coefficients"], "linear_seconds_per_token": 1.0, "exposed_ring_share": 0.5}
    (tmp_path / "richer.yaml").write_text(yaml.safe_dump(richer))
    tables = []
    for profile in (folder / "profile.yaml", tmp_path / "richer.yaml"):
        arguments = ("--profile", str(profile), *SETTINGS, "--solvers", "static", "--json")
        result = fcp("compare", "dataset.parquet", *arguments, cwd=folder)
        assert result.returncode == 0, result.stderr
        tables.append(json.loads(result.stdout)["strategies"][0])
    assert "compared under the profile's common_ground, without exposed_ring_share" in result.stderr
    seconds = [[row["step_seconds"] for row in table["outcomes"].values()] for table in tables]
    assert seconds[0] == seconds[1]
