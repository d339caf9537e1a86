"""Tables on narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

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
