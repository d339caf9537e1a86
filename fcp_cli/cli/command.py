"""Command-line parsing and help of `fcp`: typer, with options declared as dataclasses.

`takes` turns a function into a command; its options are its parameters, or the fields of an option dataclass (see
`options`). The help is plain text under one heading per group, the same on a terminal and through a pipe.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, field, make_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from fcp_cli.cli.config import refuse_untrusted
from fcp_cli.errors import FcpError, Interrupted, UsageError
from fcp_cli.util.console import verbosity
from fcp_cli.util.options import Opt, Option, build, options_of, read_value

if TYPE_CHECKING:
    from fcp_cli.util.plugins import Registry


Function = TypeVar("Function", bound=Callable[..., Any])


def takes(*examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a command whose options are its parameters, or the fields of its option dataclass.

    Args:
        examples: command lines printed at the end of the help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        kind = _option_dataclass(function)
        options = tuple(options_of(kind))
        assert len({option.name for option in options}) == len(options), f"{kind.__name__} declares an option twice"
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        signature = inspect.Signature([context, *map(_parameter, options)])

        @wraps(function)
        def command(*, context: typer.Context, **values: Any) -> None:
            if context.invoked_subcommand is not None:
                return  # a group's own options do nothing when one of its commands runs
            sources = {name: context.get_parameter_source(name) for name in values}
            values |= {option.name: tuple(values[option.name] or ()) for option in options if option.many}
            given = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
            typed = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
            named = {name for name, source in sources.items() if source and source.name == "DEFAULT_MAP"}
            configured = [option for option in options if option.name in named]
            config = context.find_root().obj
            if config is not None and not config.is_named:
                refuse_untrusted(config.path, configured, values, _config_key(context))
            try:
                found: Any = build(kind, values, given=given, typed=typed)
                function(**vars(found)) if kind.__name__ == _MADE else function(found)
            except FcpError as error:
                error.args = (f"{error}{_origin(context, _option_in(str(error), context))}",)
                raise

        command.__dict__ |= {"__signature__": signature, "options": options, "examples": "\n".join(examples)}
        command.__dict__["rare"] = _rare(options)
        command.__annotations__ = {}  # typer would resolve those that `wraps` copied, which declare no options
        return command

    return decorate


def _option_dataclass(function: Callable[..., None]) -> type:
    """Return the option dataclass of a command, or one built from its parameters."""
    parameters = inspect.signature(function, eval_str=True).parameters
    if parameters.keys() == {"options"}:
        return cast(type, parameters["options"].annotation)
    empty = inspect.Parameter.empty
    defaults = {name: MISSING if one.default is empty else one.default for name, one in parameters.items()}
    shape = [(name, one.annotation, field(default=defaults[name])) for name, one in parameters.items()]
    return make_dataclass(_MADE, shape, kw_only=True)


_MADE: Final = "OptionsOfFunction"


def _rare(options: Iterable[Option]) -> frozenset[str]:
    """Return the names of options shown only by --help-all; none if no option is marked common."""
    marks = {option.name: option.mark for option in options if isinstance(option.mark, Opt)}
    common = {name for name, mark in marks.items() if mark.common}
    return frozenset(marks.keys() - common if common else ())


def _parameter(option: Option) -> inspect.Parameter:
    """Return an option as a function parameter annotated for typer."""
    kind: Any = list[option.type] if option.many else option.type  # type: ignore[name-defined]
    default: Any = option.default if option.default is not MISSING else inspect.Parameter.empty
    if option.commas:
        kind, default = str, ",".join(map(str, default))
    if default is None or (option.many and not default):
        kind, default = kind | None, default if default is inspect.Parameter.empty else None
    mark = option.mark
    settings: dict[str, Any] = {
        "help": mark.help,
        "metavar": option.metavar or None,
        "show_default": mark.unset or True,
    }
    if option.choices or option.name in OF_OPTION:
        settings["autocompletion"] = _completion(option)
    if option.commas or option.choices or option.type in (int, float):
        # Parsed by fcp: typer's messages omit the value. A function, not a partial: click takes its __name__.
        settings["parser"] = lambda value: read_value(option, value)
    if isinstance(mark, Opt):
        switch = f"/--no-{option.flag[2:]}" if mark.negatable else ""
        flags = mark.flags or (option.flag + switch,)
        info = typer.Option(*flags, rich_help_panel=option.group, **settings)
    else:
        info = typer.Argument(**settings)
    annotation = Annotated[kind, info]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _completion(option: Option) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        names = option.choices or known_names(OF_OPTION[option.name])
        before, comma, last = incomplete.rpartition(",") if option.name == "solvers" else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in names if name.startswith(last)]

    return complete


class _Help:
    """Mixin for typer's command classes that formats the help and errors.

    --help shows the common options in one list, --help-all every option under the heading of its group. A usage error
    is one line, in click's words or those of `read_value`.
    """

    params: list[Any]
    epilog: str | None
    callback: Any
    _help_all: Any = None

    @property
    def rare(self) -> frozenset[str]:
        """Names of options shown only by --help-all."""
        return getattr(self.callback, "rare", frozenset())

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters and --help-all, a copy of --help that shows every option."""
        params = super().get_params(ctx)  # type: ignore[misc]
        if self._help_all is None:  # one object for all calls: click compares parameters by identity
            self._help_all = copy(self.get_help_option(ctx))  # type: ignore[attr-defined]
            self._help_all.__dict__ |= {
                "name": "help_all",
                "opts": ["--help-all"],
                "help": "Show every option and exit.",
                "hidden": not self.rare,
                "allow_from_autoenv": False,
                "callback": _show_everything,
            }
        return [*params, self._help_all]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _one_line_errors(ctx):
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write a required argument as NAME, where typer writes {NAME}."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, commands and options under their headings, options in the order of the dataclass."""
        folds = self.rare and _EVERYTHING not in ctx.meta
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Commands": []}
        for name, command in getattr(self, "commands", {}).items():
            sections["Commands"].append((name, " ".join(command.help.split("\n\n")[0].split())))
        for parameter in self.get_params(ctx):
            if parameter.hidden or (folds and parameter.name in (*self.rare, "help_all")):
                continue
            default = default_text(parameter, ctx)
            left = f"{', '.join(spellings(parameter))} {metavar_of(parameter)}".strip()
            right = f"{parameter.help}{f' [default: {default}]' if default else ''}"
            section = help_section(parameter)
            sections.setdefault("Options" if folds and section != "Arguments" else section, []).append((left, right))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_SHORT_COLUMN if folds else _COLUMN)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples without wrapping, so that they can be copied."""
        if self.epilog:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in examples_of(self)))
        if self.rare and _EVERYTHING not in ctx.meta:
            formatter.write_paragraph()
            formatter.write(f"{len(self.rare)} more options, by purpose: {ctx.command_path} --help-all\n")


_EVERYTHING: Final = "fcp.help-all"
_COLUMN: Final = 30  # maximum width of the flag column; the help of longer flags starts on the next line
_SHORT_COLUMN: Final = 23  # keeps most common options on one line


def _show_everything(context: Any, parameter: Any, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        context.meta[_EVERYTHING] = True
        typer.echo(context.get_help())
        context.exit()


def examples_of(command: Any) -> list[str]:
    return [line.strip() for line in (command.epilog or "").strip().splitlines()]


def help_section(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def spellings(parameter: Any) -> list[str]:
    """Return the flags of an option, short ones first; a negatable switch is written --[no-]x."""
    if parameter.param_type_name == "argument":
        return []
    flags = sorted(parameter.opts, key=lambda flag: flag.startswith("--"))
    return [f"--[no-]{flag[2:]}" if parameter.secondary_opts and flag.startswith("--") else flag for flag in flags]


def metavar_of(parameter: Any) -> str:
    is_switch = getattr(parameter, "is_flag", False) or getattr(parameter, "count", False)
    return "" if is_switch else str(parameter.metavar or parameter.name.upper())


def default_text(parameter: Any, context: Any) -> str:
    """Return the default as shown in the help, taken from the config if set there; "" if there is none."""
    value = parameter.get_default(context, call=False)
    if value is None:
        return parameter.show_default if isinstance(parameter.show_default, str) else ""
    if isinstance(value, bool):
        return str(parameter.opts[0]) if value and parameter.secondary_opts else ""
    if getattr(parameter, "count", False):
        return ""
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class Command(_Help, TyperCommand):
    """A command that also accepts -q and -v after its name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, _without_verbosity(args, self.params))


def _without_verbosity(args: list[str], parameters: Sequence[Any]) -> list[str]:
    """Apply and remove -q and -v; option values and words after -- stay unchanged."""
    taking_value = {name for p in parameters if not getattr(p, "is_flag", True) for name in p.opts}
    left: list[str] = []
    for index, word in enumerate(args):
        if word == "--":
            return [*left, *args[index:]]
        level = None if left and left[-1] in taking_value else _LEVELS.get(word)
        if level is None:
            left.append(word)
        else:
            verbosity.level = level
    return left


_LEVELS = {"-q": -1, "--quiet": -1, "-v": 1, "--verbose": 1, "-vv": 2}


class VerbGroup(_Help, TyperGroup):
    """A command with subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)  # click raises the help as a usage error
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _one_line_errors(ctx):
            return super().resolve_command(ctx, args)


class App(typer.Typer):
    """Typer app whose commands use `Command` and `VerbGroup`, with the examples of `takes` below their help."""

    def __init__(self, **settings: Any) -> None:
        # Rich markup off: its boxes halve the width for text, and its output differs in a pipe.
        super().__init__(**{"cls": VerbGroup, "rich_markup_mode": None, **settings})

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        return self._with_examples(super().command, name, cls=Command, **settings)

    def callback(self, **settings: Any) -> Callable[[Function], Function]:
        return self._with_examples(super().callback, **settings)

    @staticmethod
    def _with_examples(register: Any, *words: Any, **settings: Any) -> Callable[[Function], Function]:
        def decorate(function: Function) -> Function:
            if examples := getattr(function, "examples", None):
                settings["epilog"] = examples
            register(*words, **settings)(function)
            return function

        return decorate


_FIRST_GROUPS = ("manifest", "profile")


class RootGroup(VerbGroup):
    """Root command; Ctrl-C raises `Interrupted`, since click alone would exit with 1."""

    def __init__(self, *, commands: dict[str, Any], **settings: Any) -> None:
        # Typer lists groups last, but a new user starts with manifest and profile.
        groups_first = sorted(commands.items(), key=lambda item: item[0] not in _FIRST_GROUPS)
        super().__init__(commands=dict(groups_first), **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; no file was left half-written") from None


_CLICK_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer does not export it, and may have a click of its own


@contextmanager
def _one_line_errors(context: Any) -> Iterator[None]:
    """Raise a usage error as one line: its message, the origin of a wrong value, and the help's command."""
    try:
        yield
    except UsageError as error:
        message, option = str(error), _option_in(str(error), context)
    except _CLICK_USAGE_ERROR as error:
        message, option = error.format_message().rstrip("."), getattr(error, "param", None)
    else:
        return
    message = f"{message[:1].lower()}{message[1:]}{_origin(context, option)}"
    raise UsageError(f"{message}{' See' if message.endswith('?') else '; see'} '{context.command_path} --help'")


def _option_in(message: str, context: Any) -> Any:
    """Return the option that a message such as "--ranks is 0; ..." starts with, or None."""
    return next((option for option in context.command.params if message.partition(" is ")[0] in option.opts), None)


def _origin(context: Any, option: Any) -> str:
    """Return the config key or environment variable that set an option, for messages; "" if it was typed."""
    source = option and context.get_parameter_source(option.name)
    if source and source.name == "DEFAULT_MAP":
        key, file = f"{_config_key(context)}.{option.name.replace('_', '-')}", context.find_root().obj.path
        return f" (set by {key} in {file})"
    if source and source.name == "ENVIRONMENT":
        return f" (set by {context.auto_envvar_prefix}_{option.name.upper()})"
    return ""


def _config_key(context: Any) -> str:
    """Return the key of a command in the config, e.g. "manifest.build"."""
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return ".".join(words)


Known = Literal["models", "clusters", "solvers", "targets", "integrations"]
"""Kinds of names that options accept, for `fcp list` and shell completion."""
KINDS: Final[tuple[Known, ...]] = get_args(Known)
OF_OPTION: Final[dict[str, Known]] = {
    "model": "models",
    "cluster": "clusters",
    "solver": "solvers",
    "solvers": "solvers",
    "target": "targets",
}
"""Name of an option's field -> its values; options of few choices list them themselves."""


def known_names(kind: Known) -> list[str]:
    """Return the names of one kind, as accepted by options."""
    if kind in ("solvers", "targets", "integrations"):
        return _registry(kind).names()
    from fcp_cli.models.model import shipped_names

    return shipped_names("model" if kind == "models" else "cluster")


def packages_of(kind: Known) -> dict[str, str]:
    """Return name -> package for names that third-party packages add; {} for models and clusters."""
    return _registry(kind).packages() if kind in ("solvers", "targets", "integrations") else {}


def ignored_plugins(kind: Known) -> list[str]:
    """Return a line for each third-party entry point of this kind that is ignored."""
    return _registry(kind).ignored() if kind in ("solvers", "targets", "integrations") else []


def _registry(kind: Known) -> Registry:
    if kind == "solvers":
        from fcp_cli.planning.solvers import REGISTRY as SOLVERS

        return SOLVERS
    if kind == "targets":
        from fcp_cli.launching.targets import REGISTRY as TARGETS

        return TARGETS
    from fcp_cli.runtime.inject import REGISTRY as INTEGRATIONS

    return INTEGRATIONS


def other_names(kind: Known) -> dict[str, list[str]]:
    """Return name -> aliases for models and clusters; {} for other kinds."""
    if kind not in ("models", "clusters"):
        return {}
    from fcp_cli.models.model import shipped_aliases

    return shipped_aliases("model" if kind == "models" else "cluster")
