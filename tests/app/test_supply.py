"""What users install: no floor below a known hole, a wheel that holds what it should, and a lock that fits both."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Package -> oldest version without a known hole that fcp could meet, and which holes. Kept by hand: tests reach no
# database of advisories.
SAFE_FLOORS: dict[str, tuple[str, str]] = {
    "aiohttp": ("3.13.3", "CVE-2025-53643, CVE-2025-69223 to 69230: smuggled requests, bodies that fill the memory"),
    "jinja2": ("3.1.6", "CVE-2024-56201, CVE-2024-56326, CVE-2025-27516: ways out of the sandbox"),
    "numpy": ("1.22", "CVE-2021-34141, CVE-2021-41495"),
    "pillow": ("12.3.0", "CVE-2026-25990, CVE-2026-42308, CVE-2026-59197 to 59200: writes out of bounds"),
    "psutil": ("5.6.6", "CVE-2019-18874"),
    "pyarrow": ("14.0.1", "CVE-2023-47248: code out of Parquet and IPC files"),
    "pyyaml": ("5.4", "CVE-2020-14343"),
    "scipy": ("1.10.0", "CVE-2023-25399"),
    "torch": ("2.6", "CVE-2025-32434: code out of weights_only pickles"),
    "transformers": ("5.3", "CVE-2026-4372: code out of config.json; CVE-2026-1839: out of rng_state.pth"),
}
# Holes above a floor, and why they stay: what fcp does not do.
ACCEPTED = {
    "CVE-2025-3730, CVE-2025-2953": "torch below 2.8: denials of service by ctc_loss and mkldnn_max_pool2d, unused",
    "CVE-2026-24747": "torch below 2.10: weights_only unpickling; fcp loads no pickles",
    "CVE-2026-25087": "pyarrow below 23.0.1: pre-buffered IPC files in C++, which Python does not offer",
}
NOTHING_KNOWN = {
    *("accelerate", "av", "datasets", "fsspec", "imagesize", "megatron-core", "mindspore", "msgspec", "numba", "peft"),
    *("rich", "s3fs", "tokenizers", "torch-npu", "typer", "vl-convert-python"),
}


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return document


def declared() -> Iterator[tuple[str, str]]:
    """Names and specifiers of all that users may install with fcp."""
    settings = project()["project"]
    for requirement in chain(settings["dependencies"], *settings["optional-dependencies"].values()):
        name, specifier = re.fullmatch(r"([a-z0-9-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        yield name, specifier


def release(version: str) -> tuple[int, ...]:
    return (*map(int, re.findall(r"\d+", version.partition("+")[0])), 0, 0, 0)[:3]


def test_every_declared_floor_is_without_known_holes() -> None:
    for name, specifier in declared():
        floor = re.match(r">=([0-9.]+)", specifier)
        if floor is None:
            assert specifier.startswith("<"), f"{name}{specifier} has no floor"
            continue
        assert name in SAFE_FLOORS or name in NOTHING_KNOWN, f"look for holes of {name}, and list it here"
        least, reason = SAFE_FLOORS.get(name, ("0", ""))
        assert release(floor[1]) >= release(least), f"{name}{specifier}: {reason}"


def test_the_lock_has_a_hash_for_everything_and_keeps_the_floors() -> None:
    text = (ROOT / "requirements-ci.txt").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins: dict[str, str] = {}
    for line in lines:
        found = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+)", line)
        assert found is not None, line
        pins[found[1]] = found[2]
    assert "torch" not in pins
    assert {name for name, _ in declared()} - set(pins) == {"torch", "torch-npu", "mindspore", "s3fs"}
    for name, specifier in declared():
        floor = re.match(r">=([0-9.]+)", specifier)
        assert name not in pins or floor is None or release(pins[name]) >= release(floor[1]), name
    groups = project()["dependency-groups"]
    wanted = {re.split(r"[>=<\[]", one)[0].lower() for group in ("dev", "docs") for one in groups[group]}
    assert wanted <= set(pins)


# Folder of a wheel -> endings of the files in it.
WHEEL = {
    "fcp_cli": {".py", ".typed", ".html"},
    "fcp_cli/_data/examples": {".py"},
    "fcp_cli/_data/launchers": {".j2", ".txt"},
    "fcp_cli/_data/profiles": {".yaml"},
    "fcp_cli-0.1.0.dist-info": {"", ".txt"},
}
# `make wheel` puts compiled code there on purpose.
COMPILED = "fcp_cli/_data/compiled/"


def test_a_wheel_holds_the_package_and_its_data_alone(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="make test installs hatchling")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = [name for name in zipfile.ZipFile(built).namelist() if not name.startswith(COMPILED)]
    found: dict[str, set[str]] = {}
    for name in names:
        folder = max((one for one in WHEEL if name.startswith(f"{one}/")), key=len, default=name)
        found.setdefault(folder, set()).add(Path(name).suffix)
    assert found == WHEEL
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "fcp_cli").rglob("*.py")}
    assert {name for name in names if name.endswith(".py") and "/_data/" not in name} == package
    assert {Path(name).name for name in names if "dist-info" in name} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE")
    }
    assert not [name for name in names if re.search(r"test_|conftest|\.env|secret|\.pem|__pycache__", name)]
