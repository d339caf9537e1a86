"""The page as its readers open it: in Chromium, light and dark, on a phone and on a wide screen, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli import planning_folder
from tests.report.browser import chromium
from tests.report.runs import make_example_plan, write_run

pytestmark = pytest.mark.browser

PHONE, TABLET, WIDE = 390, 768, 1440
NUM_CHARTS = 15


# Charts that leave the screen, and words that leave their chart, as a legend with many entries may.
_CUT_OFF = """[...document.querySelectorAll(".chart")].flatMap(chart => {
  const box = chart.querySelector("svg").getBoundingClientRect();
  const words = [...chart.querySelectorAll("text")].filter(word => {
    const place = word.getBoundingClientRect();
    return word.textContent && (place.right > box.right + 1 || place.left < box.left - 1);
  });
  return [...(box.right > innerWidth ? [chart.id] : []), ...words.map(word => `${chart.id}: ${word.textContent}`)];
})"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plan and a whole run, with a warning to show."""
    pytest.importorskip("vl_convert", reason="fcp report needs the extra 'report'")
    folder = tmp_path_factory.mktemp("page")
    make_example_plan(folder / "plan.parquet", num_ranks=48)  # degrees for a legend of many entries
    run = write_run(folder / "metrics.jsonl", folder / "plan.parquet")
    run.write_text(run.read_text() + "cut sho")
    result = planning_folder.fcp("report", "plan.parquet", "--metrics", "metrics.jsonl", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@dataclass
class Opened:
    """A page in the browser, and what it printed and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(browser: Any, file: Path, *, width: int = WIDE, theme: str = "light", **options: Any) -> Opened:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, offline=True, **options)
    found = Opened(page=context.new_page())
    found.page.on("console", lambda message: found.complaints.append(message.text))
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(file.as_uri())
    return found


def drawn(page: Any) -> Any:
    page.wait_for_selector("html[data-drawn]")
    return page


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, TABLET, WIDE])
def test_every_chart_is_drawn_in_silence_without_a_network(
    browser: Any, page_file: Path, width: int, theme: str
) -> None:
    found = opened(browser, page_file, width=width, theme=theme)
    page = drawn(found.page)
    assert found.complaints == []
    assert found.requests == [page_file.as_uri()]
    assert page.locator(".chart svg").count() == NUM_CHARTS
    assert page.locator(".failed").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    assert page.evaluate(_CUT_OFF) == [], "words or marks outside their chart"


@pytest.mark.parametrize(("theme", "is_dark"), [("light", False), ("dark", True)])
def test_words_stand_out_from_the_paper_in_both_themes(
    browser: Any, page_file: Path, theme: str, is_dark: bool
) -> None:
    page = drawn(opened(browser, page_file, theme=theme).page)
    paper = _luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (paper < 0.1) == is_dark
    inks = page.evaluate(
        "['h1', 'p', 'dt', 'dd', '.warning', '.chart text'].map(s => getComputedStyle(document.querySelector(s)))"
        ".map(style => style.fill !== 'rgb(0, 0, 0)' ? style.fill : style.color)"
    )
    for ink in map(_luminance, inks):
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5  # WCAG AA


def _luminance(colour: str) -> float:
    """Relative luminance of "rgb(r, g, b)" as WCAG defines it."""
    shares = [int(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3]]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


_GANTT = ("chart-gantt", "chart-measured")
_MARKS = "charts => charts.map(chart => document.querySelector(`#${chart} svg .mark-rect`)?.innerHTML)"
_TICKS = "charts => charts.map(chart => document.querySelector(`#${chart} svg .role-axis-label`)?.textContent)"


def drawn_for_another_step(page: Any, button: str) -> None:
    """Click, and wait until both Gantt charts show something else: they are drawn one after the other."""
    before = page.evaluate(_MARKS, list(_GANTT))
    page.click(button)
    page.wait_for_function(
        f"([charts, old]) => ({_MARKS})(charts).every((mark, i) => mark && mark !== old[i])",
        arg=[list(_GANTT), before],
    )


def test_another_step_can_be_chosen_for_both_gantt_charts_at_once(browser: Any, page_file: Path) -> None:
    page = drawn(opened(browser, page_file).page)
    before = page.evaluate(_MARKS, list(_GANTT))
    drawn_for_another_step(page, "#next")
    drawn_for_another_step(page, "#previous")
    assert page.evaluate(_MARKS, list(_GANTT)) == before


def test_planned_and_measured_charts_have_one_time_axis(browser: Any, page_file: Path) -> None:
    page = drawn(opened(browser, page_file).page)
    for _ in range(2):
        planned, measured = page.evaluate(_TICKS, list(_GANTT))
        assert planned and planned == measured
        drawn_for_another_step(page, "#next")


def test_without_javascript_the_figures_stay(browser: Any, page_file: Path) -> None:
    page = opened(browser, page_file, java_script_enabled=False).page
    assert page.locator("tr").count() >= 10
    assert page.locator("noscript p").is_visible()


def test_on_paper_it_is_light_and_has_no_buttons(browser: Any, page_file: Path) -> None:
    page = drawn(opened(browser, page_file, theme="dark").page)
    page.emulate_media(media="print")
    assert _luminance(page.evaluate("getComputedStyle(document.body).color")) < 0.5
    assert not page.locator("#next").is_visible()
    assert len(page.pdf()) > 10_000
