"""Filters, methods and functions for templates, whose work is counted before it is done."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, Final

from jinja2 import TemplateError, pass_environment, pass_eval_context
from jinja2.filters import do_indent, do_int, do_join, do_replace, do_round, do_trim
from jinja2.sandbox import SandboxedFormatter
from jinja2.utils import Namespace

from fcp_cli.reading.work_limits import CALL, ITEM, RenderingLimit, WorkLimitError, measured


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


READING_METHODS: Final = _words(
    "capitalize count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle isupper "
    "lower partition removeprefix removesuffix startswith swapcase title upper"
)
# Quadratic in the worst case.
QUADRATIC_METHODS: Final = _words("lstrip rfind rindex rpartition rsplit rstrip strip")
SPLITTING_METHODS: Final = _words("rsplit split splitlines")
TEXT_METHODS: Final = frozenset((*READING_METHODS, *QUADRATIC_METHODS, *SPLITTING_METHODS, "format", "join", "replace"))
LAZY_FILTERS: Final = _words(
    "count d default first items last length list map reject rejectattr reverse safe select selectattr"
)
READING_FILTERS: Final = _words("abs capitalize e escape float forceescape lower string title upper wordcount")
SORTING_FILTERS: Final = _words("dictsort max min sort unique")
SIMPLE_TESTS: Final = _words(
    "boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence string "
    "test true undefined"
)
READING_TESTS: Final = _words("!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper")
NUMBER_TESTS: Final = _words("divisibleby even odd")

_MOST_DIGITS: Final = 4300  # Python's own limit, missing in early 3.10 releases
_MOST_INDENT: Final = 16
_LONG_WIDTH: Final = re.compile(r"%(\([^)]{0,100}\))?[^a-zA-Z%]*?(\*|\d{3})")
_PLAIN_TIME: Final = re.compile(r"([^%]|%[-_^#]?[A-Za-z%])*")  # glibc would pad to arbitrary widths
_SORTING_PASSES: Final = 16

current_work: ContextVar[RenderingLimit] = ContextVar("work of the template that is rendered")


@contextmanager
def limited_work(given: Any) -> Iterator[None]:
    """Context manager: limit the work of a rendering with the values `given`."""
    token = current_work.set(RenderingLimit(given))
    try:
        yield
    finally:
        current_work.reset(token)


def lazy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that does not read its arguments deeply."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        work = current_work.get()
        work.spend(CALL)
        return work.made(function(*args, **kwargs))

    return counted


def reading(function: Callable[..., Any], *, passes: int = 1) -> Callable[..., Any]:
    """Wrap a filter or test that reads its arguments deeply; they are counted first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        work = current_work.get()
        args = tuple(list(work.counted(value)) if isinstance(value, Iterator) else value for value in args)
        items, characters = measured((args[first:], kwargs), most=work.left)
        work.spend(CALL + passes * (ITEM * items + characters))
        return work.made(function(*args, **kwargs))

    return counted


def sorting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter that sorts or compares its values."""
    return reading(function, passes=_SORTING_PASSES)


def of_numbers(test: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a template test that uses `%`, such as `divisibleby`, so that it accepts only numbers.

    On a string, `%` would format and could create a huge text.
    """

    @wraps(test)
    def checked(value: Any, *args: Any) -> bool:
        if not all(isinstance(one, int | float) for one in (value, *args)):
            raise TemplateError(f"{value!r:.40} is not a number")
        return test(value, *args)

    return checked


def percent(text: str, values: Any) -> str:
    """Return `text % values`."""
    work = current_work.get()
    if _LONG_WIDTH.search(text):
        raise WorkLimitError("a width or precision of % must have fewer than three digits")
    items, characters = measured(values, most=work.left)
    work.allow(len(text) + text.count("%") * (100 + items + characters))
    return work.made(text % values)  # type: ignore[no-any-return]


def format_filter(text: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TemplateError("format takes values by place or by name, not both")
    return percent(str(text), kwargs or args)


class TextFormat:
    """The `format` method of a template string."""

    def __init__(self, environment: Any, text: str) -> None:
        self._formatter, self._text = _Formatter(environment), text

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        current_work.get().read(self._text)
        return self._formatter.vformat(self._text, args, kwargs)


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        work = current_work.get()
        if re.search(r"\d{3}", format_spec):
            raise WorkLimitError("a width or precision of format() must have fewer than three digits")
        work.spend(100)
        return work.made(super().format_field(work.read(value), format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        work = current_work.get()
        return work.made(super().convert_field(work.read(value), conversion))


def call_text_method(text: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a string method."""
    work, name = current_work.get(), method.__name__
    if name == "join" and args:
        args = (_joinable(text, args[0]), *args[1:])
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        work.allow(len(text) + (text.count(args[0]) if args[0] else len(text) + 1) * len(args[1]))
    elif name in SPLITTING_METHODS:
        separator = args[0] if args else kwargs.get("sep")
        pieces = text.count(separator) if separator and isinstance(separator, str) else len(text)
        work.spend(ITEM * pieces)
    work.read((args, kwargs))
    needles = sum(len(value) for value in (*args, *kwargs.values()) if isinstance(value, str))
    work.spend(len(text) * (1 + (needles // 16 if name in QUADRATIC_METHODS else 0)))
    result = method(*args, **kwargs)
    return work.made(result) if isinstance(result, str) else result


def _joinable(separator: str, values: Any) -> list[Any]:
    work = current_work.get()
    taken = list(work.counted(values))
    items, characters = measured(taken, most=work.left)
    work.allow(items * (1 + len(separator)) + characters)
    return taken


@pass_eval_context
def join_filter(context: Any, values: Any, d: Any = "", attribute: Any = None) -> str:
    return do_join(context, _joinable(str(d), values), d, attribute)  # type: ignore[no-any-return]


@pass_eval_context
def replace_filter(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> str:
    work = current_work.get()
    text, old, new = (one if isinstance(one, str) else str(work.read(one)) for one in (text, old, new))
    work.allow(6 * len(text) + (text.count(old) if old else len(text) + 1) * 6 * len(new))  # worst case: all escaped
    return do_replace(context, text, old, new, count)


def indent_filter(text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    work = current_work.get()
    text = text if isinstance(text, str) else str(work.read(text))
    work.spend(len(text))
    work.allow(len(text) + (len(text.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


def round_filter(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(value, int | float) or not -20 <= precision <= 20:
        raise TemplateError("round takes a number, and up to 20 digits")
    return do_round(value, precision, method)


def int_filter(value: Any, default: int = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > _MOST_DIGITS:
        raise WorkLimitError(f"it reads a number of more than {_MOST_DIGITS} digits")
    return current_work.get().made(do_int(value, default, base))


@pass_environment
def trim_filter(environment: Any, value: Any, chars: str | None = None) -> str:
    work = current_work.get()
    value = value if isinstance(value, str) else str(work.read(value))
    work.spend(len(value) * (1 + len(chars or "") // 16))
    return do_trim(value, chars)


def json_filter(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize to JSON as transformers does: jinja2's own filter escapes HTML characters."""
    work = current_work.get()
    if not isinstance(value, str | dict | list | tuple):
        value = list(work.counted(value)) if isinstance(value, Iterator) else value
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > _MOST_INDENT or any(len(separator) > _MOST_INDENT for separator in separators or ()):
        raise WorkLimitError(f"indent and separators of tojson may have {_MOST_INDENT} characters")
    items, characters = measured(value, most=work.left)
    work.allow(6 * characters + items * (40 + 10 * width))
    return work.made(  # type: ignore[no-any-return]
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )


def strftime_now(text: str) -> str:
    """Return the current time in a format without padding widths."""
    if len(text) > 1000 or not _PLAIN_TIME.fullmatch(text):
        raise WorkLimitError(f"{text!r:.40} is not a plain format of a time")
    return datetime.now().strftime(text)


def raise_exception(message: Any) -> None:
    """Abort the rendering, for conversations that a chat template rejects."""
    raise TemplateError(str(message))


def dictionary(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class TemplateNamespace(Namespace):
    """Hides its attributes in `repr`: namespaces may be nested exponentially."""

    def __repr__(self) -> str:
        return "<Namespace>"


OWN_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "format": format_filter,
    "indent": indent_filter,
    "int": int_filter,
    "join": join_filter,
    "replace": replace_filter,
    "round": round_filter,
    "tojson": json_filter,
    "trim": trim_filter,
}
OWN_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "dict": dictionary,
    "namespace": TemplateNamespace,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
