"""The help of every command: few options on one screen, the rest by groups, and an answer for options that are gone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from docs.hooks.reference import CommandEntry, command_entries
from fcp_cli.cli.app import app
from fcp_cli.cli.config import RETIRED, RETIRED_COMMANDS
from fcp_cli.errors import UsageError

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


@pytest.mark.parametrize(("command", "flag"), RETIRED)
def test_a_retired_option_is_answered_with_its_replacement_or_why_there_is_none(
    command: str, flag: str, tmp_path: Path
) -> None:
    instead = f"; {RETIRED[command, flag]}"
    typed = CliRunner().invoke(app, [*command.split(), flag, "x"])
    assert isinstance(typed.exception, UsageError)
    assert str(typed.exception) == f"there is no option {flag}{instead}; see 'fcp {command} --help'"

    config = tmp_path / "fcp.yaml"
    first, *inner = command.split()
    config.write_text(f"{first}: {{{''.join(f'{word}: {{' for word in inner)}'{flag[2:]}': x{'}' * len(inner)}}}")
    read = CliRunner().invoke(app, ["--config", str(config), "list"])
    assert str(read.exception) == f"{config}: {command!r} has no option {flag[2:]!r}{instead}"

    variable = f"FCP_{command}_{flag[2:]}".upper().replace(" ", "_").replace("-", "_")
    warned = CliRunner(env={variable: "x"}).invoke(app, ["list", "models"])
    assert f"the variable {variable} sets nothing: {first} has no such option{instead}" in warned.stderr.replace(
        "\n", " "
    )


@pytest.mark.parametrize("command", RETIRED_COMMANDS)
def test_a_retired_command_is_answered_with_what_to_type_instead(command: str, tmp_path: Path) -> None:
    said = f"there is no command {command!r} any more; {RETIRED_COMMANDS[command]}"
    typed = CliRunner().invoke(app, [*command.split(), "plan.parquet"])
    assert isinstance(typed.exception, UsageError)
    first, *inner = command.split()
    assert str(typed.exception) == f"{said}; see 'fcp {f'{first} ' if inner else ''}--help'"
    config = tmp_path / "fcp.yaml"
    config.write_text(f"{first}: {{{inner[0]}: {{json: true}}}}" if inner else f"{first}: {{json: true}}")
    read = CliRunner().invoke(app, ["--config", str(config), "list"])
    assert str(read.exception) == f"{config}: {said}"


def test_a_retired_option_names_one_that_the_command_has() -> None:
    for (command, flag), instead in RETIRED.items():
        flags = {each for option in COMMANDS[command].options for each in option.flags}
        assert flag not in flags
        named = instead.removeprefix("write ").split()[0].strip(",")
        assert named in flags or "write" not in instead
