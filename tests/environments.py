"""Environments with some of fcp's extras, as `pip install 'fcp-cli[EXTRA]'` makes them, in a process of this one.

    python -m tests.environments plain -- profile --analytic --model qwen3-8b

runs `fcp` where neither the modules nor the metadata of any distribution outside the environment can be found. What
belongs to it follows from the requirements that the installed distributions record.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Environment -> extras that are installed there.
ENVIRONMENTS: dict[str, tuple[str, ...]] = {"plain": (), "fit": ("fit",), "hf": ("hf",)}


class OnlySome:
    """Finders of this process, which find nothing of some distributions."""

    def __init__(self, finders: Sequence[Any], modules: Iterable[str], distributions: Iterable[str]) -> None:
        self._finders = tuple(finders)
        self._modules, self._distributions = frozenset(modules), frozenset(distributions)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self._modules:
            return None
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(self, *context: Any) -> Iterator[metadata.Distribution]:
        for finder in self._finders:
            if hasattr(finder, "find_distributions"):
                found = finder.find_distributions(*context)
                yield from (one for one in found if canonicalize_name(one.name) not in self._distributions)

    def invalidate_caches(self) -> None:
        for finder in self._finders:
            if hasattr(finder, "invalidate_caches"):
                finder.invalidate_caches()


def enter(extras: Iterable[str]) -> None:
    """Make this process, which must not have imported PyTorch, one without all other distributions."""
    inside = required("fcp-cli", extras)
    owners = {module: set(map(canonicalize_name, names)) for module, names in metadata.packages_distributions().items()}
    outside = {canonicalize_name(one.name) for one in metadata.distributions()} - inside
    modules = {module for module, names in owners.items() if not names & inside} - {"tests"}
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]  # `packaging`, which told what requires what
    sys.meta_path[:] = [OnlySome(sys.meta_path, modules, outside)]


def required(name: str, extras: Iterable[str] = ()) -> set[str]:
    """Return the installed distributions that one asks for, itself included, by their canonical names."""
    found: set[str] = set()
    asked = [(canonicalize_name(name), frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while asked:
        name, chosen = one = asked.pop()
        if one in seen:
            continue
        seen.add(one)
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another platform, or of an extra that is not installed here
            continue
        found.add(name)
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *chosen)):
                asked.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


if __name__ == "__main__":
    environment, _, *words = sys.argv[1:]
    enter(ENVIRONMENTS[environment])
    from fcp_cli.cli.app import main

    sys.argv = ["fcp", *words]
    main()
