from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from fcp_cli.launching.failure import Failure, TorchrunRanks

HOST = socket.gethostname()

SUMMARY = """\
some.module FAILED
Failures:
[1]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 6 (local_rank: 2)
  exitcode  : 1 (pid: 12)
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : {status} (pid: 11)
"""


def write_logs(folder: Path, *, torchrun: str, ranks: dict[int, str]) -> Path:
    (folder / "torchrun.log").write_text(torchrun)
    for rank, text in ranks.items():
        log = folder / "id_x" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    return folder


def test_the_rank_that_torchrun_names_is_blamed_with_its_last_words(tmp_path: Path) -> None:
    logs = write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks={1: "Traceback\n\nValueError: odd\n", 2: "x"})
    failure = TorchrunRanks(logs).find_failure(1)
    assert (failure.rank, failure.status, failure.last_lines) == (5, 1, ("Traceback", "ValueError: odd"))
    log = tmp_path / "id_x/attempt_0/1/stderr.log"
    assert failure.summary() == f"rank 5 on {HOST} failed: ValueError: odd; its whole output is in {log}"


def test_a_rank_that_says_why_is_believed_before_the_one_seen_first(tmp_path: Path) -> None:
    ranks = {1: "lost the connection to another rank", 2: "warning\nerror: row 7 of the data has 3 tokens\n"}
    failure = TorchrunRanks(write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks=ranks)).find_failure(1)
    assert failure.summary() == f"rank 6 on {HOST}: row 7 of the data has 3 tokens"
    assert not failure.is_local_rank_0


def test_a_signal_to_torchrun_is_named_without_its_traceback(tmp_path: Path) -> None:
    text = "Traceback (most recent call last):\ntorch...api.SignalException: Process 20395 got signal: 15\n"
    failure = TorchrunRanks(write_logs(tmp_path, torchrun=text, ranks={0: "step 3\n"})).find_failure(1)
    assert failure.report(rank_0_is_shown=True) == (
        (),
        f"torchrun on {HOST} was ended by signal 15, and its ranks with it; see {tmp_path / 'torchrun.log'}",
    )


def record(logs: Path, local_rank: int, *, message: str, stack: str) -> None:
    """Leave an error file as TorchElastic has them."""
    entry = {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}
    (logs / "id_x" / "attempt_0" / str(local_rank) / "error.json").write_text(json.dumps(entry))


def test_an_error_file_is_believed_before_what_the_rank_printed(tmp_path: Path) -> None:
    ranks = {1: "Traceback\nOSError: printed by an exit handler\n" + "teardown\n" * 30, 2: "x"}
    logs = write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks=ranks)
    record(logs, 1, message="ValueError: odd", stack="Traceback (most recent call last):\n  ...\nValueError: odd\n")
    failure = TorchrunRanks(logs).find_failure(1)
    assert (failure.rank, failure.raised, failure.last_lines[-1]) == (5, "ValueError: odd", "ValueError: odd")
    assert failure.log == tmp_path / "id_x/attempt_0/1/stderr.log"


def test_an_error_of_fcps_own_is_one_line_in_its_error_file(tmp_path: Path) -> None:
    ranks = {
        1: "RuntimeError: Connection closed by peer",
        2: "error: row 7\n[W] destroy_process_group was not called\n",
    }
    logs = write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks=ranks)
    record(logs, 2, message="row 7 of the data has 3 tokens", stack="row 7 of the data has 3 tokens")
    assert TorchrunRanks(logs).find_failure(1).summary() == f"rank 6 on {HOST}: row 7 of the data has 3 tokens"


def test_a_message_that_begins_with_a_line_break_is_told(tmp_path: Path) -> None:
    words = "Traceback\nImportError: \nAutoVideoProcessor requires the Torchvision library. Check out the\nsite.\n"
    failure = TorchrunRanks(write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks={1: words})).find_failure(1)
    assert failure.raised == "ImportError: AutoVideoProcessor requires the Torchvision library"


def test_a_damaged_error_file_leaves_the_printed_lines(tmp_path: Path) -> None:
    logs = write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks={1: "ValueError: odd"})
    (logs / "id_x" / "attempt_0" / "1" / "error.json").write_text('{"message": "only')
    assert TorchrunRanks(logs).find_failure(1).raised == "ValueError: odd"


def test_a_killed_rank_is_told_by_its_signal(tmp_path: Path) -> None:
    failure = TorchrunRanks(write_logs(tmp_path, torchrun=SUMMARY.format(status=-9), ranks={1: ""})).find_failure(1)
    assert failure.summary().startswith(
        f"rank 5 on {HOST} was ended by signal 9 (out of memory?); its whole output is in "
    )


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("Traceback\nValueError: odd", " failed: ValueError: odd; its whole output is in "),
        ("fcp_cli.errors.DataError: row 7 has 3 tokens", ": row 7 has 3 tokens"),
    ],
)
def test_an_abort_in_the_teardown_does_not_hide_what_the_rank_said(tmp_path: Path, words: str, cause: str) -> None:
    ranks = {1: f"{words}\nterminate called without an active exception\n"}
    failure = TorchrunRanks(write_logs(tmp_path, torchrun=SUMMARY.format(status=-6), ranks=ranks)).find_failure(1)
    assert failure.summary().startswith(f"rank 5 on {HOST}{cause}")


def test_torchrun_that_fails_by_itself_is_told_so(tmp_path: Path) -> None:
    failure = TorchrunRanks(write_logs(tmp_path, torchrun="usage: ...\nerror: no port\n", ranks={})).find_failure(2)
    assert failure.last_lines == ("usage: ...", "error: no port")
    assert failure.summary() == f"torchrun failed with status 2 before any rank did; see {tmp_path / 'torchrun.log'}"


def test_a_node_with_victims_only_points_to_the_others(tmp_path: Path) -> None:
    lost = "RuntimeError: Connection closed by peer"
    logs = write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks={1: lost, 2: lost})
    failure = TorchrunRanks(logs).find_failure(1)
    assert failure.last_lines == ()  # nobody is helped by the words of a victim
    assert failure.summary().startswith(
        f"rank 5 on {HOST} lost its connection to a rank of another node, which names the reason unless that node died; its whole output is in "
    )


@pytest.mark.parametrize(
    ("message", "rank_0_is_shown", "told"),
    [
        ("", False, ["last lines of rank 0", "  boom", "rank 0"]),
        ("", True, ["rank 0"]),
        ("no plan", False, ["rank 0"]),
        ("no plan", True, []),
    ],
)
def test_what_stands_on_the_screen_is_not_told_again(message: str, rank_0_is_shown: bool, told: list[str]) -> None:
    failure = Failure(
        rank=0, status=1, message=message, last_lines=("boom",), log=Path("stderr.log"), is_local_rank_0=True
    )
    last_words, summary = failure.report(rank_0_is_shown=rank_0_is_shown)
    lines = [*last_words, *filter(None, [summary])]
    assert len(lines) == len(told)
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=True))
