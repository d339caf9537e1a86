"""Start the planner process of a job without a plan early, so that it imports and loads in parallel with the script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

_waiting: list[subprocess.Popen[bytes]] = []  # started early; the first caller of `planner_process` gets it


def start_early(environment: Mapping[str, str]) -> None:
    """Start the planner process on rank 0 of a job without a plan; it ends with this process if nothing trains."""
    if environment.get("RANK") != "0" or "FCP_PLANNING" not in environment:
        return
    from fcp_cli.plan.metadata.job_facts import has_no_plan

    if has_no_plan():
        _waiting.append(_started("early"))


def planner_process() -> subprocess.Popen[bytes]:
    """Return the process that was started early, or a new one."""
    return _waiting.pop() if _waiting else _started()


def _started(*words: str) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-m", "fcp_cli.planning.online", *words]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
