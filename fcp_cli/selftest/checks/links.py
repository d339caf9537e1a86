"""Measures messages between ranks, in a node and between nodes: first contact, and bandwidth from 64 KiB on."""

from __future__ import annotations

import statistics
from typing import Any

from fcp_cli.profiling.workers.links import Messenger, fresh_links, links, most_message_bytes
from fcp_cli.selftest.bench import Bench
from fcp_cli.selftest.findings import Finding

_KIB, _MIB = 1 << 10, 1 << 20
_REPEATS = 8
_NAMES = {
    "intra_node": "in a node",
    "inter_node": "between nodes, one rail",
    "inter_node_cross_rail": "between nodes, across rails",
}


def check(bench: Bench) -> Finding:
    """Time first contacts before anything else is sent, then messages of growing size."""
    messenger = Messenger(bench.transport, bench.device, bench.stopwatch)
    contacts: dict[str, Any] = {}
    lines = []
    for link in fresh_links(bench.world.size, bench.ranks_per_node):
        bench.begin(f"links: first contact {_NAMES[link.tier]}")
        held_up, device_bytes = messenger.first_contact(link)
        milliseconds = 1e3 * statistics.median(held_up)
        megabytes = None if device_bytes is None else statistics.median(device_bytes) / 1e6
        contacts[link.tier] = {"milliseconds": milliseconds, "device_megabytes": megabytes}
        memory = "" if megabytes is None else f", {megabytes:,.0f} MB a peer"
        lines.append(f"first contact {_NAMES[link.tier]}: {milliseconds:.3g} ms{memory}")
    rates: dict[str, dict[str, float]] = {}
    for link in links(bench.world.size, bench.ranks_per_node):
        rates[link.tier] = {}
        for num_bytes in _sizes(bench):
            bench.begin(f"links: {num_bytes:,} bytes {_NAMES[link.tier]}")
            seconds = statistics.median(messenger.seconds(link, num_bytes, repeats=_REPEATS))
            rates[link.tier][str(num_bytes)] = num_bytes / seconds / 1e9
        told = ", ".join(f"{_size(int(size))} {rate:.3g}" for size, rate in rates[link.tier].items())
        lines.append(f"GB/s {_NAMES[link.tier]}: {told}")
    return Finding(
        name="links",
        passed=None,
        lines=tuple(lines) or ("a single rank sends no messages",),
        figures={"first_contact": contacts, "gigabytes_per_second_by_size": rates},
    )


def _sizes(bench: Bench) -> list[int]:
    """Return 64 KiB, 1 MiB, 16 MiB and 256 MiB, as far as every rank's memory holds two such messages."""
    most = min(int(room) for (room,) in bench.gather([float(2 * most_message_bytes(bench.device))]))
    largest = _MIB if bench.settings.quick else most
    return [size for size in (64 * _KIB, _MIB, 16 * _MIB, 256 * _MIB) if size <= largest]


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB" if num_bytes >= _MIB else f"{num_bytes // _KIB} KiB"
