"""Sandboxed jinja2 environment for foreign templates: launch templates and chat templates of checkpoints.

No Python object is reachable beyond an allowlist of attributes, functions, filters, tests and callables. All work is
counted by the operations that jinja2 compiles a template into, through its hooks `code_generator_class`, `finalize`,
`concat`, `call` and `call_binop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from jinja2 import (
    BaseLoader,
    Environment,
    Template,
    TemplateNotFound,
    TemplateSyntaxError,
    nodes,
    pass_environment,
)
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.loaders import split_template_path
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fcp_cli.errors import UsageError
from fcp_cli.reading import template_functions as functions
from fcp_cli.reading.documents import read_text
from fcp_cli.reading.template_functions import current_work, limited_work
from fcp_cli.reading.work_limits import CALL, ITERATION, CountedLoop

MOST_TEMPLATE_BYTES: Final = 1 << 18
_FILE: Final = 50_000  # work units per file: allows a few hundred files

_ATTRIBUTES: Final[tuple[tuple[Any, frozenset[str]], ...]] = (
    (str, functions.TEXT_METHODS),
    (dict, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, type(None), type, range, type({}.keys()), type({}.values()), type({}.items())), frozenset()),
)
_CALLABLE: Final = (BlockReference, LoopContext, Macro, Undefined, functions.TextFormat)


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
        self.filters = {name: functions.lazy(filters[name]) for name in functions.LAZY_FILTERS}
        self.filters |= {name: functions.reading(filters[name]) for name in functions.READING_FILTERS}
        self.filters |= {name: functions.sorting(filters[name]) for name in functions.SORTING_FILTERS}
        self.filters |= functions.OWN_FILTERS
        self.tests = {name: tests[name] for name in functions.SIMPLE_TESTS}
        self.tests |= {name: functions.reading(tests[name]) for name in functions.READING_TESTS}
        self.tests |= {name: functions.of_numbers(tests[name]) for name in functions.NUMBER_TESTS}
        self.globals = {"range": self.globals["range"], **functions.OWN_FUNCTIONS}

    def add_filter(self, name: str, function: Callable[..., str]) -> None:
        """Add a filter that reads its arguments once."""
        self.filters[name] = functions.reading(function)

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
            return functions.percent(left, right)
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
        return functions.TextFormat(self, text) if isinstance(text, str) and value.__name__ == "format" else None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Parameter names that no keyword argument of a template can match.
        work = current_work.get()
        work.spend(CALL + len(args) + len(kwargs))
        for name in ("_block_vars", "_loop_vars"):  # only for functions that take a context, which none here does
            kwargs.pop(name, None)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            return functions.call_text_method(owner, __obj, args, kwargs)
        if isinstance(owner, dict | list | tuple):
            work.read((args, kwargs, () if isinstance(owner, dict) else owner))
        elif isinstance(__obj, LoopContext):
            args = tuple(__self.looped(values) for values in args)
        elif isinstance(owner, LoopContext) or __obj in functions.OWN_FUNCTIONS.values():
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
