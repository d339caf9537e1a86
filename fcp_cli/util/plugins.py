"""Names added by third-party packages, found through entry points.

Built-in names are in a table of each registry, so that a command that uses one never searches installed packages (17 ms
for 115 of them), and they work in an uninstalled checkout. Packages are searched only to list names or if a name is not
built in.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, entry_points, requires
from pathlib import Path
from traceback import walk_tb
from typing import Any

from fcp_cli.errors import PluginError, UsageError
from fcp_cli.util.words import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A name added by a package.

    Attributes:
        registry: its registry.
        name: name as users type it.
        package: name and version of the distribution.
        entry: entry point.
    """

    registry: Registry
    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:
        """Import the entry point's object."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:
            raise self.error(f"cannot be imported from {self.entry.value}", error) from error

    def error(self, fault: str, cause: BaseException | None = None) -> PluginError:
        """Return a one-line error that names the plug-in, its package, the place of the failure, and the fix."""
        reason = "" if cause is None else f": {_reason(cause)}{self._failed_line(cause)}"
        distribution = self.package.split()[0]
        return PluginError(
            f"{self.registry.noun} {self.name} of the package {self.package} {fault}{reason}; fix or update that "
            f"package, or remove it with 'pip uninstall {distribution}'"
        )

    def _failed_line(self, cause: BaseException) -> str:
        """Return the last file and line in the package's own code, in brackets; or ""."""
        root = self.entry.module.partition(".")[0]
        frames = walk_tb(cause.__traceback__)
        own = [(f.f_code, line) for f, line in frames if str(f.f_globals.get("__name__")).partition(".")[0] == root]
        return f" ({Path(own[-1][0].co_filename).name}:{own[-1][1]})" if own else ""


@dataclass(frozen=True, slots=True)
class Registry:
    """Names of one kind: built-in ones and those of entry points.

    Attributes:
        group: entry point group.
        noun: name of the kind in messages.
        option: command-line option that takes a name.
        own: built-in names, which packages cannot replace.
    """

    group: str
    noun: str
    option: str
    own: tuple[str, ...]

    def names(self) -> list[str]:
        """Return built-in names in order, then names of packages alphabetically."""
        return [*self.own, *sorted(self._added())]

    def packages(self) -> dict[str, str]:
        """Return the package(s) of each name that is not built in."""
        return {name: " and ".join(sorted(one.package for one in found)) for name, found in self._added().items()}

    def plugin(self, name: str) -> Plugin:
        """Return the plug-in with a name that is not built in."""
        found = self._added().get(name)
        if not found:
            known = self.names()
            hint = did_you_mean(name, known)
            raise UsageError(f"{self.option} is {name!r}; it must be one of {', '.join(known)}{hint}")
        if len(found) > 1:
            others = " and ".join(sorted(one.package for one in found[1:]))
            raise found[0].error(f"has the name of one in {others}")
        return found[0]

    def ignored(self) -> list[str]:
        """Return a line for each unusable entry point."""
        lines = [f"{error}" for error in _broken_packages()]
        for one in _plugins(self):
            if not _NAME.fullmatch(one.name):
                lines.append(str(one.error("has a name that is not letters, digits, dots and dashes")))
            elif one.name in self.own:
                lines.append(str(one.error(f"has the name of fcp's own {self.noun}, which is used instead")))
        return lines

    def _added(self) -> dict[str, list[Plugin]]:
        found: dict[str, list[Plugin]] = {}
        for one in _plugins(self):
            if one.name not in self.own and _NAME.fullmatch(one.name):
                found.setdefault(one.name, []).append(one)
        return found


def _plugins(registry: Registry) -> Iterator[Plugin]:
    for entry in _entry_points(registry.group, tuple(sys.path)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        yield Plugin(registry, entry.name, package, entry)


@lru_cache
def _entry_points(group: str, path: tuple[str, ...]) -> Collection[EntryPoint]:
    """Return the entry points of a group; packages with damaged metadata are left to `_broken_packages`."""
    try:
        return tuple(entry_points(group=group))
    except Exception:  # damaged metadata of one package breaks the search for all
        sound = (one for one in distributions() if _fault_of(one) is None)
        return tuple(entry for one in sound for entry in one.entry_points.select(group=group))


def _broken_packages() -> Iterator[PluginError]:
    try:
        entry_points(group="fcp")
    except Exception:
        for one in distributions():
            if (fault := _fault_of(one)) is not None:
                yield PluginError(f"the entry points of the package {one.name} cannot be read: {fault}")


def _reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    return f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]


def _fault_of(distribution: Distribution) -> str | None:
    try:
        _ = distribution.entry_points
    except Exception as error:
        return _reason(error)
    return None


# Optional dependencies, and the commands that install them individually, from any index.


def pip_install(extra: str, *only: str) -> str:
    """Return the pip command that installs an extra of fcp.

    Args:
        extra: name in pyproject.toml.
        only: packages to install; by default all of the extra.
    """
    found = [line for name, line in _of_extras().get(extra, {}).items() if not only or name in only]
    return "pip install " + " ".join(f"'{line}'" for line in found or [f"fcp-cli[{extra}]"])


def pip_install_module(module: str) -> str | None:
    """Return the pip command for a module that belongs to an extra, or None."""
    name = {"vl_convert": "vl-convert-python", "PIL": "pillow"}.get(module, module.replace("_", "-"))
    extra = next((extra for extra, lines in _of_extras().items() if name in lines), None)
    return None if extra is None else pip_install(extra, name)


@cache
def _of_extras() -> dict[str, dict[str, str]]:
    """Return {extra: {package: requirement}} from the metadata of the installed fcp."""
    found: dict[str, dict[str, str]] = {}
    try:
        lines = requires("fcp-cli") or []
    except PackageNotFoundError:  # fcp runs from a source folder
        lines = []
    for line in lines:
        requirement, _, condition = line.partition(";")
        if named := re.search(r"extra == ['\"]([\w-]+)['\"]", condition):
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None, f"{line} names no package"
            found.setdefault(named[1], {})[name[0]] = requirement.strip()
    return found
