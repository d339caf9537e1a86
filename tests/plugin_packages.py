"""Packages with entry points, put on the path as pip would have installed them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, *, text: str, group: str, entries: Mapping[str, str]
) -> Path:
    """Install version 2.5 of a package, whose one module has its name with underscores, for the rest of the test.

    Returns:
        The folder of its module.
    """
    module, site = package.replace("-", "_"), folder / f"site-{package}"
    metadata = site / f"{module}-2.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.5\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{lines}", encoding="utf-8")
    (site / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return site
