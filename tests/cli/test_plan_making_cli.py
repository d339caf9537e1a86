"""`fcp plan`: limits on groups, processes, and going on after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.cost.profile import dump_cost_profile
from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import EIGHT_RANKS, assert_one_error_line, fcp, write_dataset
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.plan.counted_peers import plan_peers
from tests.planning.examples import example_profile
from tests.planning.strategies.test_split_heads import HEADS

# `fcp` that keeps the steps of a short plan, and every thirty of them, where only long ones are kept, by the thousand.
IN_SHORT_WINDOWS = """
from fcp_cli.cli import app
from fcp_cli.planning import journal, make_plan
journal._ROWS_PER_WINDOW, make_plan._JOURNAL_FROM_STEPS = 256, 1
app.main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path)


@pytest.mark.lengthy
def test_a_limit_on_groups_holds_and_its_price_is_shown(folder: Path) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--max-groups", "3", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "3 groups cost" in result.stdout
    metadata = PlanReader(folder / "plan.parquet").metadata
    assert metadata.distinct_groups <= 3
    assert metadata.solver_options == {"max_groups": 3}
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--max-groups", "3", "--json", cwd=folder)
    assert json.loads(result.stdout)["max_groups_price"] > -0.05


def test_a_limit_on_peers_holds_and_its_price_is_shown(folder: Path) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--max-peers", "5", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["peers_most"] <= 5
    assert document["solver_options"] == {"max_peers": 5}
    assert -0.05 < document["max_peers_price"] < 0.2
    assert plan_peers(folder / "plan.parquet").to_json()["peers_mean"] == document["peers_mean"]


def test_a_step_may_have_so_many_tokens_in_place_of_so_many_sequences(folder: Path) -> None:
    ranks = EIGHT_RANKS[:-2]
    result = fcp("plan", "dataset.parquet", *ranks, "--global-batch-tokens", "24000", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    reader = PlanReader(folder / "plan.parquet")
    tokens = [int(step.lengths.sum()) for step in reader.steps()]
    assert max(tokens) <= 24000 and sum(tokens) == json.loads(result.stdout)["tokens"]
    assert fcp("check", "plan.parquet", "--manifest", "dataset.parquet", cwd=folder).returncode == 0
    assert reader.metadata.steps_per_epoch == len(tokens) == reader.metadata.steps


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--global-batch-tokens", "9"), 2, "--global-batch-tokens and --global-batch-size both say what a step"),
        (("--max-peers", "4", "--solver", "static"), 2, "--max-peers works with --solver fcp only"),
        (("--max-degree", "1", "--solver", "static"), 2, "--max-degree works with --solver fcp only"),
        (("--max-degree", "2"), 2, "--max-degree is 2; 1, which forbids rings, is the only limit"),
        (
            ("--max-degree", "1", "--max-peers", "4"),
            2,
            "--max-degree forbids rings, which --max-groups and --max-peers",
        ),
        (("--max-peers", "1"), 2, "--max-peers is 1, but rings of all degrees on 8 ranks"),
        (("--max-groups", "4", "--solver", "static"), 2, "--max-groups works with --solver fcp only"),
        (("--solver", "statik"), 2, "; did you mean 'static'?"),
        (("--solver", "statik", "--profile", "no.yaml"), 2, "--solver is 'statik'; it must be one of fcp, "),
        (("--resume", "-o", "-"), 2, "--resume cannot continue a plan on stdout"),
        (("--resume",), 1, "nothing to resume"),
    ],
)
def test_what_cannot_be_done_is_one_line(folder: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, *arguments, cwd=folder)
    assert message in assert_one_error_line(result, status)


@pytest.mark.parametrize(("solver", "attention"), [("usp", "2d"), ("deepspeed-ulysses", "ulysses")])
def test_a_strategy_that_splits_heads_brings_its_attention(folder: Path, solver: str, attention: str) -> None:
    profile = replace(example_profile(), heads=HEADS)
    (folder / "profile.yaml").write_text(dump_cost_profile(profile))
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--solver", solver, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert f"assumed --attention = {attention} (--solver {solver} requires this)" in result.stderr
    assert PlanReader(folder / "plan.parquet").metadata.attention == attention
    result = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--solver", solver, "--attention", "ring", cwd=folder)
    assert f"--solver {solver} splits heads; add --attention {attention}" in assert_one_error_line(result, 2)


@pytest.mark.processes
def test_a_long_plan_interrupted_by_ctrl_c_continues_to_the_same_plan(tmp_path: Path) -> None:
    write_dataset(tmp_path, sequences=8_000)
    command = [sys.executable, "-c", IN_SHORT_WINDOWS, "plan", "dataset.parquet", *EIGHT_RANKS, "--workers", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )

    def has_kept_a_step() -> bool:
        assert process.poll() is None
        kept = tmp_path / ".plan.parquet.journal" / "000000.steps"
        return kept.exists() and kept.stat().st_size > 4096  # more than where it begins

    wait_until(has_kept_a_step, every_seconds=0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert "continue with --resume" in err
    assert not (tmp_path / "plan.parquet").exists()
    resumed = fcp("plan", "dataset.parquet", *EIGHT_RANKS, "--resume", "--json", cwd=tmp_path)
    whole = fcp(
        "plan", "dataset.parquet", *EIGHT_RANKS, "--workers", "2", "--json", "-o", "other.parquet", cwd=tmp_path
    )
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["plan_hash"] == json.loads(whole.stdout)["plan_hash"]
    assert not (tmp_path / ".plan.parquet.journal").exists()


def test_a_plan_of_masked_sequences_says_so_and_counts_what_they_cost(folder: Path) -> None:
    rows = {"input_ids": [[1] * 4000, [2] * 3000, [3] * 2000], "chunks": [[1000, 1000], None, [10] * 100]}
    pq.write_table(pa.table(rows), folder / "data.parquet")
    bounds = {}
    for name, options in {"masked": ("--mask", "pairs:chunks"), "causal": ()}.items():
        assert fcp("manifest", "build", "data.parquet", *options, "-o", f"{name}.parquet", cwd=folder).returncode == 0
        plan = ("plan", f"{name}.parquet", *EIGHT_RANKS, "--global-batch-size", "3", "-o", f"{name}.plan.parquet")
        assert fcp(*plan, cwd=folder).returncode == 0
        assert fcp("check", f"{name}.plan.parquet", "--manifest", f"{name}.parquet", cwd=folder).returncode == 0
        reader = PlanReader(folder / f"{name}.plan.parquet")
        bounds[name] = next(iter(reader.steps())).bound_seconds
        assert reader.metadata.masked_sequences == (2 if options else None)
        masks = reader.metadata.mask_rows
        numbers = [] if masks is None else [list(masks.mask(row).numbers) for row in range(len(masks.offsets) - 1)]
        assert numbers == ([[1000, 1000], [], [10] * 100] if options else [])
    assert bounds["masked"] < bounds["causal"]
