"""Files that list nodes, one a line, as MindSpeed's scripts and DeepSpeed have them: the first line is node 0."""

from __future__ import annotations

from pathlib import Path

from fcp_cli.errors import UsageError
from fcp_cli.machine.network import is_loopback


def read_hostfile(path: Path) -> tuple[str, ...]:
    """Return host names or addresses in order, without what follows them in a line (`slots=8`) and without `#` lines.

    Raises:
        UsageError: unreadable, empty, a host twice, or a name that means another machine on every node.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read the hostfile {path}: {reason}") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        host = (line.split("#")[0].split() or [""])[0]
        if not host:
            continue
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
