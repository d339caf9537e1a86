"""Plans on MindSpeed's ring attention, on four gloo ranks: a small stand-in of ours, or real sources where they are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.launch import ROOT, torchrun
from tests.runtime.mindspeed.sources import STAND_IN, real_sources
from tests.runtime.plans import Row, write_plan

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")

from tests.runtime.megatron.test_gradients import NUM_RANKS, PIPELINE, TENSOR, WAVES, worst_share_error

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

# {3,1}, {1,3}, {2,2}, {4}; groups that are not contiguous, unequal numbers of micro-batches, an idle rank.
SWITCHING = (
    (Row([0, 1, 2], [7, 30]), Row([3], [5, 1]), Row([0, 1], [13]), Row([2, 3], [41, 2, 3])),
    (Row([0], [7, 2]), Row([1, 2, 3], [33, 5]), Row([0, 1, 2, 3], [41, 2, 9]), Row([2], [8])),
    (Row([0, 2], [17, 4]), Row([1, 3], [9]), Row([1], [5]), Row([0, 1, 3], [20, 1]), Row([3], [6]), Row([0], [8])),
    (Row([0, 1, 2], [10, 11, 12, 13, 14, 15, 16, 17]), Row([3])),
)
# All heads shared; sets of two on a ring; as many ranks as query heads, more than key/value heads; rings beside sets.
SHARING_HEADS = (
    (Row([0, 1], [7, 30], heads_degree=2), Row([2, 3], [5, 1]), Row([0, 1, 2, 3], [41, 2, 3, 9], heads_degree=2)),
    (Row([0, 1, 2, 3], [33, 5, 1], heads_degree=4), Row([0, 2], [17, 4], heads_degree=2), Row([1, 3], [8, 2, 1])),
    (Row([0, 1, 2], [10, 11]), Row([3], [12, 3, 4]), Row([2, 3], [6, 1, 9], heads_degree=2)),
)
EQUAL = ("switching", "core attention recomputed", "two forwards recomputed", "without patch manager",
         "keys and values kept", "mrope recomputed", "sharing heads recomputed", "hybrid mrope", "own ring recomputed",
         "own ring sharing heads", "double ring")  # fmt: skip
FULL_EQUAL = ("recomputed", "two forwards", "mrope", "sharing heads", "ulysses", "ulysses on rings", "hybrid",
              "own ring", "own ring, core attention recomputed", "own ring mrope", "keys gathered", "adaptive", "no ring")  # fmt: skip
SHARES = ("sequence recomputed", "pipeline recomputed")
FULL_SHARES = ("tensor", "pipeline", "own ring pipeline")


def run_worker(folder: Path, *sources: Path | str, kind: str) -> Path:
    write_plan(folder / "switching.parquet", SWITCHING, num_ranks=NUM_RANKS, rows=32)
    write_plan(folder / "waves.parquet", WAVES, num_ranks=NUM_RANKS, sync="microbatch", rows=16)
    write_plan(folder / "sharing_heads.parquet", SHARING_HEADS, num_ranks=NUM_RANKS, rows=24)
    write_plan(folder / "tensor.parquet", TENSOR, num_ranks=2, rows=12, tensor_parallel=2)
    write_plan(folder / "pipeline.parquet", PIPELINE, num_ranks=2, rows=8, sync="microbatch", pipeline_parallel=2)
    path = os.pathsep.join(map(str, (*sources, ROOT)))
    torchrun("-m", "tests.runtime.mindspeed.worker", str(folder), kind, num_ranks=NUM_RANKS, PYTHONPATH=path)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one job of four ranks left the gradients of its cases."""
    return run_worker(tmp_path_factory.mktemp("mindspeed"), STAND_IN, kind="default")


@pytest.fixture(scope="module")
def full_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_worker(tmp_path_factory.mktemp("mindspeed-full"), STAND_IN, kind="full")


def found_by(folder: Path, case: str, rank: int) -> tuple[np.ndarray, list[Any]]:
    found: tuple[np.ndarray, list[Any]] = pickle.loads((folder / f"{case}-{rank}.pickle").read_bytes())
    return found


def worst_error(folder: Path, case: str) -> float:
    """Largest difference from one process, over all ranks and steps, relative to the gradient's largest entry."""
    alone: np.ndarray = pickle.loads((folder / f"{case}-alone.pickle").read_bytes())
    errors = [float(np.abs(found_by(folder, case, rank)[0] - alone).max()) for rank in range(NUM_RANKS)]
    return max(errors) / float(np.abs(alone).max())


@pytest.mark.parametrize("case", EQUAL)
def test_every_rank_ends_with_the_gradient_of_one_process(folder: Path, case: str) -> None:
    assert worst_error(folder, case) <= 1e-12


@pytest.mark.parametrize("case", SHARES)
def test_every_process_of_a_rank_ends_with_its_share_of_the_gradient_of_one_process(folder: Path, case: str) -> None:
    assert worst_share_error(folder, case) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_EQUAL)
def test_every_rank_ends_with_the_gradient_of_one_process_in_more_cases(full_folder: Path, case: str) -> None:
    assert worst_error(full_folder, case) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize("case", FULL_SHARES)
def test_every_process_of_a_rank_ends_with_its_share_in_more_cases(full_folder: Path, case: str) -> None:
    assert worst_share_error(full_folder, case) <= 1e-12


def test_the_script_gets_one_report_of_all_ranks(folder: Path) -> None:
    reports = [found_by(folder, "switching", rank)[1] for rank in range(NUM_RANKS)]
    for step in range(len(SWITCHING)):
        (first,), *others = (report[step] for report in reports)
        loss, tokens = first["lm loss"]
        assert tokens > 0 and 3.0 < loss / tokens < 6.0  # near the logarithm of the vocabulary, 64
        assert all(other == [first] for other in others)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("per-token loss", "add --calculate-per-token-loss"),
        ("changed", "has no mindspeed.core.context_parallel.utils.unflatten_softmax; branches known to work: "),
        (
            "other attention",
            "the model attends with a Identity, with no core attention of Megatron or MindSpeed; a plan cannot follow",
        ),
        ("probe", "the probe before the first step failed: on the plan's groups attention differs by "),
        ("repatched", "something has taken away the hooks that inform Megatron of the plan's groups"),
    ],
)
def test_what_cannot_be_followed_stops_every_rank_with_one_line(folder: Path, case: str, message: str) -> None:
    for rank in range(NUM_RANKS):
        found = (folder / f"{case}-{rank}.refused").read_text()
        assert message in found and "\n" not in found


def test_real_mindspeed_ends_with_the_gradient_of_one_process(tmp_path: Path) -> None:
    """Its own ring, patch manager and Megatron, on a torch_npu whose attention is written out in fp64."""
    run_worker(tmp_path, *real_sources(), kind="all")
    errors = {case: worst_error(tmp_path, case) for case in (*EQUAL, *FULL_EQUAL)}
    errors |= {case: worst_share_error(tmp_path, case) for case in (*SHARES, *FULL_SHARES)}
    print(errors)
    assert max(errors.values()) <= 1e-12
