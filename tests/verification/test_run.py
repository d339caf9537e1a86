"""The watch over the ranks of `fcp selftest`: what a hang and a crash look like to whoever started them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from fcp_cli.util.findings import Finding
from fcp_cli.verification.selftest import SelftestReport, Settings, read_settings, watch

pytestmark = pytest.mark.processes

_BEGINS = """
    import faulthandler, signal, sys, time
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    diary = open(sys.argv[1], "a")
    print('{"begin": "rings: degree 2, ranks 0-1"}', file=diary, flush=True)
"""


def _watched(tmp_path: Path, then: str, *, limit_seconds: float = 60.0) -> tuple[SelftestReport, list[str]]:
    settings = Settings(folder=tmp_path, device="cpu", quick=True)
    inner = textwrap.dedent(_BEGINS) + textwrap.dedent(then)
    # As under torchrun, the ranks are children of what is started.
    outer = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {inner!r}, sys.argv[1]]))"
    told: list[str] = []
    argv = [sys.executable, "-c", outer, str(settings.diary.path)]
    report = watch(settings, argv, environment={}, limit_seconds=limit_seconds, on_progress=told.append)
    return report, told


def test_a_check_that_hangs_is_ended_and_named_with_where_its_ranks_stand(tmp_path: Path) -> None:
    report, told = _watched(tmp_path, "def waits():\n    time.sleep(600)\nwaits()", limit_seconds=3.0)
    assert report.failed == ["rings"]
    assert "HANGS in rings: degree 2, ranks 0-1; ranks stand at: " in report.findings[-1].lines[0]
    assert "in waits" in report.findings[-1].lines[0]
    assert told == ["checking rings"]


def test_ranks_that_die_are_named_with_their_own_error(tmp_path: Path) -> None:
    report, _ = _watched(tmp_path, "raise ValueError('no such device')")
    assert report.findings[-1].lines == (
        "the ranks ended with status 1 in rings: degree 2, ranks 0-1: ValueError: no such device",
    )


def test_what_was_found_before_a_hang_is_kept(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path, device="cpu", quick=True)
    settings.diary.found(Finding(name="kernel", passed=True, lines=("all well",), figures={"bound": 1.0}))
    report, _ = _watched(tmp_path, "sys.exit(3)")
    assert report.findings[0] == Finding(name="kernel", passed=True, lines=("all well",), figures={"bound": 1.0})
    assert report.block().splitlines()[1] == "kernel    ok     all well"
    assert report.document()["passed"] is False


def test_settings_survive_their_file(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path, device="npu", quick=False, writes_report=True)
    assert read_settings(settings.write()) == settings
