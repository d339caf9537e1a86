"""Ports and the address for jobs that tests start."""

from __future__ import annotations

import random
import socket
import subprocess
from pathlib import Path

import pytest

_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST, _LAST = 10_000, 65_000


def unused_port(*, count: int = 1) -> int:
    """The first of `count` ports in a row that nobody listens at, and that no connection is given meanwhile.

    A port that binding to 0 finds is the system's to give to the next connection of any process, and who connects to
    it before somebody listens can even reach itself. Ports are drawn by chance, so that tests that run side by side
    take different ones.
    """
    ours = _PORTS_OF_CONNECTIONS.read_text() if _PORTS_OF_CONNECTIONS.exists() else "32768 60999"
    low, high = map(int, ours.split())
    draw = random.SystemRandom()
    while True:
        first = draw.randrange(_FIRST, _LAST - count)
        wanted = range(first, first + count)
        if not any(low <= port <= high for port in wanted) and all(map(_is_unused, wanted)):
            return first


def _is_unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def own_address() -> str:
    """Not loopback: `fcp launch` refuses that on several nodes."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]
