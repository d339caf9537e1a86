from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fcp_cli.runtime.inject import after_import


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`hooked_package`, which imports a name of its module `inner` as frameworks do."""
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from .inner import answer\n")
    (folder / "inner.py").write_text("def answer():\n    return 41\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "hooked_package"
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def improve(module: ModuleType) -> None:
    module.answer = lambda: 42  # type: ignore[attr-defined]


def test_a_hook_comes_before_whoever_imports_a_name_from_the_module(package: str) -> None:
    after_import({f"{package}.inner": improve})
    assert f"{package}.inner" not in sys.modules
    assert importlib.import_module(package).answer() == 42


def test_a_look_for_the_module_without_an_import_leaves_the_hook(package: str) -> None:
    """As transformers looks for what it may use."""
    after_import({package: improve})
    assert importlib.util.find_spec(package) is not None
    assert importlib.import_module(package).answer() == 42


def test_a_module_that_was_imported_before_is_hooked_at_once(package: str) -> None:
    inner = importlib.import_module(f"{package}.inner")
    after_import({f"{package}.inner": improve})
    assert inner.answer() == 42


def test_a_hooked_module_keeps_its_own_loader_and_its_source(package: str) -> None:
    plain = importlib.import_module(package)
    after_import({f"{package}.inner": lambda module: None})
    del sys.modules[f"{package}.inner"]
    inner = importlib.import_module(f"{package}.inner")
    assert type(inner.__loader__) is type(plain.__loader__)
    assert inner.__spec__ is not None and inner.__spec__.loader is inner.__loader__
    assert "return 41" in inspect.getsource(inner.answer)


def test_a_module_that_does_not_exist_still_cannot_be_imported(package: str) -> None:
    after_import({f"{package}.missing": improve})
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hooked_package.missing'"):
        importlib.import_module(f"{package}.missing")
