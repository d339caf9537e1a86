"""Model and cluster descriptions as YAML: found by name, alias or path, every figure with its source."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from fcp_cli.errors import ProfileError
from fcp_cli.files import shipped

Kind = Literal["model", "cluster"]


def read_yaml_mapping(path: Path, *, kind: Kind) -> dict[str, Any]:
    """Read a description file.

    Raises:
        ProfileError: it cannot be read, is not YAML, or has not the format `fcp-<kind>/1`.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"cannot read the {kind} {path}: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ProfileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if not isinstance(document, dict) or found != f"fcp-{kind}/1":
        raise ProfileError(f"{path} is not a {kind} description: expected 'format: fcp-{kind}/1', found {found!r}")
    return document


def find_shipped(name: str, *, kind: Kind) -> Path:
    """The shipped description of that name or alias; case, dashes and an organisation prefix do not matter.

    Raises:
        ProfileError: there is none; the message lists the nearest names.
    """
    names = _shipped_names(kind)
    by_key = {_key(candidate): path for candidate, path in names.items()}
    path = by_key.get(_key(name)) or by_key.get(_key(name.rsplit("/", 1)[-1]))
    if path is not None:
        return path
    keys = {_key(candidate): candidate for candidate in names}
    near = difflib.get_close_matches(_key(name), list(keys), n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(keys[key] for key in near)}" if near else f"known: {', '.join(shipped_names(kind))}"
    other = "or give a YAML, or --hf-config path/config.json" if kind == "model" else "or give a YAML"
    raise ProfileError(f"unknown {kind} {name!r}; {hint}; {other}")


def shipped_names(kind: Kind) -> list[str]:
    """Names of all shipped descriptions, without aliases."""
    return sorted(path.stem for path in (shipped("profiles") / f"{kind}s").glob("*.yaml"))


@cache
def _shipped_names(kind: Kind) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for path in sorted((shipped("profiles") / f"{kind}s").glob("*.yaml")):
        document = read_yaml_mapping(path, kind=kind)
        names[document["name"]] = path
        names.update(dict.fromkeys(document.get("aliases", []), path))
    return names


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9./]", "", name.lower())


class Figures:
    """Reads typed figures out of one mapping; every complaint names the figure by its path in the file."""

    def __init__(self, values: Any, *, where: str, block: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ProfileError(f"{where}: {block.rstrip('.') or 'the file'} must be a mapping of figures")
        self.values = values
        self.where = where
        self.block = block

    def reject_unknown(self, known: set[str]) -> None:
        for key in self.values:
            if key not in known:
                near = difflib.get_close_matches(str(key), sorted(known), n=1)
                hint = f"did you mean {self.block}{near[0]}?" if near else f"known: {', '.join(sorted(known))}"
                raise ProfileError(f"{self.where}: unknown key {self.block}{key}; {hint}")

    def count(self, key: str, *, default: int | None = None, least: int = 1) -> int:
        return int(
            self._read(
                key,
                default,
                f"an integer >= {least}",
                lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
            )
        )

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of integers >= 0; empty where the figure is left out."""
        wanted = "a list of integers >= 0"
        value = self._read(
            key, [], wanted, lambda given: isinstance(given, list) and all(type(n) is int and n >= 0 for n in given)
        )
        return tuple(value)

    def number(self, key: str, *, default: float | None = None, positive: bool = True) -> float:
        return float(
            self._read(
                key,
                default,
                f"a {'positive' if positive else 'non-negative'} number",
                lambda value: (
                    isinstance(value, (int, float))
                    and not isinstance(value, bool)
                    and math.isfinite(value)
                    and (value > 0 if positive else value >= 0)
                ),
            )
        )

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        return bool(self._read(key, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, key: str, *, default: str | None = None) -> str:
        return str(self._read(key, default, "a text", lambda value: isinstance(value, str) and value != ""))

    def _read(self, key: str, default: Any, wanted: str, good: Callable[[Any], bool]) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ProfileError(f"{self.where}: {self.block}{key} is missing")
        if isinstance(value, str) and "number" in wanted:
            value = _yaml_number(value)  # YAML 1.1 reads 50e9 (no dot, no sign) as text
        if not good(value):
            raise ProfileError(f"{self.where}: {self.block}{key} is {value!r}; it must be {wanted}")
        return value


def _yaml_number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
