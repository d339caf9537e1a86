"""Say on rank 0 that a job which Slurm has started before begins with the first step again."""

from __future__ import annotations

import os
import sys

_RESTARTS = "SLURM_RESTART_COUNT"  # set by Slurm from the second start of a job on


def say_if_begun_again(first_step: int, begins_with: int, rank: int) -> None:
    """Print one line where Slurm has requeued this job, and its script has loaded no checkpoint.

    Args:
        first_step: step that the script begins with.
        begins_with: step that the plan begins with.
        rank: of this process.
    """
    restarts = os.environ.get(_RESTARTS, "")
    if rank == 0 and restarts.isdecimal() and int(restarts) and first_step == begins_with:
        print(
            f"fcp: Slurm has started this job before ({_RESTARTS} {restarts}), and it begins with step {first_step} "
            "again; a script that resumes loads its checkpoint first, with session.load_state_dict",
            file=sys.stderr,
            flush=True,
        )
