"""Options as data: a command's options are the annotated fields of a frozen dataclass, written once.

The dataclass is the value that the library works with; its annotations give the flags, the metavars, the defaults, the
limits, the help, the keys of `fcp.yaml`, the environment names and the reference page. Nothing here imports typer, so
that a library package may own the options that it obeys; `command_line.takes` makes a command of them, and one of a
function whose parameters have such annotations.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class ClusterOptions:
        ranks: Annotated[int | None, Opt("Model replicas.", min=1, unset="the profile's cluster")] = None

    @dataclass(frozen=True, kw_only=True, slots=True)
    class PlanOptions:
        manifest: Annotated[Path, Arg("Parquet with lengths.")]
        cluster: Annotated[ClusterOptions, Group("Cluster")] = ClusterOptions()

Fields without a mark are no options: they need a default, which the command line leaves alone.
"""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fcp_cli.errors import UsageError

T = TypeVar("T")
MOST_RANKS: Final = 1 << 20
"""Plans of tens of thousands are made in minutes; a number far beyond is a slip."""
MOST_VIRTUAL_STAGES: Final = 1 << 12
"""No model has as many layers."""
MOST_TOKENS: Final = 1 << 40
"""Of a rank; times `MOST_RANKS` it still fits 64 bits."""
MOST_WAIT: Final = 10**8
"""Three years, in seconds: the longest time of the system's timers."""
MOST_WORKERS: Final = 4096
"""Processes that one machine may start."""
MOST_ROWS: Final = 1 << 33
"""Sequences of a data set; masks over them have a byte for each."""
MOST_PIXELS: Final = 1 << 16
"""Of a side; picture formats end there."""
MOST_EPOCHS: Final = 100_000
"""Every epoch is planned, step by step."""
MOST_AHEAD: Final = 10_000
"""Steps, or batches, that are held in memory before they train."""
_MOST_WHOLE: Final = 2**63 - 1
_METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", str: "NAME", Path: "FILE"}


@dataclass(frozen=True, slots=True)
class Opt:
    """An option.

    Attributes:
        help: one or two sentences.
        flags: its spellings; without them `--name-of-the-field`.
        metavar: placeholder of the value; without it N, X, NAME, FILE or the choices of a `Literal`.
        min, max: limits of a number; without `max` a whole one fits 64 bits.
        below: a number that it must not reach.
        unset: says for options whose default is None, the words for the effective default.
        group: heading in the help of this option and of those after it, up to the next that names one; inside a
            `OptionGroup` it stands behind the group's title, as "Bundled trainer: memory".
        common: shown by --help, which folds the others into --help-all; if no option of a command is common, --help
            shows all of them.
        negatable: a switch has a `--no-...`, too.
        commas: a field of type `tuple[int, ...]` is one word of positive numbers, as 1,2,4; they arrive in order.
        trust: an `fcp.yaml` that nobody named sets this option only if it is trusted: always for one that "runs" code
            or commands, opens connections or mounts into containers; if the path is outside for one that "writes".
    """

    help: str
    _: KW_ONLY
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    below: float | None = None
    unset: str | None = None
    group: str | None = None
    common: bool = False
    negatable: bool = False
    commas: bool = False
    trust: Literal["runs", "writes"] | None = None


@dataclass(frozen=True, slots=True)
class Arg:
    """A positional argument; a field of type `tuple[T, ...]` takes the rest of the words."""

    help: str
    _: KW_ONLY
    metavar: str | None = None
    unset: str | None = None


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """A nested dataclass whose options stand under one heading; the field's default instance holds their defaults.

    Attributes:
        title: the heading.
        of: for a field of type `Mapping[str, Any]`, the dataclass whose options it collects: only those that were
            given, since they override values that were recorded or found elsewhere.
    """

    title: str
    _: KW_ONLY
    of: type | None = None


@dataclass(frozen=True, slots=True)
class Typed:
    """A field of type `frozenset[str]`: names of the options that stood on the command line itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option or argument as its dataclass declares it.

    Attributes:
        name: the name of the field.
        type: the type of one value, without None.
        many: it collects a tuple of values.
        default: the value of the field if none is given; `MISSING` where a value is required.
        mark: its `Opt` or `Arg`.
        group: heading in the help, None: none.
    """

    name: str
    type: Any
    many: bool
    default: Any
    mark: Opt | Arg
    group: str | None

    @property
    def flag(self) -> str:
        """Return the flag, or the argument, that messages name."""
        if isinstance(self.mark, Arg):
            return self.metavar
        long = (flag for flag in self.mark.flags if flag.startswith("--"))
        return next(long, f"--{self.name.replace('_', '-')}")

    @property
    def commas(self) -> bool:
        return isinstance(self.mark, Opt) and self.mark.commas

    @property
    def metavar(self) -> str:
        if self.type is bool:
            return ""
        if self.mark.metavar is not None:
            return self.mark.metavar
        if self.commas:
            return "N,..."
        choices = self.choices
        if isinstance(self.mark, Arg):
            return self.name.upper()
        return "|".join(choices) if choices else _METAVARS[self.type]

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def options_of(kind: type, *, defaults: Any = None, group: str | None = None) -> Iterator[Option]:
    """Yield the options of a dataclass and of its groups, in the order of the fields.

    Args:
        kind: a dataclass.
        defaults: an instance whose values stand for the defaults of the fields.
        group: title of the enclosing `OptionGroup`, None at the top.
    """
    title = f"{group}: " if group else ""
    for name, hint, mark, default in _marked_fields(kind, defaults):
        if isinstance(mark, OptionGroup):
            inner = default if mark.of is None and default is not MISSING else None
            yield from options_of(mark.of or hint, defaults=inner, group=mark.title)
        elif isinstance(mark, Opt | Arg):
            value_type, many = _value_type(hint)
            if isinstance(mark, Opt) and mark.group is not None:
                group = f"{title}{mark.group}"
            yield Option(name=name, type=value_type, many=many, default=default, mark=mark, group=group)


def build(kind: type[T], values: Mapping[str, Any], *, given: Collection[str], typed: Collection[str]) -> T:
    """Make an instance of an option dataclass.

    Args:
        kind: the dataclass.
        values: the values of all its options, by name.
        given: names of the options whose values are no defaults.
        typed: names of those on the command line.
    """
    found: dict[str, Any] = {}
    for name, hint, mark, _ in _marked_fields(kind, None):
        if isinstance(mark, Typed):
            found[name] = frozenset(typed)
        elif isinstance(mark, OptionGroup) and mark.of is not None:
            found[name] = {option.name: values[option.name] for option in options_of(mark.of) if option.name in given}
        elif isinstance(mark, OptionGroup):
            found[name] = build(hint, values, given=given, typed=typed)
        elif mark is not None:
            found[name] = values[name]
    return kind(**found)


def read_value(option: Option, value: Any) -> Any:
    """Parse a word of the command line, or a value of YAML, as a number, a choice, or numbers with commas."""
    if option.commas:
        return _whole_numbers(value, option.flag)
    if option.type in (int, float):
        _check_limit(option, number := _number(option, value), shown=value)
        return number
    _check_limit(option, value, shown=value)
    return value


def _number(option: Option, value: Any) -> int | float:
    try:
        # int() would cut the fraction off, and takes True for 1.
        if isinstance(value, bool) or (isinstance(value, float) and option.type is int and value != int(value)):
            raise ValueError
        return option.type(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if option.type is int else "a number"
        raise UsageError(f"{option.flag} is {value!r}; it must be {kind}") from None


def _whole_numbers(value: Any, flag: str) -> tuple[int, ...]:
    """Read "4,1,2", or a list of YAML, as (1, 2, 4)."""
    words = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        numbers = {int(word) for word in map(str, words) if word.strip()}
    except ValueError:
        raise UsageError(f"{flag} is {value!r}; give whole numbers with commas, as 1,2,4") from None
    if any(not 1 <= number <= MOST_TOKENS for number in numbers):
        raise UsageError(f"{flag} is {value!r}; every number must be at least 1 and at most {MOST_TOKENS}")
    return tuple(sorted(numbers))


def check_limits(instance: Any) -> None:
    """Refuse numbers beyond the limits of their options, and unknown choices, in a value that no command line made."""
    for option in options_of(type(instance)):
        value = getattr(instance, option.name)
        if value is not None and not option.many:
            _check_limit(option, value, shown=value)


def _check_limit(option: Option, value: Any, *, shown: Any) -> None:
    """Refuse a value beyond the limits or outside the choices; `shown` is how it was given."""
    mark = option.mark
    if option.choices and value not in option.choices:
        raise UsageError(f"{option.flag} is {shown!r}; it must be one of {', '.join(option.choices)}")
    if option.type not in (int, float) or not isinstance(mark, Opt):
        return
    limits = []
    # Written so that NaN, which no comparison accepts, is refused.
    if mark.min is not None and not value >= mark.min:
        limits.append(f"at least {mark.min:g}")
    most = _MOST_WHOLE if mark.max is None and option.type is int else mark.max
    if most is not None and not value <= most:
        limits.append(f"at most {most:g}")
    if mark.below is not None and not value < mark.below:
        limits.append(f"below {mark.below:g}")
    if limits or not math.isfinite(value):
        raise UsageError(f"{option.flag} is {shown}; it must be {' and '.join(limits) or 'a finite number'}")


def _marked_fields(kind: type, defaults: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield name, type, mark and default of each field; the mark is None if there is none."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, mark = hints[field.name], None
        if get_origin(hint) is Annotated:
            hint, mark = get_args(hint)[:2]
        default: Any = field.default
        if defaults is not None:
            default = getattr(defaults, field.name)
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        yield field.name, hint, mark, default


def _value_type(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value without None, and whether a field of this type takes several."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False
