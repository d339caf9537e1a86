"""The documentation holds: its links lead somewhere, and the table of folders is the tree's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.hooks.reference import command_entries

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fcp_cli"
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
# Pages of the site that are written from the commands' options when it is built.
GENERATED = {ROOT / "docs/reference/commands" / f"{(*entry.words, 'fcp')[0]}.md" for entry in command_entries()}
# Of the tree or, as the architecture names them, of the package.
_FILE = re.compile(
    r"`((?:benchmarks|examples|fcp_cli|launchers|plan|planning|profiles|runtime|tests)/[\w./*-]+)(?:::\w+)?`"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_documentation_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith(("http://", "https://"))]
    assert [link for link in local if not _leads_somewhere(page, link)] == []


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = page.parent / path if path else page
    return target.resolve() in GENERATED or (target.exists() and (not heading or heading in _headings(target)))


def _headings(page: Path) -> set[str]:
    """Return the headings as links name them: lower case, dashes for spaces, no other marks."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = _FILE.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if not any(any(folder.glob(name)) for folder in (ROOT, PACKAGE))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_includes_a_file_and_not_its_garbled_mark(page: Path) -> None:
    # The formatter takes the mark in a block of ```python for an expression; in ``` {.python} it leaves it alone.
    marks = [line.strip() for line in page.read_text(encoding="utf-8").splitlines() if re.match(r"\s*--8\s*<", line)]
    assert [mark for mark in marks if not re.fullmatch(r'--8<-- "[^"]+"', mark)] == []


def test_the_readme_can_be_read_in_a_minute_or_two() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 90 and max(map(len, lines)) <= 160
