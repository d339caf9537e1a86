from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from fcp_cli import __version__
from fcp_cli.cli.app import app
from fcp_cli.errors import RunError
from fcp_cli.util import machine


@pytest.mark.torch
def test_the_block_to_paste_goes_to_stdout_alone() -> None:
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"- fcp: {__version__}"
    assert all(line.startswith("- ") for line in lines)
    assert {"- torch", "- devices", "- gloo", "- CANN"} <= {line.split(":")[0] for line in lines}
    assert result.stderr.startswith("Copy and paste this block")


@pytest.mark.torch
def test_json_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    document = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)
    assert document["fcp"] == __version__
    assert sys.executable in document["python"]
    assert document["packages"]["numpy"] is not None
    assert document["variables"]["HCCL_BUFFSIZE"] == "200"
    assert "hidden" not in json.dumps(document)


def test_a_broken_torch_is_shown_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RunError("torch does not import here (libhccl.so)")

    monkeypatch.setattr(machine, "find_machine", broken)
    monkeypatch.setattr(machine, "load_torch", broken)
    lines = machine.facts_lines(machine.collect_facts())
    assert "- devices: torch does not import here (libhccl.so)" in lines
