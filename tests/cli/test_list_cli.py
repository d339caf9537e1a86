"""`fcp list`, and what the shell completes."""

from __future__ import annotations

from typing import Any

import pytest
import typer.main

from fcp_cli.cli.app import app
from fcp_cli.cli.command import KINDS, Known, known_names
from fcp_cli.planning.solvers import solver_names


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    app(["list", *words], standalone_mode=False)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_listed_one_name_a_line(kind: Known, capsys: pytest.CaptureFixture[str]) -> None:
    known = {
        "models": "qwen3-8b (Qwen/Qwen3-8B)",
        "clusters": "h100-8x8 (h100)",
        "solvers": "fcp",
        "targets": "slurm",
        "integrations": "transformers.trainer",
    }
    names = listed(capsys, kind)
    assert known[kind] in names
    assert [f"  {name}" for name in names] == [line for line in listed(capsys) if line[2:] in names]


@pytest.mark.parametrize(
    ("verb", "option", "typed", "completed"),
    [
        ("plan", "model", "qwen3-vl-8", ["qwen3-vl-8b"]),
        ("plan", "cluster", "h100", ["h100-8x8"]),
        ("plan", "solver", "", solver_names()),
        ("compare", "solvers", "fcp,stat", ["fcp,static"]),
        ("launch", "target", "", known_names("targets")),
        ("list", "kind", "so", ["solvers"]),
    ],
)
def test_the_shell_completes_names(verb: str, option: str, typed: str, completed: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("fcp", [verb])
    parameter = next(one for one in command.commands[verb].params if one.name == option)
    assert [item.value for item in parameter.shell_complete(context, typed)] == completed
