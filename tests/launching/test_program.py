"""Which Python program `fcp launch -- WORDS` runs on every rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fcp_cli.errors import UsageError
from fcp_cli.launching import program
from fcp_cli.launching.program import python_program
from fcp_cli.util.console import Assumptions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with scripts, and `bin` on PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path


def _command(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / "bin" / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o755)
    return path


def _program(*words: str) -> tuple[str, ...]:
    return python_program(words, Assumptions())


def test_a_console_script_on_path_is_run_as_python(folder: Path) -> None:
    path = _command(folder, "finetune", f"#!{sys.executable}\nimport sys\n")

    assert _program("finetune", "--lr", "1") == (str(path), "--lr", "1")


@pytest.mark.parametrize(
    "shebang",
    [
        "#!/usr/bin/env python3\n",
        "#!/usr/bin/env -S python3 -u\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_the_interpreter_may_be_found_on_path_or_lie_at_a_long_one(folder: Path, shebang: str) -> None:
    path = _command(folder, "finetune", shebang)

    assert _program("finetune") == (str(path),)


def test_a_script_of_this_folder_comes_before_a_command_on_path(folder: Path) -> None:
    _command(folder, "train.py", "#!/bin/bash\n")

    assert _program("train.py", "a b") == ("train.py", "a b")


def test_modules_are_taken_as_they_are(folder: Path) -> None:
    assert _program("-m", "package.module", "x") == ("-m", "package.module", "x")


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("python train.py --lr 1", "train.py --lr 1"),
        ("python3 -u -X dev -m package.module", "-m package.module"),
        ("llamafactory-cli train a.yaml lr=1", "-m llamafactory.launcher a.yaml lr=1"),
        ("-m llamafactory.cli train a.yaml", "-m llamafactory.launcher a.yaml"),
        ("swift sft --model m", "-m swift.cli.sft --model m"),
        ("axolotl train a.yaml --launcher torchrun --lr 1 -- --nproc-per-node 4", "-m axolotl.cli.train a.yaml --lr 1"),
        ("trl sft --config a.yaml --num_processes 4", "-m trl.scripts.sft --config a.yaml"),
        ("accelerate launch --multi_gpu --num_processes 4 train.py --lr 1", "train.py --lr 1"),
        ("accelerate launch --config_file fsdp.yaml -m package.module x", "-m package.module x"),
        ("torchrun --nproc-per-node=4 train.py", "train.py"),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "train.py --deepspeed ds.json"),
    ],
)
def test_a_launcher_of_its_own_is_taken_off(folder: Path, typed: str, found: str) -> None:
    assert _program(*typed.split()) == tuple(found.split())


def test_a_skipped_launcher_is_named_with_what_runs_in_its_place(folder: Path) -> None:
    assumed = Assumptions()

    python_program(["accelerate", "launch", "--num_processes", "4", "train.py"], assumed)

    assert assumed.assumed["program"] == (
        "train.py (accelerate and its options --num_processes 4 are dropped: fcp starts the ranks)"
    )


def test_ms_swifts_file_of_settings_becomes_its_options(folder: Path) -> None:
    (folder / "a.yaml").write_text("model: m\ndataset: [x, y]\nextra: {k: 1}\n")

    assert _program("swift", "sft", "a.yaml", "--lr", "1") == (
        *("-m", "swift.cli.sft", "--model", "m", "--dataset", "x", "y", "--extra", '{"k": 1}', "--lr", "1"),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py"], "there is no script nowhere.py, neither here nor on PATH"),
        (["tool"], r"bin/tool is a binary, not a Python script; give the Python script after --, or keep the command"),
        (["script"], r"bin/script is a shell script or a script of another language, not a Python script"),
        (["foreign"], r"bin/foreign belongs to /elsewhere/bin/python3, but fcp runs in .*; install fcp there"),
        (
            ["torchrun", "--nproc-per-node", "4", "train.sh"],
            "torchrun is a launcher, and no Python script or '-m MODUL",
        ),
        (["python", "-c", "pass"], "after -- comes a script or '-m MODULE', not python -c"),
        (["python", "-u"], "after -- comes a script or '-m MODULE', and python is given none"),
        (["swift", "sft", "env.yaml"], "env.yaml sets variables under ENV; export them in your shell"),
        (["swift", "sft", "none.yaml"], "cannot read none.yaml"),
        (["swift", "sft", "list.yaml"], "list.yaml holds no settings, NAME: VALUE"),
    ],
)
def test_what_is_no_python_program_is_refused_in_one_line(folder: Path, words: list[str], message: str) -> None:
    _command(folder, "tool", b"\x7fELF\0\0")
    _command(folder, "script", "#!/bin/bash\ntorchrun train.py\n")
    _command(folder, "foreign", "#!/elsewhere/bin/python3\n")
    (folder / "train.sh").write_text("#!/bin/bash\n")
    (folder / "env.yaml").write_text("ENV: {A: 1}\n")
    (folder / "list.yaml").write_text("[1]\n")

    with pytest.raises(UsageError, match=message):
        _program(*words)


def test_the_head_of_a_program_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _command(folder, "finetune", f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    reads: list[Path] = []
    read = program._head

    def count(found: Path) -> bytes:
        reads.append(found)
        return read(found)

    monkeypatch.setattr(program, "_head", count)

    assert _program("finetune") == (str(path),)
    assert reads == [path]
