"""The Chromium of this machine, headless and without a network, for what only a browser can show."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str:
    """Where Chromium is; skips the test where there is none."""
    pytest.importorskip("playwright", reason="needs the dependency group 'browser': make browser")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium on the PATH: apt install chromium")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser, closed at the end; skips the test where it cannot be had."""
    path = chromium_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without a sandbox: it needs a kernel right that containers withhold, and all pages here are our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
