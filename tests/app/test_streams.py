"""Commands with closed standard streams, a reader that is gone, arguments that are no text, and no thread to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from fcp_cli.cli import app
from fcp_cli.errors import FcpError
from fcp_cli.util.parquet import reason_of
from tests.patience import PATIENCE_SECONDS


def run(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `fcp WORDS` in bash, whose words may close and redirect streams."""
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m fcp_cli {words}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        cwd=folder,
    )


@pytest.mark.examples(6)
@pytest.mark.processes
@pytest.mark.parametrize("streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("words", "status"), [("--help", 0), ("list models", 0), ("env", 0), ("plan - --model qwen3-tiny", 1)]
)
def test_a_closed_stream_is_the_null_device(tmp_path: Path, words: str, status: int, streams: str) -> None:
    ended = run(f"{words} {streams}", tmp_path) if streams != "2>&-" else run(f"{words} </dev/null 2>&-", tmp_path)
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr


@pytest.mark.processes
def test_a_file_that_is_written_under_a_closed_stdout_is_not_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n')
    assert run("manifest build a.jsonl --tokenizer bytes -o m.parquet >&-", tmp_path).returncode == 0
    assert run("manifest show m.parquet", tmp_path).returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize("words", ["list models", "--help"])
def test_a_reader_that_is_gone_ends_a_command_as_it_ends_other_tools(tmp_path: Path, words: str) -> None:
    ended = run(f"{words} | exec true", tmp_path)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.processes
def test_an_argument_that_is_not_utf_8_is_one_line(tmp_path: Path) -> None:
    ended = run("plan lengths.jsonl --model qwen3-tiny -o $'p\\xff.parquet'", tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == "error: the argument 'p\\udcff.parquet' is not UTF-8 text; rename the file or folder\n"


def test_a_command_without_a_thread_left_to_start_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(app, "app", start)
    monkeypatch.setattr("sys.argv", ["fcp"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("error: cannot start a thread: ")


def test_a_missing_thread_is_not_blamed_on_the_file() -> None:
    failure = pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable")
    with pytest.raises(FcpError, match=r"cannot start a thread: .*ulimit -u"):
        reason_of(failure)
    assert (
        reason_of(ValueError("its footer does not match its checksum. Perhaps"))
        == "its footer does not match its checksum"
    )
