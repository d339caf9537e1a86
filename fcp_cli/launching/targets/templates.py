"""Renders the templates in `launchers/`, or custom ones; undefined names raise errors with a line number."""

from __future__ import annotations

import itertools
import math
import shlex
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fcp_cli.errors import UsageError
from fcp_cli.files import shipped
from fcp_cli.reading.documents import read_text
from fcp_cli.words import did_you_mean

if TYPE_CHECKING:
    from fcp_cli.reading.sandbox import Sandbox

SUFFIX = ".j2"


def shipped_template(name: str) -> Path:
    """Return the path of a shipped template."""
    return shipped("launchers") / f"{name}{SUFFIX}"


def render(template: Path, values: Mapping[str, Any]) -> str:
    """Render a template, which may extend or include shipped templates and files in its folder.

    Args:
        template: path of a Jinja template in UTF-8.
        values: template variables by name.

    Raises:
        UsageError: any failure of the template, with its file and line.
    """
    import jinja2

    from fcp_cli.reading.sandbox import MOST_TEMPLATE_BYTES, rendered
    from fcp_cli.reading.work_limits import WorkLimitError

    text = read_text(template, error=UsageError, label="the template ", most_bytes=MOST_TEMPLATE_BYTES)
    try:
        # Compiled under its own path, so that tracebacks contain its line numbers.
        return rendered(_sandbox(template).compiled(text, name=template.name, file=str(template)), values)
    except UsageError:
        raise
    except WorkLimitError as error:
        raise UsageError(f"{_place(error, template)}: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        where = error.filename or str(template)
        raise UsageError(f"{where}, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        raise UsageError(
            f"{_place(error, template)}: there is no template {error.name} to extend or include"
        ) from error
    except jinja2.UndefinedError as error:
        message = str(error.message)  # like: 'jb_name' is undefined
        hint = did_you_mean(message.split("'")[1] if "'" in message else "", values)
        hint = hint or "; docs/reference/templates.md lists the variables of a template"
        raise UsageError(f"{_place(error, template)}: {message}{hint}") from error
    except Exception as error:  # a template is a program, which may raise anything
        raise UsageError(f"{_place(error, template)}: {type(error).__name__}: {error}") from error


def _sandbox(template: Path) -> Sandbox:
    from jinja2 import StrictUndefined

    from fcp_cli.reading.sandbox import Folders, Sandbox

    sandbox = Sandbox(
        loader=Folders((shipped("launchers"), template.parent)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the files are programs and YAML, not web pages; `quote` and `yaml` escape for those
    )
    sandbox.add_filter("quote", lambda value: shlex.quote(str(value)))
    sandbox.add_filter("yaml", yaml_scalar)
    sandbox.add_filter("block", yaml_block)
    sandbox.add_filter("lines", command_lines)
    return sandbox


def command_lines(words: Sequence[str], indent: int) -> str:
    """Format a command over several lines, one option with its value per line, continuations indented by `indent`.

    The words are already quoted.
    """
    lines = [words[0]]
    for before, word in itertools.pairwise(words):
        is_option = word.lstrip("'").startswith("-")
        # Keep an interpreter and its -m together, and an option and its value.
        runs_module = word == "-m" and lines[-1] == before
        if (is_option and not runs_module) or before == "--" or (before.startswith("-") and "=" in before):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return f" \\\n{' ' * indent}".join(lines)


def yaml_scalar(value: Any) -> str:
    """Format a string or number as a YAML scalar on one line; strings are always double-quoted."""
    style = '"' if isinstance(value, str) else None
    text: str = yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def yaml_block(text: str) -> str:
    """Format a multi-line text as a YAML literal block, or quoted if its characters require it."""
    dumped: str = yaml.safe_dump(text, default_style="|", width=math.inf, allow_unicode=True)
    return dumped.removesuffix("\n")


def _place(error: BaseException, template: Path) -> str:
    """Return the innermost template line that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    templates = {str(template.parent), str(shipped("launchers"))}
    found = [frame for frame in frames if str(Path(frame.filename).parent) in templates]
    return f"{found[-1].filename}, line {found[-1].lineno}" if found else str(template)
