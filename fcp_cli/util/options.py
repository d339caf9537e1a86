"""Options as data: a command's options are annotated fields of a frozen dataclass, declared once.

The library works with the dataclass itself. Its annotations define flags, metavars, defaults, limits, help, `fcp.yaml`
keys, environment variables and the reference page. This module does not import typer, so that library packages can
declare their own options; `cli.command.takes` turns them into a command.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class ClusterOptions:
        ranks: Annotated[int | None, Opt("Model replicas.", min=1, unset="the profile's cluster")] = None

    @dataclass(frozen=True, kw_only=True, slots=True)
    class PlanOptions:
        manifest: Annotated[Path, Arg("Parquet with lengths.")]
        cluster: Annotated[ClusterOptions, OptionGroup("Cluster")] = ClusterOptions()

Fields without such an annotation are not options: they need a default, which the command line never changes.
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
"""Plans for tens of thousands of ranks take minutes; a far larger number is a typo."""
MOST_VIRTUAL_STAGES: Final = 1 << 12
"""More than any model's layers."""
MOST_TOKENS: Final = 1 << 40
"""Per rank; times `MOST_RANKS` it still fits into 64 bits."""
MOST_WAIT: Final = 10**8
"""Three years in seconds: the maximum of system timers."""
MOST_WORKERS: Final = 4096
"""Maximum processes per machine."""
MOST_ROWS: Final = 1 << 33
"""Sequences of a data set; some arrays have a byte per sequence."""
MOST_PIXELS: Final = 1 << 16
"""Per side; the limit of image formats."""
MOST_EPOCHS: Final = 100_000
"""Limits planning time: every epoch is planned step by step."""
_MOST_WHOLE: Final = 2**63 - 1
_METAVARS: Final[dict[Any, str]] = {int: "N", float: "X", str: "NAME", Path: "FILE"}


@dataclass(frozen=True, slots=True)
class Opt:
    """An option.

    Attributes:
        help: one or two sentences.
        flags: spellings; by default `--field-name`.
        metavar: placeholder of the value; by default N, X, NAME, FILE or the choices of a `Literal`.
        min, max: limits of a number; without `max`, an integer must fit into 64 bits.
        below: exclusive upper limit.
        unset: description of the effective default if the default is None.
        group: help heading of this and further options, up to the next one with a group; inside an `OptionGroup` it
            follows the group's title, for example "Bundled trainer: memory".
        common: whether --help shows it; others appear only in --help-all. If no option of a command is common, --help
            shows all.
        negatable: whether a switch also has a `--no-...` form.
        commas: whether a `tuple[int, ...]` is a single word of positive numbers such as 1,2,4, which is sorted.
        trust: restricts an implicit `fcp.yaml`, which may set this option only if trusted: always if it "runs" code or
            commands, opens connections or mounts into containers; if it "writes", only for paths outside the folder.
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
    """A positional argument; a field of type `tuple[T, ...]` takes all remaining words."""

    help: str
    _: KW_ONLY
    metavar: str | None = None
    unset: str | None = None


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """A nested dataclass whose options share a help heading; the field's default instance has their defaults.

    Attributes:
        title: help heading.
        of: for a field of type `Mapping[str, Any]`, the dataclass whose options it collects: only given ones, since
            they override values from elsewhere.
    """

    title: str
    _: KW_ONLY
    of: type | None = None


@dataclass(frozen=True, slots=True)
class Typed:
    """Marks a field of type `frozenset[str]` that receives the names of options given on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option or argument as declared by its dataclass.

    Attributes:
        name: field name.
        type: type of a value, without None.
        many: whether it collects a tuple of values.
        default: default value; `MISSING` if a value is required.
        mark: its `Opt` or `Arg`.
        group: help heading, or None.
    """

    name: str
    type: Any
    many: bool
    default: Any
    mark: Opt | Arg
    group: str | None

    @property
    def flag(self) -> str:
        """Flag or argument name for messages."""
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
    """Yield the options of a dataclass and its groups, in field order.

    Args:
        kind: a dataclass.
        defaults: instance that provides the defaults.
        group: title of the enclosing `OptionGroup`, or None.
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
    """Create an instance of an option dataclass.

    Args:
        kind: the dataclass.
        values: values of all options, by name.
        given: names of options with non-default values.
        typed: names of options given on the command line.
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
    """Parse a command-line word or YAML value as a number, a choice, or comma-separated numbers."""
    if option.commas:
        return _whole_numbers(value, option.flag)
    if option.type in (int, float):
        _check_limit(option, number := _number(option, value), shown=value)
        return number
    _check_limit(option, value, shown=value)
    return value


def _number(option: Option, value: Any) -> int | float:
    try:
        # int() would truncate fractions and accept True.
        if isinstance(value, bool) or (isinstance(value, float) and option.type is int and value != int(value)):
            raise ValueError
        return option.type(value)  # type: ignore[no-any-return]
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if option.type is int else "a number"
        raise UsageError(f"{option.flag} is {value!r}; it must be {kind}") from None


def _whole_numbers(value: Any, flag: str) -> tuple[int, ...]:
    """Parse "4,1,2", or a YAML list, as (1, 2, 4)."""
    words = value if isinstance(value, list | tuple) else str(value).split(",")
    try:
        numbers = {int(word) for word in map(str, words) if word.strip()}
    except ValueError:
        raise UsageError(f"{flag} is {value!r}; give whole numbers with commas, as 1,2,4") from None
    if any(not 1 <= number <= MOST_TOKENS for number in numbers):
        raise UsageError(f"{flag} is {value!r}; every number must be at least 1 and at most {MOST_TOKENS}")
    return tuple(sorted(numbers))


def check_limits(instance: Any) -> None:
    """Validate limits and choices of an instance that was not built from a command line."""
    for option in options_of(type(instance)):
        value = getattr(instance, option.name)
        if value is not None and not option.many:
            _check_limit(option, value, shown=value)


def _check_limit(option: Option, value: Any, *, shown: Any) -> None:
    """Raise UsageError if a value violates limits or choices; `shown` is the value as given."""
    mark = option.mark
    if option.choices and value not in option.choices:
        raise UsageError(f"{option.flag} is {shown!r}; it must be one of {', '.join(option.choices)}")
    if option.type not in (int, float) or not isinstance(mark, Opt):
        return
    limits = []
    # Written so that NaN, for which comparisons are False, is rejected.
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
    """Yield (name, type, mark, default) of each field; the mark is None for fields that are not options."""
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
    """Return the type of a single value without None, and whether the field takes several."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    return hint, False
