"""Templates of others reach nothing of the machine, and end within their limits."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.util.templates import Sandbox, rendered
from tests.util.hostile_templates import AMPLIFIERS, ESCAPES


class Given:
    """A value of fcp's own that a template must not call."""

    called = False

    def __call__(self) -> None:
        Given.called = True

    def keep(self, _value: object) -> None:
        Given.called = True


def render(text: str, **values: Any) -> str:
    from jinja2 import StrictUndefined

    return rendered(Sandbox(undefined=StrictUndefined).compiled(text), values)


@pytest.mark.parametrize(("template", "reason"), ESCAPES.items())
def test_a_template_reaches_nothing_of_python(template: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        render(template, given=Given())
    assert not Given.called


@pytest.mark.lengthy
@pytest.mark.parametrize(("template", "reason"), AMPLIFIERS.items(), ids=range(len(AMPLIFIERS)))
def test_a_template_that_wants_hours_or_gigabytes_is_refused(template: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason) as raised:
        render(template)
    assert not isinstance(raised.value, MemoryError)


@pytest.mark.processes
def test_all_hostile_templates_together_fit_little_memory_and_time() -> None:
    program = """if True:
        from fcp_cli.util.templates import Sandbox, rendered
        from tests.util.hostile_templates import AMPLIFIERS
        for template in AMPLIFIERS:
            try:
                rendered(Sandbox().compiled(template), {})
            except MemoryError:
                raise SystemExit(template)
            except Exception:
                continue
    """
    limits = ((resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_CPU, 300))

    def limit() -> None:
        for kind, most in limits:
            resource.setrlimit(kind, (most, most))

    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=limit,
        cwd=Path(__file__).parents[2],
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ ' a '.strip() }}{{ 'a-b'.split('-')[-1] }}", "ab"),
        ("{{ '%d of %s' % (1, 'two') }} {{ '{:>3}'.format(7) }}", "1 of two   7"),
        ("{{ [3, 1]|sort|join(',') }} {{ {'a': [1]}|tojson }}", '1,3 {"a": [1]}'),
        ("{% for x in 'abc' if x != 'b' %}{{ loop.index }}{{ x }}{{ loop.length }}{% endfor %}", "1a22c2"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% set ns = namespace(n=0) %}{% for x in range(5) %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}", "10"),
        ("{% macro m(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call m(1) %}2{% endcall %}", "<12>"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ dict(a=1).get('a') }}{{ {'items': 2}['items'] }}{{ [1, 2, 3][1:]|length }}", "122"),
        ("{% generation %}a{% endgeneration %}{{ 'x' in {'x': 1} }}{{ 'b' not in 'abc' }}", "aTrueFalse"),
        ("{{ strftime_now('%d %b %Y')|length }}{{ 7|round(2) }}{{ '12'|int + 1 }}{{ 2 ** 10 }}", "117131024"),
        ("{{ [{'r': 'u'}, {'r': 'a'}]|selectattr('r', 'equalto', 'a')|list|length }}{{ 4 is even }}", "1True"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|replace('a', 'b') }}{{ 'a\nb'|indent(2) }}", "b1a\n  b"),
    ],
)
def test_what_templates_need_is_there(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.lengthy
def test_long_conversations_may_take_more_work() -> None:
    turns = [{"role": "user", "content": "word " * 200} for _ in range(1000)]
    every_pair = "{% for a in turns %}{% for b in turns[loop.index:] %}{% if a.role == b.role %}x{% endif %}{% endfor %}{% endfor %}"
    assert len(render(every_pair, turns=turns)) == 1000 * 999 // 2
    with pytest.raises(Exception, match="too much work"):
        render(every_pair.replace("turns", "range(1000)").replace(".role", ""))


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(Exception, match=re.escape("a template may have 256 KiB, and this has more")):
        render("x" * 300_000)


def test_the_documentation_lists_filters_and_functions() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/templates.md").read_text(encoding="utf-8")
    rows = {
        row.split("|")[1].strip(): set(re.findall("`([a-z_]+)`", row)) for row in text.splitlines() if row[:1] == "|"
    }
    sandbox = Sandbox()
    assert rows["filters"] == set(sandbox.filters)
    assert rows["functions"] == set(sandbox.globals)
