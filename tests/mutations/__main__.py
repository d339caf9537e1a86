"""python -m tests.mutations [WORDS]: put each fault (that has the words) into a copy of the package, and look for it.

Prints the table of docs/how-to/selftest.md. Exit status 1 if a fault is not found, or its text is not there any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutations.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
_SECONDS = 240  # a fault may also make ranks wait for each other


def finder(fault: Fault | None, test: str, folder: Path) -> str:
    """Return what finds a fault (`test`, or `fcp verify` if that is ""), with its words, or "" if it does not.

    Raises:
        LookupError: the fault's text is not in its function.
    """
    package = folder / "fcp_cli"
    shutil.copytree(ROOT / "fcp_cli", package, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    for name in ("profiles", "launchers", "tests", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    if fault is not None:
        fault.put_into(package)
    tried = [sys.executable, "-m", "tests.mutations.replay"]
    if test:
        tried = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    name = f"`{test}`" if test else "`fcp verify`"
    try:
        done = subprocess.run(
            tried, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{name}: it does not end"
    if not done.returncode:
        return ""
    said = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()]
    return name if test else f"{name}: {said[-1].removeprefix('fcp_cli.errors.')[:120]}"


def main(words: list[str]) -> int:
    """Try all faults whose sentence has these words; return the exit status."""
    chosen = [fault for fault in FAULTS if all(word in fault.says for word in words)]
    for test in {fault.test for fault in chosen}:
        with TemporaryDirectory(prefix="fcp-mutations-") as folder:
            if found := finder(None, test, Path(folder)):
                print(f"fails without a fault, too: {found}")
                return 1
    print("| fault | found by | seconds |\n|---|---|---:|")
    missed = 0
    for fault in chosen:
        started = time.monotonic()
        with TemporaryDirectory(prefix="fcp-mutations-") as folder:
            try:
                found = finder(fault, fault.test, Path(folder))
            except LookupError as error:
                found, missed = f"**not tried**: {error}", missed + 1
        missed += not found
        print(f"| {fault.says} | {found or '**nothing**'} | {time.monotonic() - started:.0f} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
