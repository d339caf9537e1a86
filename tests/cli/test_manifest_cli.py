"""`fcp manifest` as it is typed: output, streams, exit statuses, and nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from tests.cli.planning_folder import typed
from tests.manifest.datasets import write_jsonl, write_parquet, write_tokenizer, write_tree
from tests.patience import PATIENCE_SECONDS


@pytest.fixture
def fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `fcp` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return typed


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_show_prints_figures_and_two_histograms_in_80_columns(fcp: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "m.parquet", {"length": [1, 3, 3, 5, 5, 5, 5, 100]})
    outcome = fcp("manifest", "show", "m.parquet")
    assert (outcome.status, outcome.err) == (0, "")
    assert lines(outcome.out) == [
        "sequences    8",
        "tokens       127",
        "length       min 1  mean 15.9  max 100",
        "             p50 5  p90 100  p99 100  p99.9 100",
        "longest 1 %  78.7% of all tokens",
        "source       not recorded: the file was not made by fcp manifest build",
        "  length   % of sequences                  % of tokens",
        "─" * 72,
        "   1 - 2    12.5% ███▌                       0.8% ▎",
        "   2 - 4    25.0% ███████                    4.7% █▍",
        "   4 - 8    50.0% ██████████████            15.7% ████▍",
        "  8 - 16     0.0%                            0.0%",
        " 16 - 32     0.0%                            0.0%",
        " 32 - 64     0.0%                            0.0%",
        "64 - 128    12.5% ███▌                      78.7% ██████████████████████",
    ]


def test_show_prints_one_json_document_on_stdout(fcp: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "m.parquet", {"tokens": [[1, 2], [3]]})
    outcome = fcp("manifest", "show", "m.parquet", "--length-column", "tokens", "--json")
    document = json.loads(outcome.out)
    assert (outcome.status, outcome.err) == (0, "")
    assert (document["rows"], document["tokens"], document["source"]) == (2, 3, None)
    assert set(document) == {
        "manifest",
        "content_hash",
        "source",
        "rows",
        "tokens",
        "length_tokens",
        "longest_percent_token_share",
        "histogram",
    }


def test_build_counts_writes_and_says_what_is_next(fcp: Any, tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {"a.py": b"abc", "b.py": b"", "c.txt": b"no"})
    outcome = fcp("manifest", "build", "src", "--include", "*.py")
    assert outcome.status == 0 and "longest 1 %" in outcome.out
    printed = lines(outcome.err)
    assert printed[0] == "reading src as text"
    assert printed[1].startswith("warning: texts are counted in bytes, about four times as many as tokens")
    assert printed[2] == "skipped 1 empty sequence"
    counted = fcp("manifest", "build", "src", "--include", "*.py", "--tokenizer", "bytes")
    assert lines(counted.err)[1] == "skipped 1 empty sequence"
    assert printed[-1] == snapshot("wrote lengths.parquet; next: fcp plan lengths.parquet")
    assert (tmp_path / "lengths.parquet").is_file()


def test_build_prints_one_json_document_on_stdout(fcp: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"body": "abc"}, {"body": ""}])
    outcome = fcp("manifest", "build", "d.jsonl", "--column", "body", "-o", "m.parquet", "--json")
    document = json.loads(outcome.out)
    assert (document["rows"], document["tokens"], document["skipped"]) == (1, 3, {"empty": 1})
    assert document["manifest"] == "m.parquet"
    assert document["source"]["kind"] == "jsonl"


def test_the_current_folder_is_a_source(fcp: Any, tmp_path: Path) -> None:
    write_tree(tmp_path, {"a.txt": b"abc", "b.txt": b"de"})
    for _ in range(2):  # the second time, the first manifest lies there
        assert json.loads(fcp("manifest", "build", ".", "--json").out)["tokens"] == 5


def test_quiet_says_nothing(fcp: Any, tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {"a.py": b"abc"})
    outcome = fcp("-q", "manifest", "build", "src")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")


def test_options_that_do_not_apply_are_named(fcp: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "d.parquet", {"input_ids": [[1], [2, 3]]})
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    outcome = fcp("manifest", "build", "d.parquet", "--tokenizer", tokenizer, "--include", "*.py")
    assert outcome.status == 0
    assert f"--tokenizer is not used: {tmp_path}/d.parquet holds tokens already" in lines(outcome.err)
    assert "--include and --exclude are not used for parquet; they choose files of a folder of text" in lines(
        outcome.err
    )


def test_media_sizes_are_counted_and_the_assumption_is_named(fcp: Any, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"text_tokens": 5, "images": [{"height": 448, "width": 448}]}])
    outcome = fcp("manifest", "build", "d.jsonl", "--kind", "media", "--processor", "qwen3-vl", "--json")
    document = json.loads(outcome.out)
    assert (document["tokens"], document["num_images"], document["num_videos"]) == (5 + 196, 1, 0)
    shown = lines(fcp("manifest", "show", "lengths.parquet").out)
    assert "pictures     1 image, 0 videos, 784 patches" in shown
    assert "assumed tokens of time stamps by Qwen's pre-tokenizer rule" in outcome.err
    assert fcp("manifest", "build", "d.jsonl", "--kind", "media").status == 2


def test_equal_lengths_get_a_remark(fcp: Any, tmp_path: Path) -> None:
    write_parquet(tmp_path / "m.parquet", {"length": [8, 8]})
    outcome = fcp("manifest", "show", "m.parquet")
    assert outcome.status == 0
    assert lines(outcome.err)[-1] == snapshot(
        "m.parquet: all 2 sequences have 8 tokens; were they packed or padded already?"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("show", "none.parquet"), 1, "none.parquet does not exist; `fcp manifest build SOURCE -o none.parquet` makes"),
        (("show", "bad.parquet"), 1, "bad.parquet: row 1 of column 'length' is 0; lengths must be > 0 tokens"),
        (("show", "foreign.parquet"), 1, "foreign.parquet has no column 'length'; its columns are my_tokens; name one"),
        (("show", "text.parquet"), 1, "text.parquet is text, not a length manifest"),
        (("build", "none"), 1, "there is no source none"),
        (("build", "foreign.parquet", "-o", "foreign.parquet"), 2, "-o foreign.parquet would overwrite the source"),
        (
            ("build", "foreign.parquet", "--kind", "csv"),
            2,
            "--kind is 'csv'; it must be one of text, chat, jsonl",
        ),
        (("build", "./", "-o", "new.parquet"), 2, "new.parquet would be among the files of"),
        (("build", "foreign.parquet", "--tokenizer", "t.json"), 1, "there is no tokenizer t.json"),
        (("build", "bad.parquet", "-o", "no/m.parquet"), 1, "cannot write no/m.parquet"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(
    fcp: Any, tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    write_parquet(tmp_path / "bad.parquet", {"length": [3, 0]})
    write_parquet(tmp_path / "foreign.parquet", {"my_tokens": [3, 4]})
    (tmp_path / "text.parquet").write_text("length\n")
    before = set(tmp_path.iterdir())
    outcome = fcp("manifest", *arguments)
    assert (outcome.status, outcome.out) == (status, "")
    last = lines(outcome.err)[-1]
    assert last.startswith("error: ")
    assert message in last
    assert set(tmp_path.iterdir()) == before


def test_a_missing_argument_is_wrong_usage(fcp: Any) -> None:
    assert fcp("manifest", "build").status == 2


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return kept | changes


@pytest.mark.processes
def test_standard_input_is_shown_and_no_colour_reaches_a_pipe(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fcp_cli", "manifest", "show", "-"],
        input=b"5\n6\n",
        cwd=tmp_path,
        env=environment(NO_COLOR="1"),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0
    assert b"\x1b" not in result.stdout
    assert "sequences    2" in lines(result.stdout.decode())
    assert max(len(line) for line in result.stdout.decode().splitlines()) <= 80


@pytest.mark.processes
def test_a_terminal_without_utf8_gets_plain_bars(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fcp_cli", "manifest", "show", "-"],
        input=b"5\n6\n",
        cwd=tmp_path,
        env=environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0
    assert b" 4 - 8 | 100.0% ######################" in result.stdout


@pytest.mark.processes
def test_ctrl_c_while_building_leaves_nothing(tmp_path: Path) -> None:
    fifo = tmp_path / "d.jsonl"
    os.mkfifo(fifo)
    process = subprocess.Popen(
        [sys.executable, "-m", "fcp_cli", "manifest", "build", str(fifo), "-o", "m.parquet"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    with fifo.open("wb") as writer:  # opens once the command reads: it is inside the build then
        writer.write(b'{"text": "abc"}\n')
        writer.flush()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert printed.decode().splitlines()[-1] == "error: interrupted; no file was left half-written"
    assert list(tmp_path.iterdir()) == [fifo]


@pytest.mark.processes
def test_manifest_commands_import_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.argv = ['fcp', 'manifest', 'show', 'm.parquet']\n"
        "from fcp_cli.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numba', 'scipy', 'transformers') if name in sys.modules])\n"
    )
    write_parquet(tmp_path / "m.parquet", {"length": [1, 2]})
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert result.stdout.splitlines()[-1] == "[]"
