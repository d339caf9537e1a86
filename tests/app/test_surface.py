"""Names, help and examples of every option follow one rule."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from docs.hooks.reference import CommandEntry, command_entries
from fcp_cli.cli.app import app

COMMANDS = {" ".join(command.words): command for command in command_entries()}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_environment_and_config_names_follow_from_the_flag(command: CommandEntry) -> None:
    if not command.words:
        return
    for option in command.options:
        flag = next((flag for flag in option.flags if flag.startswith("--")), None)
        variable = "_".join(("FCP", *command.words, str(flag)[2:])).upper().replace("-", "_")
        assert option.environment == (variable if flag else None)
        assert option.config_key == (".".join((*command.words, flag[2:])) if flag else None)


@pytest.mark.lengthy
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_help_fits_80_columns_and_ends_with_examples_of_that_command(command: CommandEntry) -> None:
    shown = CliRunner().invoke(app, [*command.words, "--help"], env={"COLUMNS": "80"}).output
    text, _, examples = shown.partition("\nExamples:\n")
    assert max(map(len, text.splitlines())) <= 80
    assert [line.strip() for line in examples.splitlines() if line.startswith("  ")] == list(command.examples)
    assert len(command.examples) >= 2
    for example in command.examples:
        own_words = shlex.split(example.partition(" -- ")[0])
        assert own_words[: 1 + len(command.words)] == ["fcp", *command.words]
        meant = (one for one in COMMANDS.values() if tuple(own_words[1 : 1 + len(one.words)]) == one.words)
        runs = max(meant, key=lambda one: len(one.words))
        flags = {flag for option in runs.options for flag in option.flags}
        assert {word for word in own_words if word.startswith("-")} <= flags


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_metavars_and_defaults_are_written_one_way(command: CommandEntry) -> None:
    for option in command.options:
        assert option.help.endswith(".")
        assert "efault" not in option.help
        assert not set("<>[]{} ") & set(option.metavar.removeprefix("-- SCRIPT "))
