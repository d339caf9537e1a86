"""The program that ranks run: found from the words after `--`, and started through the runtime's entry point.

The words may be a script, `-m MODULE`, a console script on PATH, a launcher's command line, or a trainer's command.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fcp_cli.errors import UsageError
from fcp_cli.util.console import Assumptions
from fcp_cli.util.inputs import parse_yaml, read_text

_PYTHON: Final = re.compile(r"(python|pypy)[\d.]*$")
# (Command, subcommand) -> module that it would run on each rank.
_STARTED_BY: Final = {
    **{(name, "train"): "llamafactory.launcher" for name in ("llamafactory-cli", "lmf", "llamafactory.cli")},
    **{(name, "train"): "axolotl.cli.train" for name in ("axolotl", "axolotl.cli.main")},
    **{(name, verb): f"swift.cli.{verb}" for name in ("swift", "swift.cli.main") for verb in ("pt", "sft", "rlhf")},
    **{
        (name, verb): f"trl.scripts.{verb}"
        for name in ("trl", "trl.cli", "trl.cli.main")
        for verb in ("dpo", "grpo", "kto", "reward", "rloo", "sft")
    },
}
# Options of those commands that configure their own launcher; each has a value.
_OWN_OPTIONS: Final = frozenset({"--launcher", "--accelerate_config", "--num_processes"})
_HEAD_BYTES: Final = 4096
_LAUNCHERS: Final = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed", "msrun", "mpirun"})


def python_program(
    words: Sequence[str], assumed: Assumptions, *, python: str = sys.executable, may_be_elsewhere: bool = False
) -> tuple[str, ...]:
    """Return a script or `-m MODULE`, and its arguments, for every rank to run with Python.

    Args:
        words: the words after `--`.
        assumed: records replaced programs.
        python: interpreter of the ranks.
        may_be_elsewhere: whether the script may be missing here, since nothing is started.

    Raises:
        UsageError: there is no Python program, or it belongs to another environment.
    """
    first, *rest = words
    if _PYTHON.match(Path(first).name) and not (Path(first).is_file() and b"\0" not in _head(Path(first))):
        words = _after_interpreter(first, rest)
        return python_program(words, assumed, python=python, may_be_elsewhere=may_be_elsewhere)
    if Path(first).name in _LAUNCHERS:
        return _without_launcher(Path(first).name, rest, assumed)
    name = rest[0] if first == "-m" and rest else Path(first).name
    arguments = rest[1:] if first == "-m" else rest
    module = _STARTED_BY.get((name, arguments[0])) if arguments else None
    if module is not None:
        found = ("-m", module, *_own_arguments(name, arguments[1:]))
        assumed.assume("program", shlex.join(found), f"{name} {arguments[0]} would start ranks of its own")
        return found
    if first.startswith("-") or Path(first).is_file():
        if not first.startswith("-"):
            _require_python(Path(first), python)
        return tuple(words)
    on_path = shutil.which(first)
    if on_path is None and may_be_elsewhere and Path(first).suffix == ".py":
        assumed.warn(f"there is no script {first} here; the machines of the job need it at this path")
        return tuple(words)
    if on_path is None:
        raise UsageError(f"there is no script {first}, neither here nor on PATH")
    _require_python(Path(on_path), python)
    return (on_path, *rest)


def _after_interpreter(first: str, rest: Sequence[str]) -> Sequence[str]:
    """Return script and arguments of `python -u ... SCRIPT ARGS`, dropping interpreter options."""
    at = 0
    while at < len(rest) and rest[at].startswith("-") and rest[at] != "-m":
        if rest[at] in ("-c", "-"):
            raise UsageError(f"after -- comes a script or '-m MODULE', not {first} {rest[at]}")
        at += 2 if rest[at] in ("-W", "-X") else 1  # -W and -X have a separate value
    if at == len(rest):
        raise UsageError(f"after -- comes a script or '-m MODULE', and {first} is given none")
    return rest[at:]


def _without_launcher(name: str, words: Sequence[str], assumed: Assumptions) -> tuple[str, ...]:
    """Return the program of a launcher's command: everything from the first `-m MODULE` or Python file."""
    for at, word in enumerate(words):
        if word in ("-m", "--module") and at + 1 < len(words) and not words[at + 1].startswith("-"):
            found = ("-m", *words[at + 1 :])
        elif not word.startswith("-") and (Path(word).suffix == ".py" or _interpreter(_head(Path(word)))):
            found = tuple(words[at:])
        else:
            continue
        options = shlex.join(word for word in words[:at] if word != "launch")
        dropped = f"{name} and its options {options} are dropped" if options else f"{name} is dropped"
        assumed.assume("program", shlex.join(found), f"{dropped}: fcp starts the ranks")
        return found
    raise UsageError(
        f"{name} is a launcher, and no Python script or '-m MODULE' follows it; give the script itself after --, or "
        "keep the launcher with --inject env"
    )


def _own_arguments(command: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return a command's arguments without launcher options."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":  # axolotl: launcher options follow
            break
        if word in _OWN_OPTIONS:
            next(rest, None)
        elif word.partition("=")[0] not in _OWN_OPTIONS:
            kept.append(word)
    if command.startswith("swift") and kept and Path(kept[0]).suffix in (".yaml", ".yml", ".json"):
        kept[:1] = _swift_settings(Path(kept[0]))
    return tuple(kept)


def _swift_settings(path: Path) -> list[str]:
    """Return the options that ms-swift's command line derives from a settings file."""
    settings = parse_yaml(read_text(path, error=UsageError), name=str(path), error=UsageError)
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds no settings, NAME: VALUE")
    if settings.get("ENV"):
        raise UsageError(f"{path} sets variables under ENV; export them in your shell, and remove them from the file")
    words = []
    for name, value in settings.items():
        if name != "ENV":
            text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
            words += [f"--{name}", *(map(str, value) if isinstance(value, list) else [text])]
    return words


def _require_python(path: Path, python: str) -> None:
    """Raise UsageError if a program is not Python, or uses another environment than the ranks."""
    if path.suffix == ".py":
        return
    head = _head(path)
    found, is_binary = _interpreter(head), b"\0" in head
    if found is None and not is_binary and not head.startswith(b"#!"):
        return  # a script without a shebang
    if found is None:
        kind = "a binary" if is_binary else "a shell script or a script of another language"
        raise UsageError(
            f"{path} is {kind}, not a Python script; give the Python script after --, or keep the command, which must "
            "start the ranks itself, with --inject env"
        )
    interpreter = Path(found)
    if interpreter.is_absolute() and interpreter.name != "env" and interpreter.parent != Path(python).parent:
        raise UsageError(
            f"{path} belongs to {found}, but fcp runs in {python}; install fcp there ('{found} -m pip install ...') "
            "or the program here"
        )


def _interpreter(head: bytes) -> str | None:
    """Return the Python interpreter in a script's shebang, or None."""
    line, _, rest = head.partition(b"\n")
    if not line.startswith(b"#!"):
        return None
    words = line[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "sh":  # pip's shebang for long paths: '''exec' "/long/python" "$0" "$@"
        words = rest.partition(b"\n")[0].decode(errors="replace").replace("'''exec'", "").split('"')[1:2]
    elif words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and _PYTHON.match(Path(words[0]).name) else None


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError:
        return b""


# Hooks, through the runtime's entry point.

ENTRY = ("-m", "fcp_cli.runtime")
"""Entry point that prepares the rank and runs the program after `--`."""


def through_entry(program: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (program, arguments) for the launcher to run `program` with hooks."""
    return ENTRY, ("--", *program)


def without_entry(words: Sequence[str]) -> list[str]:
    """Undo `through_entry`: return the user's program and arguments as one list."""
    start = len(ENTRY) + 1
    return list(words[start:] if tuple(words[:start]) == (*ENTRY, "--") else words)


def is_mindspore_script(script: Path) -> bool:
    """Return whether a script imports MindSpore but not torch; False if it cannot be parsed."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    imported = {name.partition(".")[0] for node in ast.walk(tree) for name in _imported_by(node)}
    return "mindspore" in imported and "torch" not in imported


def _imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def split_program(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the words after `--` into a program, ("script.py",) or ("-m", "module"), and its arguments."""
    first, *rest = words
    if first == "-m" and not rest:
        raise UsageError("-m after -- needs the name of a module")
    if first.startswith("-") and first != "-m":
        raise UsageError(f"after -- comes a script or '-m MODULE', not {first}; the trainer's options go before --")
    length = 2 if first == "-m" else 1
    return tuple(words[:length]), tuple(words[length:])
