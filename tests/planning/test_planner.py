"""A program that plans its own batches gets what `fcp plan` writes, and one clear line for what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli import Planner
from fcp_cli.plan.file import steps_to_arrow
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from tests.messages import raises
from tests.patience import PATIENCE_SECONDS
from tests.planning.examples import PROFILE, example_problem, first_step, table_of

SYNCS: list[Sync] = ["iteration", "microbatch"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planner") / "profile.yaml"
    path.write_text(PROFILE, encoding="utf-8")
    return path


def planner(profile: Path, sync: Sync = "iteration", *, max_degree: int | None = None) -> Planner:
    return Planner(profile, ranks=16, ranks_per_node=4, tokens_per_rank=16384, sync=sync, max_degree=max_degree)


@pytest.mark.parametrize("sync", SYNCS)
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=60))
def test_a_batch_is_planned_as_fcp_plan_plans_it(profile: Path, sync: Sync, lengths: list[int]) -> None:
    batches = GlobalBatches(
        table_of(lengths), example_problem(sync), BatchSettings(global_batch_size=len(lengths), shuffle=False)
    )
    written = first_step(batches)
    assert steps_to_arrow([planner(profile, sync).plan(lengths)]).equals(steps_to_arrow([written]))


def test_threads_that_plan_at_once_get_the_same_steps_as_one_after_another(profile: Path) -> None:
    shared = planner(profile)
    drawn = [np.random.default_rng(seed).integers(1, 40_000, 50) for seed in range(12)]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(shared.plan, drawn))
    for lengths, step in zip(drawn, at_once, strict=True):
        assert step.to_dict() == planner(profile).plan(lengths).to_dict()


def test_a_step_is_plain_values_with_its_bound_and_the_packs_of_each_rank(profile: Path) -> None:
    lengths = [40_000, 3_000, 900, 900, 12]
    step = planner(profile).plan(lengths, step=7)
    read = json.loads(json.dumps(step.to_dict()))
    assert read["step"] == 7 and 0 < read["bound_seconds"] <= read["makespan_seconds"]
    rows = [row for row in read["microbatches"] if row["sequences"]]
    assert sorted(position for row in rows for position in row["sequences"]) == [0, 1, 2, 3, 4]
    for rank in range(16):
        mine = [row["sequences"] for row in rows if rank in row["ranks"]]
        assert [pack for pack in step.packs_of(rank) if pack] == mine
    ring = next(row for row in rows if 0 in row["sequences"])
    assert len(ring["ranks"]) > 1


def test_a_full_mask_costs_time(profile: Path) -> None:
    causal, full = (planner(profile).plan([60_000], eta=[eta]).makespan_seconds for eta in (0.0, 1.0))
    assert full > 1.1 * causal


def test_without_rings_every_sequence_is_on_one_rank_once(profile: Path) -> None:
    lengths = np.random.default_rng(1).integers(100, 16_384, 80)
    step = planner(profile, max_degree=1).plan(lengths)
    assert set(step.degrees.tolist()) == {1}
    packs = [pack for rank in range(16) for pack in step.packs_of(rank)]
    assert sorted(position for pack in packs for position in pack) == list(range(80))


def test_what_was_assumed_is_named(profile: Path) -> None:
    assert Planner(profile, ranks=16, ranks_per_node=4).assumed == {
        "--tokens-per-rank": "16384 (the profile's memory figures are missing)"
    }


@pytest.mark.parametrize(
    ("lengths", "extra", "line"),
    [
        ([], {}, "ManifestError: lengths have the shape (0,); a step needs [sequences], at least one"),
        ([1.5], {}, "ManifestError: lengths are float64; tokens are whole numbers"),
        ([[1, 2]], {}, "ManifestError: lengths have the shape (1, 2); a step needs [sequences], at least one"),
        ([5, 0], {}, "ManifestError: lengths[1] is 0; a sequence has 1 to 2147483647 tokens"),
        ([5, 6], {"eta": [0.5]}, "ManifestError: eta has the shape (1,); lengths have (2,)"),
        (
            [5, 6],
            {"vision_patches": [4, -1]},
            "ManifestError: the batch: row 1 of column 'vision_patches' is -1; it must be a finite number >= 0 (1 such row in all)",
        ),
        (
            [5, 300_000],
            {},
            "OverlongError: sequence 1 of the batch has 300000 tokens; 16 ranks of 16384 tokens hold at most 262144",
        ),
    ],
)
def test_a_batch_that_cannot_be_planned_is_one_line(
    profile: Path, lengths: npt.ArrayLike, extra: dict[str, Any], line: str
) -> None:
    with raises(line):
        planner(profile).plan(lengths, **extra)


def test_without_rings_a_sequence_that_one_rank_cannot_hold_is_one_line(profile: Path) -> None:
    with raises(
        "OverlongError: sequence 1 of the batch has 16385 tokens; without rings (max_degree=1) a rank holds at most 16384"
    ):
        planner(profile, max_degree=1).plan([100, 16_385])


@pytest.mark.lengthy
def test_a_forward_pass_is_planned_by_its_own_prices_and_memory(profile: Path) -> None:
    lengths = np.random.default_rng(3).integers(100, 40_000, 60)
    given: dict[str, Any] = {"ranks": 16, "ranks_per_node": 4, "sync": "iteration"}
    training = Planner(profile, **given, tokens_per_rank=16384).plan(lengths)
    forward = Planner(profile, **given, tokens_per_rank=16384, phase="forward").plan(lengths)
    assert training.makespan_seconds / 4 < forward.makespan_seconds < training.makespan_seconds / 2.5
    assert 0 < forward.bound_seconds <= forward.makespan_seconds
    both = [
        Planner(model="qwen3-8b", cluster="h100-8x8", ranks=64, phase=phase).problem
        for phase in ("training", "forward")
    ]
    assert both[0].recipe == both[1].recipe and both[0].phase is None and both[1].phase == "forward"
    assert both[1].tokens_per_rank > 5 * both[0].tokens_per_rank  # layers let go of what a backward would need


def test_a_profile_of_forward_passes_is_refused_for_training(tmp_path: Path) -> None:
    path = tmp_path / "forward.yaml"
    path.write_text(PROFILE + "phase: forward\n", encoding="utf-8")
    assert Planner(path, ranks=4, ranks_per_node=4, phase="forward").problem.profile.text == path.read_text()
    with raises(
        "UsageError: the cost profile of qwen3-8b on example-8x8 is of forward passes; add --phase forward, or give one "
        "of training with --profile"
    ):
        Planner(path, ranks=4, ranks_per_node=4)


_COUNTED = """
import sys
import numpy as np
from numba.core.event import RecordingListener, install_listener
from fcp_cli import Planner

planner = Planner(sys.argv[1], ranks=int(sys.argv[3]), ranks_per_node=4, tokens_per_rank=16384, sync=sys.argv[2])
first, later = RecordingListener(), RecordingListener()
with install_listener("numba:compile", first):
    planner.plan([5])
random = np.random.default_rng(0)
with install_listener("numba:compile", later):
    for batch in range(40):
        planner.plan(random.integers(1, 4 * 16384, 1 + batch % 20))
    planner.plan([4096] * 64)
print(len(first.buffer), len(later.buffer))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("sync", "ranks"), [("iteration", 4), ("microbatch", 16)])
def test_no_call_after_the_first_compiles_or_loads_an_inner_loop(profile: Path, sync: str, ranks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COUNTED, str(profile), sync, str(ranks)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    at_first, later = map(int, done.stdout.split())
    assert at_first > 0 and later == 0
