"""Memory of a rank as a table: GB by item."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fcp_cli.launching.checks.memory import JobMemory

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_BYTES: Final = 5e6  # smaller items would show as 0.00 GB


def memory_table(need: JobMemory) -> Table:
    """Return the table, largest items first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    capacity = need.capacity_bytes
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("item")
    table.add_column("GB", justify="right")
    table.add_column("share" if capacity else "", justify="right")
    seen = [(name, size) for name, size in need.items.items() if size >= _LEAST_BYTES]
    for name, size in [*seen, ("in all", need.total_bytes)]:
        table.add_row(name, f"{size / 1e9:.2f}", _share(size, capacity) if capacity else "")
    where = "the host" if need.is_host else "a device"
    table.add_row(f"of {where}", f"{capacity / 1e9:.2f}" if capacity else "unknown", "")
    return table


def _share(size: float, capacity: float) -> str:
    return f"{size / capacity:.1%}" if size <= capacity else f"{size / capacity:.1f}x"
