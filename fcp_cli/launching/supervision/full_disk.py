"""Detects a full disk after a failure: ranks cannot log the reason then, so their last lines are misleading."""

from __future__ import annotations

import errno
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from fcp_cli.runs.checkpoints.checkpoint_header import checkpoints
from fcp_cli.runs.folder import RunPaths, from_here

_PROBE_BYTES: Final = 1 << 16
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def is_full(folder: Path) -> bool:
    """Return whether the disk of a folder, or the user's quota on it, is full."""
    try:
        with TemporaryFile(dir=folder) as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
    except OSError as error:
        return error.errno in _FULL
    return False


def full_disk_line(run_dir: Path, resume: str) -> str:
    """Return the final error line of a job whose disk is full: the files kept, and how to continue.

    Args:
        run_dir: the run directory.
        resume: command that resumes the run; "" if it is restarted by other means.
    """
    saved = checkpoints(RunPaths(run_dir=run_dir).checkpoints)
    kept = f"{saved[-1].name} and the metrics are kept" if saved else "no checkpoint was saved, the metrics are kept"
    remedy = f"free some space, then continue with: {resume}" if resume else "free some space and start again"
    return f"the disk of {from_here(run_dir)} is full; {kept}; {remedy}"
