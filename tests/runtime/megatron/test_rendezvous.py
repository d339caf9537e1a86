"""Megatron under NCCL's semantics with one hardware queue: overlapped reductions, gathers and replicas that end."""

from __future__ import annotations

import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest

# First: the tests of gradients, whose plans these follow, leave off where it is missing.
pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")

from fcp_cli.verification.order import check_order
from tests.runtime.launch import torchrun
from tests.runtime.megatron.test_gradients import NUM_RANKS, worst_error, write_plans

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one job of four ranks left the gradients of all cases, and what it issued."""
    folder = tmp_path_factory.mktemp("rendezvous")
    write_plans(folder)
    torchrun("-m", "tests.runtime.megatron.rendezvous_worker", str(folder), num_ranks=NUM_RANKS)
    return folder


@pytest.mark.parametrize("case", ["overlapped", "gathering", "sequence", "pipeline", "virtual stages"])
def test_megatron_ends_on_one_queue_with_the_gradients_of_one_process(folder: Path, case: str) -> None:
    if (folder / f"{case}-alone.pickle").exists():
        assert worst_error(folder, case) <= 1e-12
    else:  # of a process's share
        assert max(pickle.loads((folder / f"{case}-{rank}.pickle").read_bytes()) for rank in range(NUM_RANKS)) <= 1e-12
    left = [pickle.loads((folder / f"{case}-{rank}.operations").read_bytes()) for rank in range(NUM_RANKS)]
    groups = {name: ranks for _, of_rank in left for name, ranks in of_rank.items()}
    check_order({rank: operations for rank, (operations, _) in enumerate(left)}, groups)


def test_overlapped_buckets_are_reduced_after_the_last_hop_of_the_step(folder: Path) -> None:
    """Between two reductions of buckets of a step there is no message."""
    for rank in range(NUM_RANKS):
        operations, _ = pickle.loads((folder / f"overlapped-{rank}.operations").read_bytes())
        verbs = [operation.verb for operation in operations]
        buckets = [i for i, verb in enumerate(verbs) if verb == "allreduce_coalesced"]
        assert len(buckets) > 4  # of four steps, several each
        apart = [verbs[a + 1 : b] for a, b in pairwise(buckets)]
        assert sum("send" in between or "recv" in between for between in apart) <= 3


def test_overlapped_reductions_that_are_left_inside_the_backward_hang_and_are_named(folder: Path) -> None:
    """Rank 2's only micro-batch is a ring with rank 0, which has another one left."""
    said = [(folder / f"reducing inside backward-{rank}.hang").read_text() for rank in range(NUM_RANKS)]
    assert re.match(r"rank 2 hangs in queue 0 in allreduce_coalesced on DATA_PARALLEL_GROUP", said[2])
    assert re.match(r"rank 0 hangs in queue 0 in (send to|recv from) rank 2 on rings", said[0])
