"""Whole jobs under NCCL's semantics: unbuffered, in launch order, with one hardware queue for everything.

What gloo lets pass hangs there, and says which rank waits where for what. What ends there also has an order that the
check proves free of deadlocks, and the gradients of one process.
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.verification.order import Operation, check_order, deadlock
from tests.runtime.launch import torchrun
from tests.runtime.models import Case, assert_agrees, expected
from tests.runtime.plans import write_plan
from tests.training.small_runs import write_manifest, write_small_plan

pytest.importorskip("transformers")

from tests.runtime import test_vision_language
from tests.runtime.vision_models import alone
from tests.runtime.workers import vision_worker
from tests.runtime.workers.rendezvous_worker import (
    LATE,
    MORE_WRAPPED,
    TRAINED,
    TRAINED_WAVES,
    TRAINERS,
    WITH_IMAGES,
    WRAPPED,
)
from tests.runtime.workers.session_worker import GRADIENT_CASES, HAND_MADE, NUM_RANKS, write_inputs

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.distributed]


def write_all_inputs(folder: Path) -> None:
    write_inputs(folder)
    test_vision_language.write_plans(folder)
    # The ring of all ranks is the last micro-batch of three of them; rank 1 has another one left.
    write_plan(folder / LATE, [HAND_MADE[0]] * 2, num_ranks=NUM_RANKS)
    manifest = write_manifest(folder)
    write_small_plan(folder / TRAINED, manifest, steps=2)
    write_small_plan(folder / TRAINED_WAVES, manifest, steps=2, sync="microbatch")


@cache
def job(*, full: bool) -> dict[str, list[Any]]:
    """Case -> what each rank left of it: a mapping, or what it said as it hung. One launch serves all examples."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_all_inputs(folder)
        torchrun(
            "-m", "tests.runtime.workers.rendezvous_worker", name, *(["full"] if full else []), num_ranks=NUM_RANKS
        )
        found: dict[str, list[Any]] = {}
        for path in sorted(folder.glob("*.pickle")):
            found.setdefault(path.stem.rpartition("-")[0], []).append(pickle.loads(path.read_bytes()))
        for path in sorted(folder.glob("*.hang")):
            found.setdefault(path.stem.rpartition("-")[0], []).append(path.read_text())
        return found


def job_of(name: str) -> dict[str, list[Any]]:
    return job(full=name in MORE_WRAPPED)


def recorded(name: str) -> tuple[dict[int, tuple[Operation, ...]], dict[str, tuple[int, ...]]]:
    """What every rank issued in a case, and the ranks of the groups."""
    ranks = job_of(name)[name]
    assert len(ranks) == NUM_RANKS
    groups = {group: members for left in ranks for group, members in left["groups"].items()}
    return {rank: left["operations"] for rank, left in enumerate(ranks)}, groups


@pytest.mark.parametrize("name", [*WRAPPED, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_WRAPPED)])
def test_a_wrapped_model_ends_on_one_queue_with_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    plan, case = GRADIENT_CASES[name]
    write_inputs(tmp_path)
    reference = expected(case, tmp_path / plan)
    for left in job_of(name)[name]:
        assert_agrees(case, left["found"], reference)
    check_order(*recorded(name))


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_an_encoders_exchange_ends_on_one_queue(name: str, tmp_path: Path) -> None:
    plan, case = vision_worker.CASES[name]
    test_vision_language.write_plans(tmp_path)
    reference = alone(case, tmp_path / f"{case.family}-{plan}")
    for left in job(full=False)[f"images {name}"]:
        test_vision_language.assert_agrees(left["found"], reference)
    check_order(*recorded(f"images {name}"))


@pytest.mark.parametrize("name", TRAINERS)
def test_the_bundled_trainer_ends_on_one_queue(name: str) -> None:
    operations, groups = recorded(name)
    check_order(operations, groups)
    assert all({"send", "recv", "allreduce"} <= {op.verb for op in issued} for issued in operations.values())


def test_everything_that_a_rank_issues_is_recorded() -> None:
    """Agreement on the plan, DDP's own collectives as it is made, hops with what they carry, the script's losses."""
    issued = recorded("ddp")[0][0]
    assert {op.verb for op in issued} >= {"allgather", "broadcast", "allreduce", "send", "recv"}
    assert {op.group.split()[0] for op in issued} == {"world", "rings"}


def test_reducing_inside_a_backward_hangs_on_one_queue_and_is_named() -> None:
    assert len(job(full=False)["inside backward"]) == NUM_RANKS
    said = job(full=False)["inside backward"][0]
    assert said.startswith("rank 0 hangs in queue 0 in allreduce on world (")
    assert "rank 1 is at send to rank 0 on rings (2) (" in said


def test_the_record_of_reducing_inside_a_backward_hangs_with_few_queues_and_ends_with_many(tmp_path: Path) -> None:
    """It ran to its end with a queue for each communicator, with the right gradients, as it does over gloo."""
    write_plan(tmp_path / LATE, [HAND_MADE[0]] * 2, num_ranks=NUM_RANKS)
    name = "inside backward on many queues"
    for left in job(full=False)[name]:
        assert_agrees(Case(), left["found"], expected(Case(), tmp_path / LATE))
    operations, groups = recorded(name)
    assert [queues for queues in (1, 8, 32, None) if deadlock(operations, groups, queues=queues)] == [1]
    with pytest.raises(
        RunError,
        match=r"^deadlock on devices with 1 (or 2 )?hardware queues?: rank 0 waits forever in batch \d+: allreduce on "
        r"world \(\d+ bytes\); rank 1 is in batch \d+: send to rank 0 on rings",
    ):
        check_order(operations, groups)


def test_a_wrong_order_over_two_communicators_hangs_on_one_queue_and_is_named_on_every_rank() -> None:
    reduction, receive = "allreduce on world (8 bytes)", "recv from rank 0 on rings (2) (4 bytes)"
    assert job(full=False)["another order"] == [
        f"rank 1 hangs in queue 0 in {receive}: rank 0 is at {reduction}"
        if rank == 1
        else f"rank {rank} hangs in queue 0 in {reduction}: rank 1 is at {receive}"
        for rank in range(NUM_RANKS)
    ]
    assert [left["found"] for left in job(full=False)["another order on many queues"]] == [None] * NUM_RANKS


def test_messages_that_are_sent_before_any_is_received_hang_on_any_device() -> None:
    assert [said.partition(":")[0] for said in job(full=False)["unbatched"]] == [
        f"rank {rank} hangs in queue 1 in send to rank {(rank + 1) % NUM_RANKS} on world (4 bytes)"
        for rank in range(NUM_RANKS)
    ]
