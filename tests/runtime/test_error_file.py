from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runtime.launcher import record_error


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def recorded(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))["message"]


def test_another_error_is_recorded_with_its_type_and_traceback(file: Path) -> None:
    try:
        raise KeyError("absent")
    except KeyError as error:
        record_error(error)
    assert recorded(file)["message"] == "KeyError: 'absent'"
    assert "test_error_file.py" in recorded(file)["extraInfo"]["py_callstack"]


def test_a_file_that_the_script_wrote_stays(file: Path) -> None:
    file.write_text("its own")
    record_error(RunError("later"))
    assert file.read_text() == "its own"


def test_without_a_launcher_that_asks_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    record_error(RunError("alone"))
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_an_error_of_ours_is_recorded_as_its_line_in_the_layout_that_torch_reads(file: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    record_error(RunError("the plan is missing"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    message: Any = failure.message
    assert message["message"] == message["extraInfo"]["py_callstack"] == "the plan is missing"
    assert failure.timestamp == int(recorded(file)["extraInfo"]["timestamp"])
