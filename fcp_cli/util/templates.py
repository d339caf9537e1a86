"""Sandboxed jinja2 templates: launch templates of a site, and chat templates of checkpoints, which are foreign code.

The sandbox keeps templates from Python's internals, but limits neither time nor memory: `"a" * 10**10` is harmless
Python. Chat templates are therefore rendered in a separate process that has limits.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, Final, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fcp_cli.util.words import first_line

MOST_TEMPLATE_BYTES: Final = 1 << 18

# Limits of a rendering; they grow with the size of its values, so that no genuine conversation meets them.
_CPU_SECONDS_PER_BYTE: Final = 1e-6
_MEMORY_PER_BYTE: Final = 32
_CHARACTERS: Final = 2_000_000
_CHARACTERS_PER_BYTE: Final = 16


class _Generation(Extension):
    """Parses `{% generation %}`, with which transformers marks assistant tokens; renders its content."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def sandbox(**settings: Any) -> ImmutableSandboxedEnvironment:
    """Return an environment like that of transformers; `settings` are jinja2's environment settings."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], **settings
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda text: datetime.now().strftime(text),
    }
    return environment


def compiled(
    environment: ImmutableSandboxedEnvironment, text: str, *, name: str = "template", file: str | None = None
) -> Template:
    """Compile a template; tracebacks show the lines of `file`."""
    if len(text) > MOST_TEMPLATE_BYTES:
        raise TemplateSyntaxError(f"a template may have {MOST_TEMPLATE_BYTES >> 10} KiB, and this has more", 1)
    return Template.from_code(
        environment, environment.compile(text, name=name, filename=file), environment.make_globals(None)
    )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Serialize to JSON as transformers does: jinja2's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


class RenderingError(Exception):
    """A template failed or exceeded a limit.

    Attributes:
        index: position of the failed conversation in its batch.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class ChatToRender(NamedTuple):
    """A conversation to render.

    Attributes:
        template: the chat template.
        values: its variables, among them the turns, `messages`.
        cuts: (number of turns, whether the generation prompt follows) of beginnings to locate in the text.
    """

    template: str
    values: Mapping[str, Any]
    cuts: Sequence[tuple[int, bool]] = ()


class RenderedChat(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: its text.
        ends: for each cut, its length in the text with and without trailing white space; None if the text does not
            begin like the cut.
    """

    text: str
    ends: Sequence[tuple[int, int] | None]


class Renderer:
    """Renders chat templates in a child process, which limits their CPU time, memory and text.

    The process starts at the first rendering, and again after a limit ended it. Not thread-safe.

    Args:
        cpu_seconds: limit on the CPU time of a rendering of a short conversation.
        memory_bytes: limit on the address space of the process for a short conversation.
    """

    def __init__(self, *, cpu_seconds: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        self._cpu_seconds, self._memory_bytes = cpu_seconds, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, batch: Sequence[ChatToRender]) -> list[RenderedChat]:
        """Render conversations in order.

        Raises:
            RenderingError: the first conversation that failed; those after it are not rendered.
        """
        process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        found: list[RenderedChat] = []
        try:
            # Pickled one by one: the size of each gives its limits.
            pickle.dump([pickle.dumps(tuple(one)) for one in batch], process.stdin)
            process.stdin.flush()
            while len(found) < len(batch) and (answer := process.stdout.readline()):
                text, ends, reason = json.loads(answer)
                if reason:
                    raise RenderingError(len(found), reason)
                found.append(RenderedChat(text, ends))
            if len(found) < len(batch):
                raise BrokenPipeError
        except RenderingError:
            raise
        except BrokenPipeError:  # a limit ended the process
            self._process = None
            self._end()
            raise RenderingError(len(found), self._fate(process.returncode)) from None
        except BaseException:  # such as Ctrl-C: answers not read would be taken for those of the next batch
            self._process = None
            process.kill()
            self._end()
            raise
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        from fcp_cli.util.pool import without_interrupts

        serving = f"serve({self._cpu_seconds}, {self._memory_bytes})"
        program = f"import sys; sys.path[:] = {sys.path!r}; from fcp_cli.util.templates import serve; {serving}"
        with without_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def _fate(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"it takes more than {self._cpu_seconds:g} s of CPU time"
        return f"its process ended with status {status}, perhaps for lack of memory"


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()  # an idle process ends by itself
    process.stdout.close()
    process.wait()


def serve(cpu_seconds: float, memory_bytes: int) -> None:
    """Render batches from standard input until it closes; write a line with [text, ends, reason] for each."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        for one in batch:
            memory = memory_bytes + _MEMORY_PER_BYTE * len(one)
            resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
            try:
                answer = [*_rendered(one, cpu_seconds + _CPU_SECONDS_PER_BYTE * len(one)), ""]
            except MemoryError:
                answer = ["", [], f"it takes more than {memory >> 20:,} MiB of memory"]
            except Exception as error:  # templates raise any exception
                answer = ["", [], first_line(error)]
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
            if answer[-1]:
                break


def _rendered(pickled: bytes, cpu_seconds: float) -> tuple[str, list[tuple[int, int] | None]]:
    template, values, cuts = pickle.loads(pickled)
    most = _CHARACTERS + _CHARACTERS_PER_BYTE * len(pickled)

    def render(**changes: Any) -> str:
        # The signal has no handler and ends the process, even within a long operation in C.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            text = _chat_template(template).render(values, **changes)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > most:
            raise TemplateError(f"it makes a text of more than {most:,} characters")
        return text

    text, ends = render(), list[tuple[int, int] | None]()
    for turns, prompts in cuts:
        start = render(messages=values["messages"][:turns], add_generation_prompt=prompts) if turns else ""
        ends.append((len(start), len(start.rstrip())) if text.startswith(start) else None)
    return text, ends


@lru_cache(maxsize=8)
def _chat_template(text: str) -> Template:
    return compiled(sandbox(), text)
