from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import device_check
from benchmarks.device_check import PARTS, ROOT, prepared_environment, run_part, write_page


def test_the_page_has_a_table_per_part_and_names_failed_parts_first(tmp_path: Path) -> None:
    document = {
        "device": "cuda",
        "missing": ["msgspec"],
        "parts": {
            "equality": {"rows": [], "seconds": 3.1, "error": "status 1: AcceleratorError: illegal memory access"},
            "times": {
                "rows": [{"call": "own", "ms": 0.25, "GB": 1_500_000}, {"call": "a|b", "ms": 4321.0}],
                "seconds": 2.0,
                "error": None,
            },
        },
    }
    write_page(document, tmp_path / "page.md")
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "Missing packages: msgspec." in lines
    failed = lines.index("- **equality** failed: status 1: AcceleratorError: illegal memory access")
    assert failed < lines.index(f"## {PARTS['equality'].title}")
    table = lines.index("| call | ms | GB |")
    assert lines[table + 1 : table + 4] == ["|---|---:|---:|", "| own | 0.25 | 1,500,000 |", "| a\\|b | 4,321 | - |"]


@pytest.mark.processes
def test_a_part_that_fails_or_hangs_is_one_line_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "benchmarks"
    fake.mkdir()
    (fake / "device_parts.py").write_text(
        "import sys, time\n"
        "function, device, rows, output = sys.argv[1:]\n"
        'open(rows, \'a\').write(\'{"kernel": "fa2"}\\n{"kernel": \')\n'
        "if function == 'times':\n    time.sleep(600)\n"
        "raise RuntimeError('CUDA error: an illegal memory access')\n"
    )
    monkeypatch.setattr(device_check, "ROOT", tmp_path)
    failed = run_part("equality", "cpu", tmp_path, os.environ, 60.0)
    assert failed["rows"] == [{"kernel": "fa2"}], "a line that was cut off is dropped"
    assert failed["error"] == "status 1: RuntimeError: CUDA error: an illegal memory access"
    monkeypatch.setitem(PARTS, "times", replace(PARTS["times"], seconds=2.0))
    hung = run_part("times", "cpu", tmp_path, os.environ, 60.0)
    assert (hung["rows"], hung["error"]) == ([{"kernel": "fa2"}], "ended at its limit of 2 s")
    assert run_part("host", "cpu", tmp_path, os.environ, 0.0)["error"] == "not run: no time was left"


@pytest.mark.processes
@pytest.mark.lengthy
def test_a_missing_package_is_named_and_installed_from_its_wheel_without_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "REQUIRED", {"json": "json", "not_there": "not-there"})
    monkeypatch.setattr(device_check, "WHEELS", tmp_path / "wheels")
    site = tmp_path / "site"
    prepared_environment(site)
    assert "missing packages: not-there\nrun 'make device-wheels'" in capfd.readouterr().out
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "not_there-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("not_there.py", "")
        wheel.writestr("not_there-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: not-there\nVersion: 1.0\n")
        wheel.writestr(
            "not_there-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("not_there-1.0.dist-info/RECORD", "")
    environment, missing = prepared_environment(site)
    assert missing == ["not-there"]
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(ROOT), str(site)]
    subprocess.run([sys.executable, "-c", "import not_there"], env=environment, check=True)


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.hf
@pytest.mark.processes
@pytest.mark.lengthy
def test_every_part_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.device_check", "--device", "cpu", "-o", str(tmp_path), "--seconds", "900"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"python {sys.version.split()[0]}, missing packages: none\n")
    parts = json.loads((tmp_path / "device-check.json").read_text())["parts"]
    assert list(parts) == list(PARTS)
    assert all(part["rows"] for part in parts.values())
    assert all(row["multiple"] <= 2 for row in parts["rings"]["rows"])
    assert all(row["relative error"] <= 2e-6 for row in parts["equality"]["rows"])
    page = (tmp_path / "device-check.md").read_text()
    assert all(f"## {part.title}\n" in page for part in PARTS.values())
    assert "failed" not in page
