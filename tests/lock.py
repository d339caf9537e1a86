"""Writes `requirements-ci.txt`: what `make test` installs, with hashes; torch apart, whose builds differ by machine.

$ python -m tests.lock      # in the environment of `make test`, on Linux and x86_64 with Python 3.11

The hashes are those of the files for this platform.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements-ci.txt"
EXTRAS = "torch,hf,finetune,report,megatron,video"
GROUPS = ("dev", "docs")
BY_ITSELF = ("fcp-cli", "torch")
HEADER = """\
# What `make test-locked` installs, with hashes, for Linux on x86_64 and Python 3.11. Written by `make lock`.
# torch comes apart, in the version of constraints.txt: its builds, and so their hashes, differ by accelerator.
"""


def locked(packages: list[dict[str, Any]]) -> str:
    """Return a requirements file of the packages of a `pylock.toml`."""
    lines = []
    for package in sorted(packages, key=lambda package: str(package["name"])):
        if package["name"] not in BY_ITSELF:
            files = [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
            hashes = sorted(f"--hash=sha256:{file['hashes']['sha256']}" for file in files)
            lines.append(" \\\n    ".join([f"{package['name']}=={package['version']}", *hashes]))
    return HEADER + "".join(f"{line}\n" for line in lines)


def main() -> None:
    read_toml = importlib.import_module("tomllib").loads  # since Python 3.11
    lock = ROOT / "pylock.toml"  # pip writes paths that lead from here to the project
    groups = [word for group in GROUPS for word in ("--group", group)]
    project = [f".[{EXTRAS}]", *groups, "--constraint", "constraints.txt", "--output", lock.name]
    try:
        subprocess.run([sys.executable, "-m", "pip", "lock", "--quiet", *project], check=True, cwd=ROOT)
        REQUIREMENTS.write_text(locked(read_toml(lock.read_text(encoding="utf-8"))["packages"]), encoding="utf-8")
    finally:
        lock.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
