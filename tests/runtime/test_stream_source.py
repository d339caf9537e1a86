"""Ranks agree on every step of a stream, or all stop with one line; here ranks are threads, planning is in process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli import Planner
from fcp_cli.errors import FcpError, RunError
from fcp_cli.plan.check import check_plan
from fcp_cli.plan.file import Message, PlanReader, steps_of, table_bytes
from fcp_cli.plan.metadata import OnlineSettings
from fcp_cli.plan.rings import ring_order
from fcp_cli.plan.step import StepPlan
from fcp_cli.planning.online import Service
from fcp_cli.runtime import online
from fcp_cli.runtime.connections import Connections
from fcp_cli.runtime.online import StreamSource
from fcp_cli.runtime.planner_process import ReadBatch
from fcp_cli.util.arrays import IntArray
from fcp_cli.verification.emulation import Meeting, ThreadTransport, run_ranks
from fcp_cli.verification.order import check_order
from fcp_cli.verification.recording import RecordingTransport
from tests.patience import PATIENCE_SECONDS
from tests.planning.examples import PROFILE
from tests.runtime.plans import make_step, random_steps

pytestmark = pytest.mark.torch

RANKS = 4


class Table:
    """Where threads tell each other something: all give, all take what all gave."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=PATIENCE_SECONDS)
        self._told: list[Any] = [None] * RANKS

    def tell(self, rank: int, value: Any) -> list[Any]:
        self._told[rank] = value
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found


class ThreadControl:
    """A `Control` of threads."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, RANKS

    def from_rank(self, rank: int, message: bytes) -> bytes:
        return bytes(self._table.tell(self.rank, message)[rank])

    def table(self, words: list[int]) -> IntArray:
        return np.array(self._table.tell(self.rank, words), dtype=np.int64)


class PlanningInProcess:
    """The planning process without a process."""

    def __init__(self, given: OnlineSettings, plan: Path, first_step: int) -> None:
        facts = {"settings": given.to_json(), "plan": str(plan), "first_step": first_step}
        self._service = Service(json.loads(json.dumps(facts)))
        self.opened = self._service.opened()

    def refit(self, first_step: int, measured: bytes) -> dict[str, Any]:
        answer = self._service.answer(Message({"kind": "measured", "first_step": first_step}, measured))
        assert answer is not None
        return answer[0]

    def adopt(self, refit: Any) -> None:
        self._service.answer(Message({"kind": "adopt", "refit": refit}, b""))

    def plan(self, batch: ReadBatch) -> list[StepPlan]:
        answer = self._service.answer(self._message("batch", batch))
        assert answer is not None
        return steps_of(answer[1])

    def compare(self, batch: ReadBatch) -> None:
        self._service.answer(self._message("trained", batch))

    def close(self, end_step: int, *, is_stopped: bool) -> None:
        self._service.answer(Message({"kind": "close", "end_step": end_step}, b""))

    def _message(self, kind: str, batch: ReadBatch) -> Message:
        facts = {"step": batch.step, "first_sequence": batch.first_sequence}
        return Message({"kind": kind, **facts}, table_bytes(batch.columns()))


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planner:
    monkeypatch.setattr(online, "StreamProcess", PlanningInProcess)
    (tmp_path / "profile.yaml").write_text(PROFILE)
    return Planner(tmp_path / "profile.yaml", ranks=RANKS, ranks_per_node=2, tokens_per_rank=100, sync="iteration")


Stream = Callable[[int], Iterable[Any]]


def follow(
    plan: Path,
    stream: Stream,
    online: OnlineSettings,
    *,
    first: int = 0,
    most: int = 99,
    takes: Callable[[StepPlan], dict[str, Any]] | None = None,
) -> list[Any]:
    """Return what each rank followed: its steps with what it fetched, or its error; `takes` is what rank 0 measures."""
    table = Table()

    def run(_meeting: Meeting, rank: int) -> Any:
        control = ThreadControl(table, rank)
        mine = StreamSource(stream(rank), online, plan, control, lambda given: given)
        steps: list[Any] = []
        try:
            mine.open(first)
            for step in mine.steps():
                mine.hand_out(step.step)
                steps.append((step.to_dict(), [mine.fetch(int(row)) for row in step.sequences]))
                if takes is not None and rank == 0:
                    mine.measured.note(takes(step))
                if len(steps) == most:
                    break
                mine.want(step.step + 1)
        except FcpError as error:
            return str(error)
        mine.close(first + len(steps))
        return steps

    return run_ranks(RANKS, run)


def lengths(rank: int, count: int = 14, seed: int = 0) -> Iterable[tuple[int, int]]:
    drawn = np.random.default_rng(seed).integers(1, 150, count)
    return ((100 + place, int(length)) for place, length in enumerate(drawn))


@pytest.mark.parametrize("ahead", [0, 3])
def test_all_ranks_follow_the_same_steps_and_know_the_ids_of_their_sequences(
    tmp_path: Path, planner: Planner, ahead: int
) -> None:
    online = planner.online(global_batch_size=4, ahead=ahead)
    found = follow(tmp_path / "plan.parquet", lengths, online)
    assert all(rank == found[0] for rank in found) and [len(ids) for _, ids in found[0]] == [4, 4, 4, 2]
    for number, (_step, ids) in enumerate(found[0]):
        assert sorted(ids) == list(range(100 + 4 * number, 100 + min(4 * number + 4, 14)))
    written = [step.to_dict() for step in PlanReader(tmp_path / "plan.parquet").steps()]
    assert written == [step for step, _ in found[0]]


def test_a_run_that_is_left_and_begun_again_follows_the_same_steps(tmp_path: Path, planner: Planner) -> None:
    plan, rule = tmp_path / "plan.parquet", {"global_batch_size": 3}
    whole = follow(tmp_path / "whole.parquet", lengths, planner.online(**rule))[0]
    before = follow(plan, lengths, planner.online(**rule), most=3)
    after = follow(plan, lengths, planner.online(**rule), first=3)
    assert [rank[:3] + later for rank, later in zip(before, after, strict=True)] == RANKS * [whole]
    assert [step.to_dict() for step in PlanReader(plan).steps()] == [step for step, _ in whole]


def test_a_stream_that_goes_on_from_here_is_numbered_on(tmp_path: Path, planner: Planner) -> None:
    plan, online = tmp_path / "plan.parquet", planner.online(stream_begins="here")
    follow(plan, lambda rank: [[(1, 5), (2, 6)], [(3, 7)]], online)
    (step, ids), *_ = follow(plan, lambda rank: [[(9, 8)]], online, first=2)[1]
    assert ids == [9] and step["step"] == 2
    assert [step.sequences.tolist() for step in PlanReader(plan).steps()][1:] == [[2], [3]]


def takes_longer(step: StepPlan) -> dict[str, Any]:
    """Return a record in which all work takes half as long again as the example profile says, and on rank 1 twice that."""
    ranks = [
        {
            "rank": rank,
            "micro_batches": [
                {
                    "order": row.order,
                    "seconds": (0.1 + 1.5 * 2.838e-4 * row.tokens / row.degree) * (1 + (1 in row.ranks)),
                }
                for row in step.microbatches()
                if rank in row.ranks and not row.is_idle
            ],
        }
        for rank in range(RANKS)
    ]
    return {
        "kind": "step",
        "step": step.step,
        "warm_up": step.step == 0,
        "seconds": step.makespan_seconds,
        "ranks": ranks,
    }


@pytest.mark.full
def test_what_was_measured_is_counted_from_a_step_on_and_again_after_a_restart(
    tmp_path: Path, planner: Planner, capfd: pytest.CaptureFixture[str]
) -> None:
    plan, whole = tmp_path / "plan.parquet", tmp_path / "whole.parquet"
    many = partial(lengths, count=54)
    rule: dict[str, Any] = {"global_batch_size": 6, "ahead": 0, "refit_every": 4}
    online = planner.online(**rule)
    found = follow(whole, many, online, takes=takes_longer)
    assert all(rank == found[0] for rank in found) and len(found[0]) == 9
    refits = PlanReader(whole).metadata.refits
    assert refits is not None and refits[0].first_step == 4
    assert refits[0].rank_speeds == {"1": pytest.approx(0.5, abs=0.05)}
    assert refits[0].factors.linear > 1.1
    assert list(check_plan(whole)) == []
    before = follow(plan, many, online, takes=takes_longer, most=8)
    # Nothing is measured anew of what was planned before: a job begun again repeats what was counted then.
    after = follow(plan, many, online, first=6, takes=takes_longer, most=2)
    assert [rank[6:8] for rank in before] == after
    assert "fcp: step 4: " in capfd.readouterr().err


@pytest.mark.full  # the library alone takes seconds to load
def test_a_hugging_face_data_set_that_streams_is_read_as_it_is(tmp_path: Path, planner: Planner) -> None:
    from datasets import load_dataset

    files = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for number, file in enumerate(files):
        written = [{"input_ids": [number] * length, "labels": [9] * length} for _, length in lengths(0, 6, seed=number)]
        file.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")

    names, cache = list(map(str, files)), str(tmp_path / "cache")
    # Loaded outside the threads that stand for ranks, which would wait for each other at its locks.
    data = load_dataset("json", data_files=names, split="train", streaming=True, cache_dir=cache)

    def stream(_rank: int) -> Iterable[Any]:
        shuffled: Iterable[Any] = data.shuffle(seed=1, buffer_size=4)
        return shuffled

    online = planner.online(global_batch_size=4)
    found = follow(tmp_path / "plan.parquet", stream, online)
    assert all(rank == found[0] for rank in found) and len(found[0]) == 3
    drawn = sorted(len(row["input_ids"]) for _step, rows in found[0] for row in rows)
    assert drawn == sorted(length for seed in (0, 1) for _, length in lengths(0, 6, seed=seed))


def rows(rank: int, *, odd: int | None = None, short: bool = False) -> list[dict[str, Any]]:
    found = [{"input_ids": [7] * length} for _, length in lengths(rank)]
    if rank == odd:
        found[5] = {"input_ids": [7] * 3}
    return found[:8] if short and rank == 2 else found


@pytest.mark.parametrize(
    ("stream", "options", "line"),
    [
        (
            lambda rank: [(0, 5), (1, 401)],
            {"global_batch_size": 1},
            "sequence 1 of the stream has 401 tokens; 4 ranks of 100 tokens hold at most 400; drop it from the stream, "
            "truncate it, or plan with more tokens_per_rank or ranks",
        ),
        (lambda rank: [[(0, 5)], []], {}, "batch 1 of the stream is empty; a step needs a sequence"),
        (lambda rank: [], {}, "the stream ended before its first sequence; a run needs a step to train"),
        (
            lambda rank: [(0, 5), (1, "x")],
            {"global_batch_size": 1},
            "sequence 1 of the stream has the id 1 and the length 'x'; an id is a number or a text, a length a number of "
            "tokens",
        ),
        (
            lambda rank: lengths(rank),
            {},
            "the stream gives (100, 127) where a batch is due; name global_batch_size or global_batch_tokens for a "
            "stream of single sequences: planner.online(global_batch_size=...)",
        ),
        (
            partial(rows, odd=1),
            {"global_batch_size": 4},
            "sequence 5 of the stream of rank 1 has 3 tokens, where the plan has 7; give every rank the same stream: "
            "the same data, seed and order",
        ),
        (
            partial(rows, short=True),
            {"global_batch_size": 4},
            "the stream of rank 2 ends before step 2, that of rank 0 goes on; give every rank the same stream: the same "
            "data, seed and order",
        ),
        (
            lambda rank: (1 // 0 for _ in range(3)),
            {"global_batch_size": 4},
            "the stream failed: ZeroDivisionError: integer division or modulo by zero",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_on_all_ranks(
    tmp_path: Path, planner: Planner, stream: Stream, options: dict[str, Any], line: str
) -> None:
    assert follow(tmp_path / "plan.parquet", stream, planner.online(**options)) == RANKS * [line]


def test_another_stream_or_another_planner_after_a_restart_is_one_line(tmp_path: Path, planner: Planner) -> None:
    plan, online = tmp_path / "plan.parquet", planner.online(global_batch_size=2)
    follow(plan, lengths, online, most=3)
    (line,) = set(follow(plan, partial(lengths, seed=1), online, first=2))
    assert line == (
        "the stream starts over, but its sequence 0 has 71 tokens, where it had 127 when it was trained; give the "
        "same stream, or begin where the run stopped with stream_begins='here'"
    )
    others = follow(plan, lengths, planner.online(global_batch_size=3), first=2)
    assert len(set(others)) == 1 and "was begun for other ranks, another cost profile or other batches" in others[0]


@settings(max_examples=12)
@given(st.integers(2, 7), st.integers(0, 10**6))
def test_meeting_before_each_step_keeps_an_order_that_ends_where_every_operation_blocks(ranks: int, seed: int) -> None:
    rows_of_steps = random_steps(ranks, 3, sync="iteration", seed=seed)
    planned = [make_step(rows, step=number, first_sequence=0) for number, rows in enumerate(rows_of_steps)]

    def run(meeting: Meeting, rank: int) -> Any:
        transport = RecordingTransport(ThreadTransport(meeting.mailbox, rank, timeout_seconds=20.0))
        contacts = Connections(transport, rank=rank, device=torch.device("cpu"))
        met: set[int] = set()
        for step in planned:
            contacts.open_for(step, ranks)
            met |= {one.peer for one in transport.operations if one.content == "contact"}
            for row in step.microbatches():
                if rank in row.ranks and row.degree > 1:
                    around = ring_order(row.ranks, ranks)
                    at = around.index(rank)
                    to, source_rank = around[(at + 1) % row.degree], around[at - 1]
                    assert {to, source_rank} <= met
                    transport.start("kv", torch.zeros(2), to, torch.empty(2), source_rank).wait()
        return tuple(transport.operations)

    check_order(dict(enumerate(run_ranks(ranks, run))))


def test_a_stream_without_a_planner_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.runtime.online import online_settings

    monkeypatch.delenv("FCP_ONLINE", raising=False)
    with pytest.raises(RunError, match=r"^a stream needs a planner: pass planner=Planner\(\.\.\.\), or start"):
        online_settings(None)
