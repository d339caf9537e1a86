"""Owns the run folder that metrics go to, for a job that fcp prepared and another launcher started."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

from fcp_cli.runs.ownership import own_unless_launched

RUN_DIR_VARIABLE = "FCP_RUN_DIR"


def own_folder_of(metrics: Path) -> None:
    """Own the folder of a metrics file until this process ends, if it is the job's run folder. Rank 0 calls it.

    Raises:
        RunError: another job runs there; nothing was changed.
    """
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if not run_dir or metrics.absolute().parent != Path(run_dir).absolute():
        return
    owned = own_unless_launched(Path(run_dir))
    if owned is not None:
        atexit.register(owned.release)
