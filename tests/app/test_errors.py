"""What errors say beside their own words."""

from __future__ import annotations

import pytest

from fcp_cli.errors import RunError

ERROR = RunError("write a loop of your own (docs/how-to/training-loop.md, torchtune)")


def test_a_page_of_the_documentation_is_named_as_it_lies_in_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCP_DOCS_URL", raising=False)
    assert str(ERROR) == "write a loop of your own (docs/how-to/training-loop.md, torchtune)"


def test_a_page_of_the_documentation_is_named_on_the_site_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCP_DOCS_URL", "https://docs.example.org/fcp/")
    assert f"{ERROR}" == "write a loop of your own (https://docs.example.org/fcp/how-to/training-loop.html, torchtune)"
