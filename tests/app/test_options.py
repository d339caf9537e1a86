"""Options declared as dataclasses: what the command line makes of them, and what the function gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Literal

import pytest
from inline_snapshot import snapshot
from typer.testing import CliRunner

from fcp_cli.cli.command import App, takes
from fcp_cli.errors import UsageError
from fcp_cli.util.options import Arg, Opt, OptionGroup, Typed, check_limits, options_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    run_dir: str = "runs"
    rate: Annotated[float, Opt("Peak.", min=0)] = 0.5
    steps: Annotated[int | None, Opt("Last.", min=1, unset="the plan's")] = None
    kind: Annotated[Literal["adam", "sgd"], Opt("Optimizer.")] = "adam"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    size: Annotated[int, Opt("Sequences.", min=1, max=9)] = 2
    shuffle: Annotated[bool, Opt("Shuffle.", negatable=True)] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    source: Annotated[Path, Arg("The data.")]
    rest: Annotated[tuple[str, ...], Arg("More.", metavar="WORD")] = ()
    globs: Annotated[tuple[str, ...], Opt("Files.", flags=("--glob", "-g"), metavar="GLOB")] = ()
    fast: Annotated[bool, Opt("Hurry.")] = False
    probe: Annotated[bool | None, Opt("Probe.", negatable=True, unset="once")] = None
    batches: Annotated[Batches, OptionGroup("Batches")] = Batches(size=4)
    trainer: Annotated[Mapping[str, Any], OptionGroup("Trainer", of=Trainer)] = field(default_factory=dict)
    typed: Annotated[frozenset[str], Typed()] = frozenset()


def run(*words: str, config: dict[str, Any] | None = None, env: Mapping[str, str] | None = None) -> Options:
    """Return what the command's function gets."""
    found: list[Options] = []
    result = CliRunner().invoke(_app(found.append), ["go", *words], env=env, default_map={"go": config or {}})
    assert result.exit_code == 0, result.output
    return found[0]


def _app(function: Callable[[Options], None]) -> App:
    app = App(context_settings={"auto_envvar_prefix": "T"})

    @app.command("go")
    @takes("t go a", "t go b")
    def go(options: Options) -> None:
        """Go somewhere."""
        function(options)

    @app.command("stay")
    def stay() -> None: ...

    return app


def test_defaults_are_those_of_the_fields_and_of_the_groups_instance() -> None:
    assert run("data") == Options(source=Path("data"), typed=frozenset({"source"}))
    assert run("data").batches.size == 4


def test_arguments_lists_switches_and_groups_arrive_in_one_value() -> None:
    found = run("data", "a", "b", "--glob", "x", "-g", "y", "--fast", "--no-probe", "--size", "3", "--no-shuffle")
    assert found == Options(
        source=Path("data"),
        rest=("a", "b"),
        globs=("x", "y"),
        fast=True,
        probe=False,
        batches=Batches(size=3, shuffle=False),
        typed=frozenset({"source", "rest", "globs", "fast", "probe", "size", "shuffle"}),
    )


def test_values_are_parsed_by_functions_with_a_name_which_click_asks_for() -> None:
    [go] = (one.callback for one in _app(print).registered_commands if one.name == "go")
    assert go is not None
    marks = [one.annotation.__metadata__[0] for one in list(inspect.signature(go).parameters.values())[1:]]
    parsers = [mark.parser for mark in marks if mark.parser is not None]
    assert len(parsers) == 4 and all(isinstance(parser, FunctionType) for parser in parsers)


def test_a_group_of_overrides_holds_only_what_was_given_by_whatever_means() -> None:
    assert run("data").trainer == {}
    assert run("data", "--rate", "0.5").trainer == {"rate": 0.5}
    found = run("data", "--kind", "sgd", config={"steps": 7}, env={"T_GO_RATE": "2"})
    assert found.trainer == {"kind": "sgd", "steps": 7, "rate": 2.0}
    assert found.typed == {"source", "kind"}


def test_marked_parameters_of_a_function_are_options_like_those_of_a_dataclass() -> None:
    app, found = App(), list[tuple[Path, int | None, frozenset[str]]]()

    @app.command("go")
    @takes("t go a")
    def go(
        *,
        source: Annotated[Path, Arg("The data.")],
        size: Annotated[int | None, Opt("Size.", min=1)] = None,
        typed: Annotated[frozenset[str], Typed()] = frozenset(),
    ) -> None:
        """Go somewhere."""
        found.append((source, size, typed))

    for words in (["a"], ["--size", "3", "a"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert found == [(Path("a"), None, frozenset({"source"})), (Path("a"), 3, frozenset({"source", "size"}))]
    for words, message in ((["--size", "3"], "missing argument"), (["a", "--size", "0"], "--size is 0; it must be")):
        error = CliRunner().invoke(app, words).exception
        assert isinstance(error, UsageError) and str(error).startswith(message)


def test_help_shows_groups_choices_defaults_and_examples() -> None:
    assert CliRunner().invoke(_app(print), ["go", "--help"]).output == (
        snapshot("""\
Usage: root go [OPTIONS] SOURCE [WORD]...

  Go somewhere.

Arguments:
  SOURCE  The data.
  WORD    More.

Options:
  -g, --glob GLOB  Files.
  --fast           Hurry.
  --[no-]probe     Probe. [default: once]
  --help           Show this message and exit.

Batches:
  --size N        Sequences. [default: 4]
  --[no-]shuffle  Shuffle. [default: --shuffle]

Trainer:
  --rate X         Peak. [default: 0.5]
  --steps N        Last. [default: the plan's]
  --kind adam|sgd  Optimizer. [default: adam]

Examples:
  t go a
  t go b
""")
    )


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (Trainer(rate=-1), "--rate is -1; it must be at least 0"),
        (Trainer(rate=float("nan")), "--rate is nan; it must be at least 0"),
        (Trainer(rate=float("inf")), "--rate is inf; it must be a finite number"),
        (Trainer(steps=0), "--steps is 0; it must be at least 1"),
        (Trainer(steps=2**63), r"--steps is 9223372036854775808; it must be at most 9\.22337e\+18"),
        (Batches(size=10), "--size is 10; it must be at most 9"),
        (Trainer(kind="lion"), "--kind is 'lion'; it must be one of adam, sgd"),  # type: ignore[arg-type]
    ],
)
def test_values_that_no_command_line_made_keep_the_same_limits(trainer: Trainer | Batches, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_limits(trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    first: Annotated[bool, Opt("First.")] = False
    second: Annotated[bool, Opt("Second.", group="Later")] = False
    third: Annotated[bool, Opt("Third.")] = False


def test_a_heading_holds_until_the_next_one() -> None:
    assert [(option.name, option.group) for option in options_of(Sections)] == [
        ("first", None),
        ("second", "Later"),
        ("third", "Later"),
    ]
