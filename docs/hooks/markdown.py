"""The Markdown of every page at its address with .md, and `llms.txt`, which lists them: programs read those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

_texts: dict[str, str] = {}
_lines: list[str] = []


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> None:
    """Keep the text of a page; snippets and the directives of mkdocstrings stay as they are written."""
    _texts[page.file.src_uri] = markdown


def on_nav(nav: Navigation, **_: Any) -> None:
    """Keep the order and the headings of the pages."""
    _texts.clear()
    _lines.clear()
    _list(nav.items)


def _list(items: list[Any], heading: str = "Start") -> None:
    pages = [item for item in items if item.is_page]
    if pages:
        _lines.append(f"\n## {heading}\n")
        _lines.extend(f"- [{page.title}]({page.file.src_uri})" for page in pages)
    for section in items:
        if section.is_section:
            _list(section.children, section.title if heading == "Start" else f"{heading}: {section.title}")


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Write the pages and the list."""
    site = Path(config.site_dir)
    for name, text in _texts.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    (site / "llms.txt").write_text(head + "\n".join(_lines) + "\n", encoding="utf-8")
