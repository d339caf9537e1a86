"""A rank that waits too long says where, once."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inline_snapshot import snapshot

from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime import transport
from fcp_cli.runtime.guards import Watch, watch_for
from fcp_cli.runtime.metrics import Clock, DeviceClock
from fcp_cli.runtime.transport import ProcessTransport, ProcessWorld, join_process_group, rank_timeout
from tests.messages import raises
from tests.patience import wait_until
from tests.runtime.plans import microbatch

pytestmark = pytest.mark.torch


@dataclass
class Device(Clock):
    """A device that has passed the marks it was told to; a mark is any number."""

    passed: set[float] = field(default_factory=set)

    def has_passed(self, mark: float) -> bool:
        return mark in self.passed


def row(order: int, *ranks: int) -> MicroBatch:
    return microbatch((9,), ranks, step=7, order=order)


def watching(rank: int, seconds: float = 10.0, clock: Clock | None = None) -> tuple[Watch, list[str]]:
    """A watch, and the lines that it says."""
    lines: list[str] = []
    return Watch(rank, clock or Clock(), seconds, lines.append), lines


def test_a_rank_names_those_that_it_shares_heads_with() -> None:
    lines: list[str] = []
    for members, shared in (((0, 1, 4, 5, 2, 3), 2), ((2, 3, 4), 3)):
        watch = Watch(3, Clock(), 10.0, lines.append)
        watch.begin(7, replace(row(4, *members), heads_degree=shared))
        for now in (0.0, 11.0):
            watch.poll(now)
    assert lines == snapshot(
        [
            "rank 3 has been in step 7 for 11 s, in micro-batch 4, sharing heads with rank 2, next to rank 5 and rank 1 in the ring of 1, 5, 3: the one in the earliest micro-batch holds the others up",
            "rank 3 has been in step 7 for 11 s, in micro-batch 4, sharing heads with rank 2 and rank 4: the one in the earliest micro-batch holds the others up",
        ]
    )


def test_a_rank_names_step_ring_and_neighbours_that_the_device_waits_for() -> None:
    device = Device()
    watch, lines = watching(3, clock=device)
    # The host has left both long ago; the device has done the first one.
    for number, one in enumerate((row(0, 3), row(4, 0, 2, 3, 1), row(5, 3))):
        watch.begin(7, one)
        watch.end(float(number))
    device.passed = {0.0}
    for now in (0.0, 9.0, 11.0, 12.0, 30.0):
        watch.poll(now)
    assert lines == snapshot(
        [
            "rank 3 has been in step 7 for 11 s, in micro-batch 4, next to rank 2 and rank 1 in the ring of 0, 2, 3, 1: the one in the earliest micro-batch holds the others up"
        ]
    )


def test_every_place_has_its_own_time_and_its_own_words() -> None:
    watch, lines = watching(1)
    watch.begin(2, row(0, 0, 1))
    watch.poll(0.0)
    watch.end(1.0)
    watch.begin(2, row(1, 1))
    watch.poll(8.0)
    watch.poll(16.0)
    assert not lines
    watch.poll(19.0)
    watch.end(2.0)
    watch.begin(2, None)
    watch.poll(20.0)
    watch.poll(31.0)
    watch.end(3.0)
    watch.poll(32.0)
    watch.poll(99.0)  # between steps nothing is waited for
    assert lines == snapshot(
        [
            "rank 1 has been in step 2 for 11 s, in micro-batch 1, which it runs alone: it computes for long, or waits for all ranks' weights or gradients",
            "rank 1 has been in step 2 for 11 s, at the sum of gradients over all ranks: one that is not there yet holds the others up",
        ]
    )


def test_a_loop_that_only_says_what_begins_is_waited_for_in_what_began_last() -> None:
    watch, lines = watching(0)
    watch.end()  # nothing has begun
    for order in (0, 1):
        watch.begin(3, row(order, 0, 1))
    watch.poll(0.0)
    watch.poll(11.0)
    watch.end()
    watch.poll(12.0)
    watch.poll(99.0)
    (line,) = lines
    assert "step 3 for 11 s, in micro-batch 1, next to rank 1" in line


def test_a_loop_that_was_left_is_not_waited_for() -> None:
    watch, lines = watching(0, 1.0)
    watch.begin(0, row(0, 0, 1))
    watch.poll(0.0)
    watch.forget()
    watch.poll(5.0)
    watch.poll(9.0)
    assert not lines


def test_the_thread_speaks_before_the_time_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FCP_RANK_TIMEOUT", "1")
    watch = watch_for(0, Clock(), torch.device("cpu"))
    watch.begin(4, row(2, 0, 1))
    watch.start()
    said = ""
    for _ in range(100):
        watch._stop.wait(0.05)
        if said := said + capsys.readouterr().err:
            break
    watch.stop()
    assert said.startswith(
        "fcp: rank 0 has been in step 4 for 1 s, in micro-batch 2, next to rank 1 in the ring of 0, 1"
    )


def test_the_thread_ends_with_what_it_watches_for() -> None:
    watch = Watch(0, Clock(), 1000.0, print)
    before = set(threading.enumerate())
    watch.start()
    (thread,) = set(threading.enumerate()) - before
    del watch
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_time_out_that_is_no_number_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCP_RANK_TIMEOUT", "soon")
    with raises("RunError: FCP_RANK_TIMEOUT is 'soon'; it must be a number of seconds, 1 or more"):
        rank_timeout(torch.device("cpu"))


@pytest.mark.parametrize(("kind", "given", "seconds"), [("cuda", "", 600), ("cpu", "", 1800), ("cuda", "90", 90)])
def test_every_group_is_given_the_time_out_that_the_watch_speaks_before(
    kind: str, given: str, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own is 30 minutes for "cpu:gloo,cuda:nccl"."""
    groups: list[dict[str, Any]] = []
    initialised = iter((False, True, True))
    monkeypatch.setenv("FCP_RANK_TIMEOUT", given)
    monkeypatch.setattr(transport, "end_with_launcher", lambda: None)
    monkeypatch.setattr(transport, "local_device", lambda: torch.device(kind, 3))
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(set_device=lambda _: None))
    monkeypatch.setattr(dist, "is_initialized", lambda: next(initialised))
    monkeypatch.setattr(dist, "init_process_group", lambda _, **options: groups.append(options))
    monkeypatch.setattr(dist, "new_group", lambda *_, **options: groups.append(options))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "nccl")  # of a script's group, without host tensors
    monkeypatch.setattr(ProcessTransport, "meet", lambda *_: None)
    monkeypatch.setattr(transport, "_priority_options", lambda _: None)
    device = torch.device(kind, 3)
    assert join_process_group(device)
    with suppress(AssertionError):  # nothing came of the group
        ProcessTransport.create(device)
    ProcessWorld()._hosts()
    assert [group["timeout"] for group in groups] == [timedelta(seconds=seconds)] * 3
    assert watch_for(0, Clock(), device)._seconds == 0.9 * seconds


def test_the_thread_watches_from_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on device 0, where every rank of a node would take memory for a context."""
    entered: dict[str, int] = {}
    module = SimpleNamespace(
        set_device=lambda index: entered.setdefault(threading.current_thread().name, index), current_device=lambda: 5
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    for device in (torch.device("cuda", 3), torch.device("cuda")):
        watch = Watch(0, DeviceClock(device), 1000.0, print)
        watch.start()
        wait_until(lambda: "fcp-watch" in entered)
        watch.stop()
        assert entered.pop("fcp-watch") == (5 if device.index is None else 3)
