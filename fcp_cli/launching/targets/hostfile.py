"""Files that list nodes, one a line, as MindSpeed's scripts and DeepSpeed have them: the first line is node 0."""

from __future__ import annotations

import re
from pathlib import Path

from fcp_cli.errors import UsageError
from fcp_cli.machine.network import is_host, is_loopback
from fcp_cli.reading.documents import read_text

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Return host names or addresses in order, without their attributes (`slots=8`) and without `#` lines."""
    lines = read_text(path, error=UsageError, label="the hostfile ").splitlines()
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        host = (line.split("#")[0].split() or [""])[0]
        if not host:
            continue
        user, at, machine = host.rpartition("@")
        # ssh would take -oProxyCommand=... for an option.
        if not is_host(machine) or (at and not _USER.fullmatch(user)):
            raise UsageError(f"{path}, line {number}: {host!r} is no host; write a name or an address, as node0")
        if host in hosts:
            raise UsageError(f"{path}, line {number}: {host} stands in line {hosts[host]} already; list each node once")
        hosts[host] = number
    if not hosts:
        raise UsageError(f"the hostfile {path} lists no host; write one address a line, node 0 first")
    local = next((host for host in hosts if host == "localhost" or is_loopback(host)), None)
    if local is not None and len(hosts) > 1:
        raise UsageError(
            f"{path}, line {hosts[local]}: {local} means another machine on each of {len(hosts)} nodes; "
            "give its address"
        )
    return tuple(hosts)
