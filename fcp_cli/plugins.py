"""Names that other installed packages add, found through their entry points.

fcp's own names stand in a table of each registry, so a command that uses one of them never searches the installed
packages (17 ms for 115 of them), and they are there in a checkout that was never installed. Others are searched for
when names are listed, or when a name is not fcp's own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from pathlib import Path
from traceback import walk_tb
from typing import Any

from fcp_cli.errors import PluginError, UsageError
from fcp_cli.words import did_you_mean

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Plugin:
    """A name that an installed package adds.

    Attributes:
        registry: the registry that it is added to.
        name: the name, as users type it.
        package: name and version of the distribution.
        entry: its entry point.
    """

    registry: Registry
    name: str
    package: str
    entry: EntryPoint

    def load(self) -> Any:
        """Import the object that the entry point names."""
        try:
            return self.entry.load()
        except (Exception, SystemExit) as error:
            raise self.error(f"cannot be imported from {self.entry.value}", error) from error

    def error(self, fault: str, cause: BaseException | None = None) -> PluginError:
        """Return an error whose one line names the plug-in, its package, where it failed and how to get rid of it."""
        reason = "" if cause is None else f": {_reason(cause)}{self._failed_line(cause)}"
        distribution = self.package.split()[0]
        return PluginError(
            f"{self.registry.noun} {self.name} of the package {self.package} {fault}{reason}; fix or update that "
            f"package, or remove it with 'pip uninstall {distribution}'"
        )

    def _failed_line(self, cause: BaseException) -> str:
        """Return file and line where the error left the package's own code last, in brackets; empty if it never did."""
        root = self.entry.module.partition(".")[0]
        frames = walk_tb(cause.__traceback__)
        own = [(f.f_code, line) for f, line in frames if str(f.f_globals.get("__name__")).partition(".")[0] == root]
        return f" ({Path(own[-1][0].co_filename).name}:{own[-1][1]})" if own else ""


@dataclass(frozen=True, slots=True)
class Registry:
    """Names of one kind: fcp's own, and those of entry points.

    Attributes:
        group: the group of the entry points.
        noun: its name in messages.
        option: the option of the command line that takes a name.
        own: fcp's own names, which no package replaces.
    """

    group: str
    noun: str
    option: str
    own: tuple[str, ...]

    def names(self) -> list[str]:
        """Return fcp's own names in their order, then those of other packages by the alphabet."""
        return [*self.own, *sorted(self._added())]

    def packages(self) -> dict[str, str]:
        """Return the package, or packages, of each name that is not fcp's own."""
        return {name: " and ".join(sorted(one.package for one in found)) for name, found in self._added().items()}

    def plugin(self, name: str) -> Plugin:
        """Return the plug-in of a name that is not fcp's own."""
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
        """Return a line for each entry point that cannot be used by its name."""
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
    """Search the installed packages; those with damaged metadata are left to `_broken_packages`."""
    try:
        return tuple(entry_points(group=group))
    except Exception:  # the metadata of one package makes the search of all raise
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
    """Return an exception's type and the first line of what it says, if anything."""
    return f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()[0]


def _fault_of(distribution: Distribution) -> str | None:
    try:
        _ = distribution.entry_points
    except Exception as error:
        return _reason(error)
    return None
