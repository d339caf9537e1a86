"""The tests on each Python that fcp allows, with the newest and the lowest declared versions: `make test-matrix`.

    python -m tests.matrix .venv-matrix python3.10 python3.12 python3.13 -- -n 2 --dist loadfile

Each environment runs all tests of planner and commands, then the core cases of the runtime; words after `--` go to
pytest. Environments are made by uv in the folder, one after the other, and kept for the next run. The lowest versions
are those of `pyproject.toml`, on the first Python of the list. Deprecations of other versions are no errors here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[1]
EXTRAS: Final = ("hf", "finetune", "report", "video")
PLANNER: Final = ("planning", "commands", "plan", "cost", "manifest")
RUNTIME: Final = (
    "test_cursor",
    "test_kernels",
    "test_layout",
    "test_lockstep",
    "test_loss",
    "test_plain_loop",
    "test_ring_emulated",
    "test_ring_gloo",
    "test_trainer_hooks",
    "test_transformers",
    "test_transport",
)
NAMED: Final = ("numba", "numpy", "pyarrow", "typer", "torch", "transformers")
_TOLERATED: Final = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
_MOST_SECONDS: Final = 3 * 3600


@dataclass(frozen=True, kw_only=True)
class Environment:
    """One row of the table: a Python of this machine, with the newest or the lowest declared versions."""

    python: str
    lowest: bool
    folder: Path

    @property
    def executable(self) -> Path:
        return self.folder / "bin" / "python"


def environments(pythons: Sequence[str], folder: Path) -> list[Environment]:
    """Return those of the Pythons that the machine has, the lowest versions first; print a line for each other."""
    found = []
    for place, python in enumerate(pythons):
        if shutil.which(python) is None:
            print(f"{python} is not on this machine: skipped", flush=True)
            continue
        name = Path(python).name
        if place == 0:
            found.append(Environment(python=python, lowest=True, folder=folder / f"{name}-lowest"))
        found.append(Environment(python=python, lowest=False, folder=folder / name))
    return found


def install(environment: Environment) -> None:
    """Make the virtual environment, with this checkout and the extras."""
    uv = [sys.executable, "-m", "uv", "--quiet", "pip"]
    subprocess.run([environment.python, "-m", "venv", str(environment.folder)], check=True)
    chosen: list[str] = []
    if environment.lowest:
        versions = environment.folder / "lowest.txt"
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        python = ["--python", str(environment.executable)]
        compiled = ["compile", *python, "--resolution", "lowest-direct", *extras, "pyproject.toml"]
        subprocess.run([*uv, *compiled, "--output-file", str(versions)], cwd=ROOT, check=True)
        chosen = ["--override", str(versions)]
    what = ["--editable", f".[{','.join(EXTRAS)}]", "--group", "dev"]
    subprocess.run([*uv, "install", "--python", str(environment.executable), *chosen, *what], cwd=ROOT, check=True)
    shutil.copy(ROOT / "pyproject.toml", environment.folder)


def is_installed(environment: Environment) -> bool:
    """Return whether the environment was made from today's `pyproject.toml`."""
    made_from = environment.folder / "pyproject.toml"
    return made_from.exists() and made_from.read_bytes() == (ROOT / "pyproject.toml").read_bytes()


def row(environment: Environment, options: Sequence[str]) -> tuple[str, bool]:
    """Run the tests; return the environment's row of the table, and whether all of them passed."""
    names = ", ".join(repr(name) for name in NAMED)
    versions = subprocess.run(
        [environment.executable, "-c", f"from importlib.metadata import version as v; print(*map(v, [{names}]))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    cells = [f"{Path(environment.python).name}, {'lowest' if environment.lowest else 'newest'}", *versions]
    passed = True
    for files in ([f"tests/{name}" for name in PLANNER], [f"tests/runtime/{name}.py" for name in RUNTIME]):
        counts, minutes = tested(environment, files, options)
        passed = passed and not counts["failures"] + counts["errors"] and counts["tests"] > counts["skipped"]
        failed = f", {counts['failures'] + counts['errors']} failed" * bool(counts["failures"] + counts["errors"])
        ran = counts["tests"] - counts["skipped"] - counts["failures"] - counts["errors"]
        cells.append(f"{ran} passed{failed}, {counts['skipped']} skipped; {minutes:.0f} min")
    return f"| {' | '.join(cells)} |", passed


def tested(environment: Environment, files: Sequence[str], options: Sequence[str]) -> tuple[dict[str, int], float]:
    """Run pytest on some files; return the counts of its report, and minutes."""
    report = environment.folder / "tests.xml"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    subprocess.run(
        [
            *(str(environment.executable), "-m", "pytest", "--quiet", "--tb=short", f"--junit-xml={report}"),
            *(word for name in _TOLERATED for word in ("-W", f"default::{name}")),
            *(*options, *files),
        ],
        cwd=ROOT,
        # numba's caches of several versions would overwrite each other.
        env={**os.environ, "NUMBA_CACHE_DIR": str(environment.folder / "kernels")},
        timeout=_MOST_SECONDS,
    )
    if not report.exists():
        sys.exit(f"pytest wrote no report in {environment.folder}: see above")
    suite = ElementTree.parse(report).getroot()[0].attrib
    counts = {name: int(suite[name]) for name in ("tests", "failures", "errors", "skipped")}
    return counts, (time.monotonic() - began) / 60


def main(words: Sequence[str]) -> None:
    """Make each environment, run the tests there, and print the table at the end."""
    cut = list(words).index("--") if "--" in words else len(words)
    folder, *pythons = words[:cut]
    rows, passed = [], True
    for environment in environments(pythons, Path(folder).resolve()):
        if not is_installed(environment):
            install(environment)
        line, good = row(environment, words[cut + 1 :])
        print(line, flush=True)
        rows.append(line)
        passed = passed and good
    heads = ["Python, versions", *NAMED, "planner and commands", "runtime"]
    print("", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows, sep="\n")
    sys.exit(not passed or not rows)


if __name__ == "__main__":
    main(sys.argv[1:])
