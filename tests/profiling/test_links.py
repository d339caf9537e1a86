"""Which pairs of ranks send to each other, how large messages grow, and how runs are timed on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_two_nodes_are_timed_inside_on_one_rail_and_across_rails() -> None:
    from fcp_cli.profiling.timing import links

    found = {link.tier: [link.to(rank) for rank in range(8)] for link in links(8, 4)}
    assert found == {
        "intra_node": [1, 2, 3, 0, 5, 6, 7, 4],
        "inter_node": [4, 5, 6, 7, 0, 1, 2, 3],
        "inter_node_cross_rail": [5, 6, 7, 4, 1, 2, 3, 0],
    }


@pytest.mark.parametrize(("world", "per_node"), [(2, 2), (3, 3), (8, 8), (12, 4), (4, 1), (1, 1)])
def test_who_sends_to_a_rank_is_who_it_receives_from_and_nobody_sends_to_itself(world: int, per_node: int) -> None:
    from fcp_cli.profiling.timing import fresh_links, links

    for link in (*links(world, per_node), *fresh_links(world, per_node)):
        assert [link.source(link.to(rank)) for rank in range(world)] == list(range(world))
        assert all(link.to(rank) != rank for rank in range(world))


def test_first_contacts_are_of_pairs_that_no_warm_up_has_joined() -> None:
    from fcp_cli.profiling.timing import fresh_links

    (inside,) = fresh_links(8, 8)
    assert [inside.to(rank) for rank in range(8)] == [2, 3, 4, 5, 6, 7, 0, 1]
    assert fresh_links(3, 3) == []  # two places further is one place back
    assert [link.tier for link in fresh_links(16, 8)] == ["intra_node", "inter_node"]


def test_messages_grow_to_the_largest_that_memory_holds() -> None:
    from fcp_cli.profiling.timing import DEVICE_MOST_BYTES, message_sizes

    assert message_sizes(DEVICE_MOST_BYTES) == [1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27]
    assert message_sizes(3 << 20) == [1 << 12, 1 << 16, 1 << 20, 3 << 20]
    assert message_sizes(1 << 12) == [1 << 12]


class EventClock:
    """Counts marks as a device's events do, and notes when somebody waits for one."""

    def __init__(self) -> None:
        self.marks = 0
        self.history: list[str] = []

    def mark(self) -> int:
        self.marks += 1
        self.history.append("mark")
        return self.marks

    def seconds(self, earlier: int, later: int) -> float:
        self.history.append("wait")
        return float(later - earlier)


@pytest.mark.parametrize(
    ("kind", "history"),
    [
        ("cuda", ["work", "mark", "work", "mark", "work", "mark", "wait", "wait"]),
        ("cpu", ["mark", "work", "mark", "wait", "mark", "work", "mark", "wait"]),
    ],
)
def test_an_accelerator_runs_back_to_back_after_a_run_that_does_not_count(
    kind: str, history: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.profiling import timing

    clock = EventClock()
    monkeypatch.setattr(timing, "clock_for", lambda _: clock)
    work: Callable[[], None] = lambda: clock.history.append("work")  # noqa: E731
    stopwatch = timing.Stopwatch(torch.device(kind))
    assert len(stopwatch.measure_each(work, 2)) == 2
    assert clock.history == history
