"""The documentation's site builds without a warning, offline, and shows every command."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.hooks.reference import command_entries

pytestmark = pytest.mark.processes
pytest.importorskip("mkdocs", reason="the site needs the dependency group 'docs'")

ROOT = Path(__file__).parents[2]
# Loaded by the page itself; links that a reader follows may lead anywhere.
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"?(?P<address>https?://[^\">\s]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site's folder."""
    folder = tmp_path_factory.mktemp("site")
    # A proxy where nothing listens: whatever asked for the network would fail.
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "NO_MKDOCS_2_WARNING": "1"}
    environment = {**os.environ, **offline, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = {
        (page.name, found["address"])
        for page in site.rglob("*.html")
        for found in _LOADED.finditer(page.read_text(encoding="utf-8"))
    }
    assert loaded == set()


def test_every_option_of_every_command_has_its_line_in_the_reference(site: Path) -> None:
    for entry in command_entries():
        page = (site / "reference" / "commands" / f"{(*entry.words, 'fcp')[0]}.html").read_text(encoding="utf-8")
        flags = {flag for option in entry.options for flag in option.flags}
        assert {flag for flag in flags if f"<code>{flag}</code>" not in page} == set()


def test_the_public_runtime_is_documented_without_being_imported(site: Path) -> None:
    page = (site / "reference" / "runtime.html").read_text(encoding="utf-8")
    for name in ("steps", "start", "attention", "Session", "Step"):
        assert f'id="fcp_cli.runtime.{name}"' in page


def test_every_page_lies_there_as_markdown_and_is_in_the_list(site: Path) -> None:
    listed = set(re.findall(r"\]\(([^)]+\.md)\)", (site / "llms.txt").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(site).with_suffix(".md")) for page in site.rglob("*.html")} - {"404.md"}
    assert listed == pages
    assert "changelog.md" in listed
    assert all((site / name).read_text(encoding="utf-8").strip() for name in listed)
    assert (site / "how-to/plan.md").read_text(encoding="utf-8") == (ROOT / "docs/how-to/plan.md").read_text("utf-8")
