"""Rollouts make batches as they arrive: nothing is lost, nothing is trained twice, and all passes read the same."""

from __future__ import annotations

import threading
import weakref

from hypothesis import given
from hypothesis import strategies as st

from fcp_cli.planning.rollouts import Rollouts
from tests.messages import raises


@given(
    arrivals=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    fewest=st.integers(1, 4),
    more=st.integers(0, 3),
    parts=st.integers(1, 4),
)
def test_every_rollout_is_in_one_batch_in_the_order_of_arrival(
    arrivals: list[int], fewest: int, more: int, parts: int
) -> None:
    rollouts, count = Rollouts(fewest=fewest, most=fewest + more), sum(arrivals)
    for number in range(count):
        rollouts.add(number, number + 1)
    rollouts.end()
    whole, cut = list(rollouts.batches()), list(rollouts.batches(parts=parts))
    expected = [(number, number + 1) for number in range(count)]
    assert [one for batch in whole for one in batch] == expected
    assert [one for batch in cut for one in batch] == expected
    assert all(fewest <= len(batch) <= fewest + more for batch in whole[:-1]) and all(cut)


def test_a_batch_waits_for_its_rollouts_and_late_ones_make_the_next() -> None:
    rollouts = Rollouts(fewest=2, most=2)
    seen: list[list[str]] = []
    reader = threading.Thread(target=lambda: seen.extend([one for one, _ in batch] for batch in rollouts.batches()))
    reader.start()
    for name in ("a", "b", "late", "d"):
        rollouts.add(name, 5)
    rollouts.end()
    reader.join(10)
    assert seen == [["a", "b"], ["late", "d"]] == [[one for one, _ in batch] for batch in rollouts.batches()]


def test_a_batch_that_all_passes_have_read_is_dropped() -> None:
    class Rollout:
        pass

    rollouts = Rollouts(fewest=2, most=2, passes=2)
    made = [Rollout() for _ in range(4)]
    kept = [weakref.ref(one) for one in made]
    for one in made:
        rollouts.add(one, 5)
    rollouts.end()
    del made, one
    first, second = rollouts.batches(), rollouts.batches()
    next(first)
    assert [ref() is not None for ref in kept] == [True, True, True, True]
    next(second)
    next(first)
    next(second)
    assert [ref() is not None for ref in kept] == [False, False, True, True]
    with raises("UsageError: pass 3 over rollouts for 2; raise passes= of Rollouts"):
        rollouts.batches()


def test_what_cannot_be_a_batch_is_one_line() -> None:
    with raises("UsageError: passes is 0; one at least reads the batches"):
        Rollouts(passes=0)
    with raises("UsageError: fewest is 3 and most 2; a batch has one rollout at least, and most >= fewest"):
        Rollouts(fewest=3, most=2)
    with raises("UsageError: parts is 0; a batch is cut in one at least"):
        Rollouts().batches(parts=0)
    rollouts = Rollouts()
    with raises("UsageError: rollout x has 0 tokens; one that is empty cannot be trained"):
        rollouts.add("x", 0)
    rollouts.end()
    with raises("UsageError: rollout y came after end(); no batch would have it"):
        rollouts.add("y", 3)
