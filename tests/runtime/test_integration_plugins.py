"""Integrations of other packages: their hooks run when their framework is imported, and break nothing else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcp_cli.errors import PluginError
from fcp_cli.runtime.inject import HOOKS, REGISTRY, after_import, hooks
from tests.plugin_packages import install

HOOK = "def hook(module):\n    module.train = lambda: 'by the plan'\n"


@pytest.fixture(autouse=True)
def _finders() -> Iterator[None]:
    """Keep the finders of a test to itself."""
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


def with_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Install a framework, and a package that hooks it."""
    install(tmp_path, monkeypatch, "loop-of-others", text="def train(): return 'alone'\n", group="x", entries={})
    entries = {"loop_of_others": "fcp_loop:hook"}
    install(tmp_path, monkeypatch, "fcp-loop", text=text, group="fcp.integrations", entries=entries)


def test_a_package_hooks_a_framework_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_framework(tmp_path, monkeypatch, HOOK)
    after_import(hooks())
    assert "fcp_loop" not in sys.modules
    assert importlib.import_module("loop_of_others").train() == "by the plan"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import no_such_library\n", "cannot be imported from fcp_loop:hook: ModuleNotFoundError: "),
        ("hook = 3\n", "failed at fcp_loop:hook: TypeError: 'int' object is not callable"),
        ("def hook(module): 1 / 0\n", "failed at fcp_loop:hook: ZeroDivisionError: "),
    ],
)
def test_a_broken_hook_is_one_line_that_names_its_package(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_framework(tmp_path, monkeypatch, text)
    after_import(hooks())
    with pytest.raises(PluginError) as error:
        importlib.import_module("loop_of_others")
    assert str(error.value).startswith(f"integration loop_of_others of the package fcp-loop 2.5 {fault}")
    assert "\n" not in str(error.value)


def test_no_package_replaces_a_hook_of_fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = dict.fromkeys(HOOKS, "fcp_thief:hook")
    install(tmp_path, monkeypatch, "fcp-thief", text=HOOK, group="fcp.integrations", entries=entries)
    assert set(hooks()) == set(HOOKS)
    assert len(REGISTRY.ignored()) == len(HOOKS)
