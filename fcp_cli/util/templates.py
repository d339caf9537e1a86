"""Sandboxed jinja2 environment for foreign templates: launch templates and chat templates of checkpoints.

No Python object is reachable beyond an allowlist of attributes, functions, filters, tests and callables. All work is
counted by the operations that jinja2 compiles a template into, through its hooks `code_generator_class`, `finalize`,
`concat`, `call` and `call_binop`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Final

from jinja2 import (
    BaseLoader,
    Environment,
    Template,
    TemplateError,
    TemplateNotFound,
    TemplateSyntaxError,
    nodes,
    pass_environment,
    pass_eval_context,
)
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_int, do_join, do_replace, do_round, do_trim
from jinja2.loaders import split_template_path
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from fcp_cli.errors import UsageError
from fcp_cli.util.inputs import read_text

# Filters, methods and functions for templates, whose work is counted before it is done.


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


# Counts the work of a template: characters, items, loop iterations, calls.
#
# A sandbox does not limit time and memory: `"a" * 10**10` is harmless Python. Counts are deterministic and the same
# on every machine, so that ranks agree on whether a row is rejected.

# Rendering may take some twenty passes over a conversation; no template needs ten times that.
WORK_BASE: Final = 5_000_000
WORK_PER_UNIT: Final = 200
VALUE_BASE: Final = 2_000_000
VALUE_PER_UNIT: Final = 16
ITERATION: Final = 20
CALL: Final = 40
ITEM: Final = 16
MOST_DEPTH: Final = 100
MOST_BITS: Final = 4096

_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_SEQUENCES: Final = (list, tuple, set, frozenset, *_VIEWS)


class WorkLimitError(Exception):
    """A template does too much work or creates too large a value for its input."""


class RenderingLimit:
    """Work budget of a rendering.

    Args:
        given: values of the template; the budget grows with their size.
    """

    __slots__ = ("left", "most")

    def __init__(self, given: Any) -> None:
        items, characters = measured(given, most=1 << 40)
        self.left = WORK_BASE + WORK_PER_UNIT * (items + characters)
        self.most = VALUE_BASE + VALUE_PER_UNIT * (items + characters)

    def spend(self, units: int) -> None:
        """Spend work units; raise WorkLimitError if none are left."""
        self.left -= units
        if self.left < 0:
            raise WorkLimitError("it takes too much work: loops too often, or over too much text")

    def read(self, value: Any) -> Any:
        """Count a value with all nested items and characters as work, and return it."""
        kind = type(value)
        if kind is str:
            self.spend(len(value))
        elif kind is not bool and value is not None:
            items, characters = measured(value, most=self.left)
            self.spend(ITEM * items + characters)
        return value

    def allow(self, size: int) -> None:
        """Count a value of `size` characters and items before creating it."""
        self.fit(size)
        self.spend(size)

    def fit(self, size: int) -> None:
        if size > self.most:
            raise WorkLimitError(f"it makes a text or list of more than {self.most:,} characters")

    def allow_bits(self, bits: int) -> None:
        if bits > MOST_BITS:
            raise WorkLimitError(f"it makes a number of more than {MOST_BITS} bits")

    def made(self, value: Any) -> Any:
        """Count a new value and return it; items of an iterator are counted when taken."""
        kind = type(value)
        if kind is str:
            self.allow(len(value))
        elif kind is int:
            self.allow_bits(value.bit_length())
        elif isinstance(value, (str, dict, *_SEQUENCES)):
            items, characters = measured(value, most=self.most)
            self.spend(ITEM * items)
            self.fit(items + characters)
        elif isinstance(value, Iterator):
            return self.counted(value)
        return value

    def counted(self, values: Iterable[Any], cost: int = ITERATION) -> Iterator[Any]:
        """Yield values, spending `cost` for each."""
        for value in values:
            self.spend(cost)
            yield value


class CountedLoop:
    """Iterable for a `for` loop that counts iterations; has a length if `values` has."""

    __slots__ = ("cost", "values", "work")

    def __init__(self, values: Any, work: RenderingLimit, cost: int) -> None:
        self.values, self.work, self.cost = values, work, cost

    def __iter__(self) -> Iterator[Any]:
        return self.work.counted(self.values, self.cost)

    def __len__(self) -> int:
        return len(self.values)


def measured(value: Any, *, most: int) -> tuple[int, int]:
    """Return (items, characters) of a value, counting shared parts at every occurrence.

    Stops soon after the sum exceeds `most`, so that values with shared parts cost no more than that.
    """
    items, characters = 0, 0
    waiting: list[tuple[Any, int]] = [((value,), 0)]
    while waiting:
        holder, depth = waiting.pop()
        if depth > MOST_DEPTH:
            raise WorkLimitError(f"it nests lists more than {MOST_DEPTH} deep")
        for inner in holder:
            items += 1
            if isinstance(inner, str):
                characters += len(inner)
            elif isinstance(inner, dict):
                waiting.append((inner.keys(), depth + 1))
                waiting.append((inner.values(), depth + 1))
            elif isinstance(inner, _SEQUENCES):
                waiting.append((inner, depth + 1))
            elif isinstance(inner, range):
                items += len(inner)
            elif isinstance(inner, int):
                characters += inner.bit_length() >> 2
        if items + characters > most:
            break
    return items, characters


MOST_TEMPLATE_BYTES: Final = 1 << 18
_FILE: Final = 50_000  # work units per file: allows a few hundred files

_ATTRIBUTES: Final[tuple[tuple[Any, frozenset[str]], ...]] = (
    (str, TEXT_METHODS),
    (dict, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, type(None), type, range, type({}.keys()), type({}.values()), type({}.items())), frozenset()),
)
_CALLABLE: Final = (BlockReference, LoopContext, Macro, Undefined, TextFormat)


class _MeteredCode(CodeGenerator):
    """Compiles templates so that loops, comparisons, slices and literals count work."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        data = (text for part in node.body for text in (part, *part.find_all(nodes.TemplateData)))
        cost = ITERATION + sum(len(text.data) for text in data if isinstance(text, nodes.TemplateData))
        looped = nodes.EnvironmentAttribute("looped")
        node.iter = nodes.Call(looped, [node.iter, nodes.Const(cost)], [], None, None)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._visit_operand("compared", node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._visit_operand("searched" if operand.op in ("in", "notin") else "compared", operand.expr, frame)
        self.write(")")

    def _visit_operand(self, method: str, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):
            self.visit(node, frame)
        else:
            self._visit_in(method, self.visit, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._visit_in("sliced", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._visit_in("made", super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._visit_in("made", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._visit_in("made", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _visit_in(self, method: str, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write(f"environment.{method}(")
        visit(node, frame)
        self.write(")")


class _Generation(Extension):
    """Parses `{% generation %}`, with which transformers marks assistant tokens; renders its content."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


@pass_environment  # prevents constant folding
def _finalized(environment: Environment, value: Any) -> Any:
    """Count a value before converting it to text."""
    return value if type(value) is str else current_work.get().read(value)


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment for foreign templates; `settings` are jinja2's environment settings."""

    code_generator_class = _MeteredCode
    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("+", "*", "**", "%"))  # type: ignore[misc]

    def __init__(self, **settings: Any) -> None:
        # No optimizer: it would fold constants before work is counted.
        super().__init__(
            optimized=False,
            finalize=_finalized,
            cache_size=0,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            **settings,
        )
        filters: dict[str, Any] = self.filters
        tests: dict[str, Any] = self.tests
        self.filters = {name: lazy(filters[name]) for name in LAZY_FILTERS}
        self.filters |= {name: reading(filters[name]) for name in READING_FILTERS}
        self.filters |= {name: sorting(filters[name]) for name in SORTING_FILTERS}
        self.filters |= OWN_FILTERS
        self.tests = {name: tests[name] for name in SIMPLE_TESTS}
        self.tests |= {name: reading(tests[name]) for name in READING_TESTS}
        self.tests |= {name: of_numbers(tests[name]) for name in NUMBER_TESTS}
        self.globals = {"range": self.globals["range"], **OWN_FUNCTIONS}

    def add_filter(self, name: str, function: Callable[..., str]) -> None:
        """Add a filter that reads its arguments once."""
        self.filters[name] = reading(function)

    def compiled(self, text: str, *, name: str = "template", file: str | None = None) -> Template:
        """Compile a template."""
        if len(text) > MOST_TEMPLATE_BYTES:
            raise TemplateSyntaxError(f"a template may have {MOST_TEMPLATE_BYTES >> 10} KiB, and this has more", 1)
        with limited_work(None):
            code = self.compile(text, name=name, filename=file)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def concat(self, pieces: Iterable[str]) -> str:
        work, size, taken = current_work.get(), 0, []
        for piece in pieces:
            size += len(piece)
            work.spend(1 + len(piece))
            work.fit(size)
            taken.append(piece)
        return "".join(taken)

    @staticmethod
    def looped(values: Any, cost: int = ITERATION) -> CountedLoop:
        return CountedLoop(values, current_work.get(), cost)

    @staticmethod
    def joined(context: Context, values: tuple[Any, ...]) -> str:
        work = current_work.get()
        for value in values:
            work.read(value)
        text: str = work.made(markup_join(values) if context.eval_ctx.autoescape else str_join(values))
        return text

    @staticmethod
    def compared(value: Any) -> Any:
        return current_work.get().read(value)

    @staticmethod
    def searched(value: Any) -> Any:
        return value if isinstance(value, dict) else current_work.get().read(value)

    @staticmethod
    def sliced(value: Any) -> Any:
        current_work.get().spend(len(value))
        return value

    @staticmethod
    def made(value: Any) -> Any:
        return current_work.get().made(value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, int):
            current_work.get().read(argument)  # hashed
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        work = current_work.get()
        if operator == "%" and isinstance(left, str):
            return percent(left, right)
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, str | list | tuple) and isinstance(times, int):
                    work.allow(len(one) * max(times, 0))
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            work.allow_bits(left.bit_length() * max(right, 0))
        return work.made(self.binop_table[operator](left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((names for kind, names in _ATTRIBUTES if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) if allowed is None else attr in allowed

    def wrap_str_format(self, value: Any) -> Any:
        text = getattr(value, "__self__", None)
        return TextFormat(self, text) if isinstance(text, str) and value.__name__ == "format" else None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Parameter names that no keyword argument of a template can match.
        work = current_work.get()
        work.spend(CALL + len(args) + len(kwargs))
        for name in ("_block_vars", "_loop_vars"):  # only for functions that take a context, which none here does
            kwargs.pop(name, None)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            return call_text_method(owner, __obj, args, kwargs)
        if isinstance(owner, dict | list | tuple):
            work.read((args, kwargs, () if isinstance(owner, dict) else owner))
        elif isinstance(__obj, LoopContext):
            args = tuple(__self.looped(values) for values in args)
        elif isinstance(owner, LoopContext) or __obj in OWN_FUNCTIONS.values():
            work.read((args, kwargs))
        elif not (isinstance(__obj, _CALLABLE) or __obj in (__self.globals["range"], __self.looped)):
            raise SecurityError(f"a template cannot call a {type(__obj).__name__}")
        return work.made(__context.call(__obj, *args, **kwargs))


def rendered(template: Template, values: Mapping[str, Any]) -> str:
    """Render a sandboxed template; the work limit grows with the size of the values."""
    with limited_work(dict(values)):
        return template.render(values)


class Folders(BaseLoader):
    """Loads included and extended templates from the first of `folders` that has them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def get_source(self, environment: Environment, template: str) -> tuple[str, str, None]:
        """Read a template; raise TemplateNotFound also for names outside the folders."""
        current_work.get().spend(_FILE)
        for folder in self._folders:
            file = folder.joinpath(*split_template_path(template))
            if file.is_file():
                return (
                    read_text(file, error=UsageError, label="the template ", most_bytes=MOST_TEMPLATE_BYTES),
                    str(file),
                    None,
                )
        raise TemplateNotFound(template)
