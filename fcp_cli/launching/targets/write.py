"""Writes generated files, and submits jobs to Slurm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fcp_cli.errors import FcpError, RunError
from fcp_cli.files import write_text_atomically


def write_files(folder: Path, files: Mapping[str, str], *, overwrite: bool) -> None:
    """Write each file atomically to a folder, created if missing; existing files raise FcpError unless `overwrite`."""
    for name in files:
        if not overwrite and (folder / name).exists():
            raise FcpError(f"{folder / name} is there already; replace it with --force, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FcpError(f"cannot make the folder {folder}: {error.strerror}") from error
    for name, text in files.items():
        write_text_atomically(folder / name, text)


def require_sbatch() -> None:
    """Raise RunError if sbatch is not available here."""
    if shutil.which("sbatch") is None:
        raise RunError("there is no sbatch on this machine; write the script with -o DIR and submit it where Slurm is")


def submit(argv: Sequence[str]) -> str:
    """Run sbatch and return its output; raise RunError with its last line if it fails."""
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        words = (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()
        raise RunError(f"sbatch did not take the job: {words[-1].removeprefix('sbatch: error: ')}")
    return result.stdout.strip()
