"""Call a function right after a module is imported, by anyone at any time, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]


def after_import(hooks: Mapping[str, Hook]) -> None:
    """Call each hook with its module once the module's code has run, before its importer gets it.

    `from module import name` therefore already returns the hook's value. Modules that are already imported are hooked
    immediately.
    """
    waiting = dict(hooks)
    for name in hooks:
        module = sys.modules.get(name)
        if module is not None:
            waiting.pop(name)(module)
    sys.meta_path.insert(0, _HookingFinder(waiting))


class _HookingFinder(MetaPathFinder):
    """Finder that delegates to the other finders and wraps the loader they return."""

    def __init__(self, waiting: dict[str, Hook]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if finder is not self and find else None
            if spec is not None:
                if spec.loader is not None:
                    # The hook stays registered: libraries search for optional modules, and import them later or
                    # never.
                    spec.loader = _HookingLoader(spec.loader, self._waiting[fullname])
                return spec
        return None


class _HookingLoader(Loader):
    """Loader that calls the hook after the wrapped loader; the module itself only sees the wrapped one."""

    def __init__(self, wrapped: Loader, hook: Hook) -> None:
        self._wrapped = wrapped
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        module.__loader__ = self._wrapped
        self._wrapped.exec_module(module)
        self._hook(module)
