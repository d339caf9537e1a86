from __future__ import annotations

from pathlib import Path

from fcp_cli.launching.failure import find_failure

SUMMARY = """\
some.module FAILED
Failures:
[1]:
  time      : 2026-01-01_00:00:00
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
    failure = find_failure(logs, status=1)
    assert (failure.rank, failure.status, failure.last_lines) == (5, 1, ("Traceback", "ValueError: odd"))
    log = tmp_path / "id_x/attempt_0/1/stderr.log"
    assert failure.summary() == f"rank 5 exited with status 1; its whole output is in {log}"


def test_a_rank_that_says_why_is_believed_before_the_one_seen_first(tmp_path: Path) -> None:
    ranks = {1: "lost the connection to another rank", 2: "warning\nerror: row 7 of the data has 3 tokens\n"}
    failure = find_failure(write_logs(tmp_path, torchrun=SUMMARY.format(status=1), ranks=ranks), status=1)
    assert failure.summary() == "row 7 of the data has 3 tokens"
    assert not failure.is_local_rank_0


def test_a_killed_rank_is_told_by_its_signal(tmp_path: Path) -> None:
    failure = find_failure(write_logs(tmp_path, torchrun=SUMMARY.format(status=-9), ranks={1: ""}), status=1)
    assert failure.summary().startswith("rank 5 was ended by signal 9 (out of memory?); its whole output is in ")


def test_torchrun_that_fails_by_itself_is_told_so(tmp_path: Path) -> None:
    failure = find_failure(write_logs(tmp_path, torchrun="usage: ...\nerror: no port\n", ranks={}), status=2)
    assert failure.last_lines == ("usage: ...", "error: no port")
    assert failure.summary() == f"torchrun failed with status 2 before any rank did; see {tmp_path / 'torchrun.log'}"
