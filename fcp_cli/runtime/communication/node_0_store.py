"""Wait for node 0's store, the rendezvous of torchrun's nodes, no longer than the join timeout.

The store of another job may have let a node start its ranks, and be gone when they connect. torch would then retry for
as long as ranks wait for each other: half an hour on CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from fcp_cli.errors import RunError
from fcp_cli.machine.network import listens

_JOIN_VARIABLE: Final = "FCP_JOIN_TIMEOUT"  # `fcp launch --join-timeout` sets it for several nodes
_PROBE_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2


def await_store(environment: Mapping[str, str]) -> None:
    """Wait until the store of node 0's launcher accepts connections.

    Raises:
        RunError: it does not within the join timeout.
    """
    text = environment.get(_JOIN_VARIABLE, "")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not text.isdecimal():
        return
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    end = time.monotonic() + int(text)
    while not listens(host, port, seconds=_PROBE_SECONDS):
        if time.monotonic() > end:
            raise RunError(
                f"node 0 does not answer at {host}:{port} any more, in {text} s (--join-timeout): its job has ended, "
                "or another job had this port; start all nodes again, with another --master-port"
            )
        time.sleep(_PAUSE_SECONDS)
