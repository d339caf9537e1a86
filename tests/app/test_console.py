"""Tables on narrow terminals, and progress through pipes."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console
from rich.table import Table

from fcp_cli.util import console
from fcp_cli.util.console import print_table


@pytest.mark.parametrize(("width", "shown"), [(80, 4), (30, 3), (24, 2)])
def test_a_table_without_room_loses_columns_and_no_digit(width: int, shown: int) -> None:
    table = Table(box=None)
    for name in ("strategy", "seconds", "idle", "over"):
        table.add_column(name)
    table.add_row("static", "123456789", "12.4%", "0")
    text = io.StringIO()
    print_table(Console(file=text, width=width), table)
    assert text.getvalue().splitlines()[0].split() == ["strategy", "seconds", "idle", "over"][:shown]
    assert "…" not in text.getvalue()
    assert len(set(text.getvalue().splitlines())) == 2


def test_through_a_pipe_long_work_says_every_few_seconds_how_far_it_is_even_if_it_does_not_advance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "_TELL_SECONDS", 0.05)
    with console.progress() as bar:
        bar.advance(bar.add_task("planning", total=2000), 1200)
        bar.add_task("searching", total=None)
        time.sleep(0.3)
    told = capsys.readouterr().err.splitlines()
    assert len(told) >= 4
    assert re.fullmatch(r"planning: 1,200 of 2,000, \S+ m?s", told[0])
    assert re.fullmatch(r"searching, \S+ m?s", told[1])
    time.sleep(0.1)
    monkeypatch.setattr(console.verbosity, "level", -1)
    with console.progress() as bar:
        bar.add_task("quiet", total=None)
        time.sleep(0.1)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("is_terminal", "level", "told"), [(True, 0, 5), (True, 1, 6), (False, 0, 6)])
def test_a_terminal_is_told_four_assumptions_and_a_log_all(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, level: int, told: int
) -> None:
    stream = io.StringIO()
    shown = Console(file=stream, force_terminal=is_terminal, width=80, color_system=None)
    monkeypatch.setattr(console, "human", lambda: shown)
    monkeypatch.setattr(console.verbosity, "level", level)
    assumed = console.Assumptions()
    for name in ("--sync", "--ranks", "--profile", "--model", "--cluster", "recipe"):
        assumed.assume(name, "x", "why")
    assumed.report()
    lines = stream.getvalue().splitlines()
    assert len(lines) == told
    assert "assumed --model = x (why)" in lines
    assert ("assumed 2 more settings; -v names them" in lines) == (told == 5)
