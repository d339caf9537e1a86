"""Templates of others reach nothing of Python, and end within their limits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fcp_cli.util.templates import ChatToRender, Renderer, RenderingError, compiled, sandbox
from tests.util.hostile_templates import AMPLIFIERS, ESCAPES

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(cpu_seconds=0.4, memory_bytes=1 << 29)


def render(text: str, **values: Any) -> str:
    from jinja2 import StrictUndefined

    return compiled(sandbox(undefined=StrictUndefined), text).render(values)


@pytest.mark.parametrize(("template", "reason"), ESCAPES.items())
def test_a_template_reaches_nothing_of_python(template: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        render(template)


@pytest.mark.examples(20)
@pytest.mark.lengthy
@pytest.mark.parametrize("template", AMPLIFIERS, ids=range(len(AMPLIFIERS)))
def test_a_template_that_wants_hours_or_gigabytes_ends_within_its_limits(renderer: Renderer, template: str) -> None:
    try:
        ((text, _),) = renderer.render([ChatToRender(template, {})])
    except RenderingError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert len(text) < 3_000_000
    assert renderer.render([ChatToRender("fine", {})])[0].text == "fine"


def test_the_first_failure_of_a_batch_is_named(renderer: Renderer) -> None:
    for template in (
        "{{ 'a' * 10**10 }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ):
        with pytest.raises(RenderingError) as raised:
            renderer.render([ChatToRender("fine", {}), ChatToRender(template, {}), ChatToRender("fine", {})])
        assert raised.value.index == 1
        assert renderer.render([ChatToRender("fine", {})])[0].text == "fine"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(10**5) %}{% for b in range(10**5) %}{% endfor %}{% endfor %}", "more than 0.4 s of CPU"),
        ("{{ 'a' * 10**10 }}", "more than 512 MiB of memory"),
        ("{{ 'a' * 10**7 }}", "makes a text of more than 2,000,"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_refusal_names_the_limit(renderer: Renderer, template: str, reason: str) -> None:
    with pytest.raises(RenderingError, match=reason):
        renderer.render([ChatToRender(template, {})])


def test_a_renderer_whose_process_was_killed_says_so_and_starts_another() -> None:
    renderer = Renderer()
    renderer.render([ChatToRender("fine", {})])
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    with pytest.raises(RenderingError, match="its process ended with status -9"):
        renderer.render([ChatToRender("fine", {})])
    assert renderer.render([ChatToRender("fine", {})])[0].text == "fine"


def test_beginnings_of_a_conversation_are_located() -> None:
    template = "{% for m in messages %}{{ m }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"
    values = {"messages": ["a", "b", "c"], "add_generation_prompt": False}
    cuts = [(0, True), (1, True), (2, False), (2, True)]
    assert Renderer().render([ChatToRender(template, values, cuts)])[0] == ("a b c ", [[0, 0], [3, 3], [4, 3], None])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ ' a '.strip() }}{{ 'a-b'.split('-')[-1] }}", "ab"),
        ("{{ '%d of %s' % (1, 'two') }} {{ '{:>3}'.format(7) }}", "1 of two   7"),
        ("{{ [3, 1]|sort|join(',') }} {{ {'a': [1]}|tojson }}", '1,3 {"a": [1]}'),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% generation %}a{% endgeneration %}{{ 'x' in {'x': 1} }}{{ 'b' not in 'abc' }}", "aTrueFalse"),
        ("{{ strftime_now('%d %b %Y')|length }}{{ 7|round(2) }}{{ '12'|int + 1 }}{{ 2 ** 10 }}", "117131024"),
    ],
)
def test_what_templates_need_is_there(template: str, text: str) -> None:
    assert render(template) == text


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(Exception, match=re.escape("a template may have 256 KiB, and this has more")):
        render("x" * 300_000)
