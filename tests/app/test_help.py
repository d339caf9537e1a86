"""The help of every command: few options on one screen, all options by groups."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from typer.testing import CliRunner

from docs.hooks.reference import CommandEntry, command_entries
from fcp_cli.cli.app import app

LINES, COLUMNS, OPTIONS = 50, 80, 20
COMMANDS = {" ".join(entry.words): entry for entry in command_entries()}


def help_of(command: str, flag: str = "--help") -> list[str]:
    result = CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, [*command.split(), flag])
    assert result.exit_code == 0
    return result.output.splitlines()


def options_in(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("  -") and not line.startswith("  -- ")]


@pytest.mark.lengthy
@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_one_screen_with_few_options(command: str) -> None:
    lines = help_of(command)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert len(options_in(lines)) <= OPTIONS


@pytest.mark.lengthy
@pytest.mark.parametrize("command", COMMANDS)
def test_help_all_shows_every_option_once(command: str) -> None:
    lefts = (re.match(r"  (-\w, )?(-\S+)(, -\S+)*", line) for line in options_in(help_of(command, "--help-all")))
    flags = Counter(flag for left in lefts if left for flag in left[0].replace(",", " ").split())
    wanted = {flag for option in COMMANDS[command].options for flag in option.flags if not flag.startswith("--no-")}
    wanted -= {"--config"}
    assert {flag for flag in wanted if flags[flag] + flags[f"--[no-]{flag[2:]}"] != 1} == set()


@pytest.mark.parametrize("command", ["launch", "plan", "compare", "profile", "manifest build"])
def test_a_folded_help_ends_with_a_line_that_names_help_all(command: str) -> None:
    shown, total = len(options_in(help_of(command))), len(options_in(help_of(command, "--help-all")))
    left = total - shown - 1  # --help-all itself
    assert help_of(command)[-1] == f"{left} more options, by purpose: fcp {command} --help-all"


def test_options_of_the_bundled_trainer_stand_apart_from_those_of_the_job() -> None:
    groups: dict[str, set[str]] = {}
    for option in COMMANDS["launch"].options:
        groups.setdefault(option.group.partition(":")[0], set()).add(option.name)
    assert {"learning_rate", "zero", "weights", "checkpoint_every"} <= groups["Bundled trainer"]
    assert {"image", "sbatch_option", "target", "output"} <= groups["On a cluster"]
    assert {"plan", "run_dir", "device"} <= groups["The job"]


@pytest.mark.parametrize("entry", [entry for entry in COMMANDS.values() if len(entry.options) > OPTIONS])
def test_every_option_of_a_long_command_has_a_group(entry: CommandEntry) -> None:
    assert {option.name for option in entry.options if option.flags and option.group == "Options"} == set()
