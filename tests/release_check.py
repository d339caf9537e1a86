"""What is released, as strangers install it: `make release-check`.

    python -m tests.release_check dist/*.whl dist/*.tar.gz

Each file goes into a virtual environment of its own, without a cache and without this checkout: first alone, then with
the extras of a training host. Commands run in an empty home, and cannot write to what was installed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "hf,report"
PLAIN = (
    "fcp --version",
    "fcp list models",
    "fcp profile --analytic --model qwen3-8b --cluster h100-8x8",
    "fcp plan lengths.txt --profile profile.yaml --ranks 16 --global-batch-size 64 --steps 2",
    "fcp check plan.parquet --manifest lengths.txt",
    "fcp launch --model qwen3-8b --plan plan.parquet --target slurm --dry-run",
    "fcp demo",
)
WITH_EXTRAS = (
    "fcp plan lengths.txt --model qwen3-tiny --ranks 2 --max-length 512 --overlong drop --global-batch-size 8 --steps 2",
    "fcp launch --model qwen3-tiny --plan plan.parquet --synthetic --run-dir run",
    "fcp report run",
)
_MOST_SECONDS = 1800
# $0 is the folder, $@ the command. The mount ends with the command.
_MOUNT_READ_ONLY = (
    """mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && ! touch "$0/x" 2> /dev/null && exec "$@\""""
)


def main(files: Sequence[Path]) -> None:
    """Check each file, and print a line for every command."""
    for file in files:
        with tempfile.TemporaryDirectory(prefix="fcp-release-") as folder:
            check(file.resolve(), Path(folder))
    print("all of them installed and ran")


def check(file: Path, folder: Path) -> None:
    """Install one file alone and with extras, and run the commands of each."""
    print(f"\n{file.name}, Python {sys.version.partition(' ')[0]}", flush=True)
    installed, home = folder / "venv", folder / "home"
    home.mkdir()
    (home / "lengths.txt").write_text("\n".join(str(100_000 // i) for i in range(1, 513)), encoding="utf-8")
    timed("python -m venv", [sys.executable, "-m", "venv", str(installed)])
    for requirement, commands in ((f"{file}", PLAIN), (f"{file}[{EXTRAS}]", WITH_EXTRAS)):
        pip = [str(installed / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        timed(
            f"pip install {Path(requirement).name}", [*pip, "--constraint", str(ROOT / "constraints.txt"), requirement]
        )
        for command in commands:
            run(command, installed, home)
    figures = json.loads(run("fcp demo --json", installed, home))
    assert not figures["missing"], f"the demo missed {figures['missing']}"
    print(f"  the demo: predicted {figures['predicted_speedup']:.2f}x, measured {figures['measured_speedup']:.2f}x")


def run(command: str, installed: Path, home: Path) -> str:
    """Run a command in the home, with the environment read-only, and return its standard output."""
    environment = {"HOME": str(home), "PATH": f"{installed / 'bin'}:/usr/bin:/bin", "COLUMNS": "80", "LANG": "C.UTF-8"}
    with read_only(installed) as prefix:
        return timed(command, [*prefix, *shlex.split(command)], cwd=home, env=environment)


@contextmanager
def read_only(folder: Path) -> Iterator[list[str]]:
    """Give the words before a command that cannot write to a folder; permissions bind everybody but root."""
    if os.geteuid() == 0:
        assert shutil.which("unshare"), "root needs unshare, of util-linux, for a read-only folder"
        yield ["unshare", "--mount", "sh", "-c", _MOUNT_READ_ONLY, str(folder)]
        return
    paths = [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]
    for path in paths:
        path.chmod(path.stat().st_mode & ~stat.S_IWUSR)
    try:
        yield []
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def timed(name: str, words: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run one command, print its seconds, and return its standard output; its whole output if it fails."""
    began = time.monotonic()
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=_MOST_SECONDS)
    print(f"  {time.monotonic() - began:6.1f} s  {name}", flush=True)
    if done.returncode:
        sys.exit(f"{name} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
