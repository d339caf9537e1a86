"""One GPU, measured in under eight minutes without a package index: kernels, rings, memory, and predicted times.

    python3 -m benchmarks.device_check [--device cuda|cpu] [--output FOLDER] [--seconds S] [PART ...]
    python3 -m benchmarks.device_check --page FOLDER/device-check.json

Each part runs in a process of its own (`benchmarks.device_parts`) and is ended at its limit, so an illegal memory
access or a hang costs one part: its rows up to then are kept, beside a one-line error. Writes `device-check.json` and
the page made from it, `device-check.md`, and leaves the cost profiles that were measured beside them.

This module only needs Python. Missing packages are named in the first lines. If `build/wheels` holds their wheels
(`make device-wheels`, on a machine with an index), they are installed for this run alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "wheels"
LIMIT_SECONDS = 470.0
REQUIRED = {
    module: module
    for module in ("jinja2", "msgspec", "numba", "numpy", "pyarrow", "rich", "scipy", "torch", "transformers", "typer")
} | {"yaml": "pyyaml"}
"""Packages of the parts, by the module that they install."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the check.

    Attributes:
        title: heading of its table.
        explains: how to read the table.
        seconds: limit.
        function: name in `benchmarks.device_parts`.
        environment: variables of its process.
    """

    title: str
    explains: str
    seconds: float
    function: str
    environment: Mapping[str, str] = field(default_factory=dict)


_AVOIDS = {"TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}
PARTS = {
    "machine": Part(
        title="Machine",
        explains="Device, releases, and the reason why an attention kernel cannot run.",
        seconds=60,
        function="machine",
    ),
    "equality": Part(
        title="Kernels against fp64",
        explains="Relative L2 error of the output and the three gradients together, over packs of a plan. Packs with a "
        "long sequence run with fewer heads, so that the reference fits into memory.",
        seconds=60,
        function="equality",
    ),
    "rings": Part(
        title="Emulated rings against fp64",
        explains="All members of a ring in one process, in lockstep on one device: the error of output and gradients "
        "over that of one device. At most 2 is expected.",
        seconds=60,
        function="rings",
    ),
    "profile": Part(
        title="`fcp profile` of one rank: predicted against measured packs",
        explains="Held-out packs of layers of the model, and the memory of a token against the estimate.",
        seconds=150,
        function="profile",
    ),
    "step": Part(
        title="A step of a whole small model: predicted against measured",
        explains="Micro-batches of a plan plus reduction, clipping and AdamW, under a profile measured on the spot; "
        "and the peak of allocated memory against the memory model.",
        seconds=130,
        function="step",
    ),
    "times": Part(
        title="Kernels on the calls of a plan",
        explains="`own` is the causal call of a member with its own keys; `earlier` and `later` are hops with the keys "
        "of an earlier or a later member. `first` includes the graph or code built for the shape.",
        seconds=60,
        function="times",
    ),
    "passes": Part(
        title="Passes over memory",
        explains="Merging, gathering and summing rows around the kernels, against a copy of the same device.",
        seconds=30,
        function="passes",
    ),
    "host": Part(
        title="Host time of a layer and a hop",
        explains="Seconds in which the host issues one layer's attention, beside the seconds that the device takes; "
        "`per hop` is the slope over the degrees. Messages arrive at once.",
        seconds=40,
        function="host",
    ),
    "shapes": Part(
        title="The price of a new shape",
        explains="Milliseconds of the first call with a length, less those of the second: on the main thread, and "
        "again on another one, as autograd's.",
        seconds=40,
        function="shapes",
    ),
    "shapes_rounded": Part(
        title="The price of a new shape if cuDNN may share graphs",
        explains="The same under `TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1`, beside the verdict of the kernel's test calls.",
        seconds=40,
        function="shapes",
        environment=_AVOIDS,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and measure one GPU in under eight minutes.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run (default: {' '.join(PARTS)})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, to try the script")
    parser.add_argument("--output", "-o", type=Path, default=ROOT / "build" / "device-check", metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=LIMIT_SECONDS, help="limit of all parts together")
    parser.add_argument("--page", type=Path, metavar="JSON", help="only write the page of an earlier run")
    given = parser.parse_args()
    if given.page is not None:
        write_page(json.loads(given.page.read_text(encoding="utf-8")), given.page.with_suffix(".md"))
        return
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
        environment, missing = prepared_environment(Path(folder))
        document: dict[str, Any] = {"device": given.device, "missing": missing, "parts": {}}
        began = time.monotonic()
        for name in given.parts or PARTS:
            left = given.seconds - (time.monotonic() - began)
            document["parts"][name] = found = run_part(name, given.device, given.output, environment, left)
            status = found["error"] or "ok"
            print(f"{name:<15} {found['seconds']:6.1f} s  {len(found['rows']):3} rows  {status}", flush=True)
            # After every part: an interrupted run loses nothing.
            (given.output / "device-check.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            write_page(document, given.output / "device-check.md")
    print(f"wrote {given.output / 'device-check.json'} and its page")
    sys.exit(any(part["error"] for part in document["parts"].values()))


def missing_packages() -> list[str]:
    """Return the packages that no module of this Python provides."""
    return [package for module, package in REQUIRED.items() if importlib.util.find_spec(module) is None]


def prepared_environment(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the variables of the parts' processes, and the packages that are missing; print both.

    Missing packages are installed from `WHEELS`, if it has any, into `folder`.
    """
    missing, paths = missing_packages(), [str(ROOT)]
    wheels = sorted(WHEELS.glob("*.whl"))
    print(f"python {sys.version.split()[0]}, missing packages: {', '.join(missing) or 'none'}", flush=True)
    if missing and wheels:
        install = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder))
        result = subprocess.run([sys.executable, *install, *map(str, wheels)], check=False)
        if result.returncode == 0:
            print(f"installed for this run: {', '.join(wheel.name for wheel in wheels)}", flush=True)
            paths.append(str(folder))
    elif missing:
        print(f"run 'make device-wheels' on a machine with an index, and bring {WHEELS}", flush=True)
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}, missing


def run_part(
    name: str, device: str, output: Path, environment: Mapping[str, str], left_seconds: float
) -> dict[str, Any]:
    """Run a part in a process of its own; return its rows, seconds, and error: one line, or None."""
    part, began = PARTS[name], time.monotonic()
    limit = min(part.seconds, left_seconds)
    if limit <= 0:
        return {"rows": [], "seconds": 0.0, "error": "not run: no time was left"}
    with tempfile.TemporaryDirectory(prefix=f"device-check-{name}-") as folder:
        rows, log = Path(folder) / "rows.jsonl", Path(folder) / "log"
        rows.touch()
        argv = [sys.executable, "-m", "benchmarks.device_parts", part.function, device, str(rows), str(output)]
        with log.open("wb") as stream:
            # A session of its own, so that its children end with it.
            process = subprocess.Popen(
                argv,
                stdout=stream,
                stderr=stream,
                cwd=ROOT,
                env={**environment, **part.environment},
                start_new_session=True,
            )
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        written = rows.read_text(encoding="utf-8")
    complete = written[: written.rfind("\n") + 1]
    error = None if status == 0 else f"ended at its limit of {limit:.0f} s" if status is None else _reason(text, status)
    return {
        "rows": [json.loads(line) for line in complete.splitlines()],
        "seconds": round(time.monotonic() - began, 1),
        "error": error,
    }


def _reason(log: str, status: int) -> str:
    """Return the last line of a failed process's log, which for an exception is its message."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"status {status}: {lines[-1][:300] if lines else 'it printed nothing'}"


def write_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page of a document: a table per part, and the parts that failed on top."""
    parts: Mapping[str, Mapping[str, Any]] = document["parts"]
    failed = {name: part["error"] for name, part in parts.items() if part["error"]}
    lines = ["# One device, measured", ""]
    lines += [f"Made by `python -m benchmarks.device_check --device {document['device']}`", ""]
    if document["missing"]:
        lines += [f"Missing packages: {', '.join(document['missing'])}.", ""]
    lines += [f"- **{name}** failed: {error}" for name, error in failed.items()]
    lines += [""] if failed else []
    for name, part in parts.items():
        lines += [f"## {PARTS[name].title}", "", f"{PARTS[name].explains} {part['seconds']:g} s.", ""]
        lines += [*_table(part["rows"]), ""]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["No rows."]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    numeric = [all(isinstance(row.get(column, 0.0), (int, float)) for row in rows) for column in columns]
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join('---:' if number else '---' for number in numeric)}|"]
    return [*lines, *(f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows)]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
