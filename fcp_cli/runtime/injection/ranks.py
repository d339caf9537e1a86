"""Translate msrun's environment variables to torch's, so that a process started by msrun knows its rank."""

from __future__ import annotations

from collections.abc import Mapping

from fcp_cli.errors import RunError

_ROLE = "MS_ROLE"
_SCHEDULER, _WORKER = "MS_SCHED", "MS_WORKER"
# torch's variable -> msrun's, as set for workers by MindSpore 2.10.
_MSRUN = {
    "RANK": "MS_NODE_ID",
    "WORLD_SIZE": "MS_WORKER_NUM",
    "LOCAL_RANK": "DEVICE_ID",
    "MASTER_ADDR": "MS_SCHED_HOST",
    "MASTER_PORT": "MS_SCHED_PORT",
}


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Return whether this is msrun's scheduler: an extra process with the ranks' command that coordinates their start.

    torch needs none, so it must exit immediately with status 0.
    """
    return environment.get(_ROLE) == _SCHEDULER


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch.distributed's variables for a worker of msrun; empty for any other process.

    The rendezvous uses the port after the scheduler's, which is taken.
    """
    if environment.get(_ROLE) != _WORKER:
        return {}
    missing = [name for name in _MSRUN.values() if not environment.get(name)]
    if missing:
        raise RunError(
            f"msrun started this process without {missing[0]}, so its rank is not known; on several nodes msrun needs "
            "--node_rank"
        )
    found = {name: environment[source] for name, source in _MSRUN.items()}
    return {**found, "MASTER_PORT": str(_port(found["MASTER_PORT"]) + 1)}


def _port(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RunError(f"MS_SCHED_PORT is {text!r}, not a port; give msrun another --master_port") from None
