from __future__ import annotations

from collections.abc import Mapping

import pytest
from inline_snapshot import snapshot

from fcp_cli.launching.failure import FailedRank, failed_ranks, meeting_problem

LOST = ("RuntimeError: [pair.cc:538] Connection closed by peer [127.0.0.1]:4711",)


def block(number: int, rank: int, status: int) -> str:
    return f"""[{number}]:
  time      : 2026-01-01_00:00:00
  host      : node-a
  rank      : {rank} (local_rank: {rank % 4})
  exitcode  : {status} (pid: 1{rank})
  error_file: <N/A>
  traceback : To enable traceback see: ...
"""


def summary(*ranks: tuple[int, int]) -> str:
    """As torchrun prints it: the failure that it saw first comes last."""
    first, *others = ranks
    listed = "".join(block(number, *rank) for number, rank in enumerate(others, start=1))
    return f"train.py FAILED\nFailures:\n{listed}Root Cause (first observed failure):\n{block(0, *first)}"


def blamed(text: str, words: Mapping[int, tuple[str, ...]]) -> FailedRank:
    return failed_ranks(text, words)[0]


def test_among_equals_the_one_that_torchrun_saw_first() -> None:
    words = {1: ("[rank5]: ValueError: a",), 2: ("ValueError: b",)}
    found = blamed(summary((5, 1), (6, 1)), words)
    assert (found.rank, found.raised) == (5, "ValueError: a")


@pytest.mark.parametrize("status", [-9, -11])
def test_a_rank_that_a_signal_ended_before_one_that_lost_its_connection(status: int) -> None:
    assert blamed(summary((4, 1), (6, status)), {0: LOST}).rank == 6


def test_a_rank_that_raised_before_its_victims_however_they_ended() -> None:
    words = {0: LOST, 1: ("Traceback", "KeyError: 'x'"), 3: ("ncclRemoteError: a call failed",)}
    assert blamed(summary((4, 1), (7, -6), (5, 1)), words).rank == 5


def test_fcps_own_error_before_a_crash_and_before_those_who_only_agree_with_it() -> None:
    words = {
        0: ("error: rank 2 cannot follow the plan p; the line that it printed says why",),
        1: ("Traceback", "fcp_cli.errors.PlanError: there is no plan p"),
    }
    found = blamed(summary((4, 1), (6, -11), (5, 1)), words)
    assert (found.rank, found.own_error) == (5, "there is no plan p")


def test_a_rank_that_was_still_ending_when_torchrun_saw_its_victim_is_blamed() -> None:
    words = {0: LOST, 2: ("Traceback", "IndexError: list index out of range"), 3: ("warming up",)}
    found = blamed(summary((4, 1)), words)
    assert (found.rank, found.raised) == (6, "IndexError: list index out of range")


def test_a_rank_that_waited_in_vain_is_blamed_after_one_that_raised_and_before_victims() -> None:
    waited = ("error: rank 4 on vm: waited 20 s in vain for another rank: it is stopped",)
    assert blamed(summary((4, 1), (5, 1)), {0: waited, 1: ("Traceback", "KeyError: 'x'")}).rank == 5
    found = blamed(summary((5, 1), (4, 1)), {0: waited, 1: LOST})
    assert (found.rank, found.own_error.startswith("rank 4 on vm: waited")) == (4, True)


def test_of_ranks_that_say_the_same_the_first_is_named() -> None:
    words = dict.fromkeys(range(3), ("error: the plan is for 8 ranks",))
    assert blamed(summary((6, 1), (5, 1), (4, 1)), words).rank == 4


def test_where_all_lost_their_connection_the_first_is_a_victim_and_says_so() -> None:
    found = blamed(summary((4, 1), (5, 1)), {0: LOST, 1: LOST})
    assert found.rank == 4
    assert found.is_victim


def test_a_log_without_a_summary_blames_nobody() -> None:
    assert failed_ranks("usage: torchrun ...", {0: ("error: x",)}) == []


LOGS: dict[str, str] = {
    "what the rendezvous says itself": "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: port 29614 is in use",
    "a store that ended": "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.",
    "another process in node 0's place": "torch.distributed.DistNetworkError: Ping failed, invalid value returned from server. Expected: 18690",
    "torchrun's own usage": "usage: torchrun",
}
LOGS_MESSAGES = snapshot(
    {
        "what the rendezvous says itself": "port 29614 is in use",
        "a store that ended": "the store at --master-addr and --master-port ended while this node waited for the others: node 0 failed, or it was another job's; give node 0's address and a free port",
        "another process in node 0's place": "the process at --master-addr and --master-port is not node 0 of this job; give node 0's address and a free port",
        "torchrun's own usage": "",
    }
)


@pytest.mark.parametrize("case", LOGS)
def test_why_nodes_did_not_meet_is_one_line_with_its_mend(case: str) -> None:
    assert meeting_problem(LOGS[case]) == LOGS_MESSAGES[case]
