"""Model and cluster descriptions in YAML: found by name, alias or path; each value has its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from fcp_cli.errors import ProfileError
from fcp_cli.files import shipped
from fcp_cli.reading.documents import parse_yaml, read_text
from fcp_cli.words import nearest_words

_YAML: Final = (".yaml", ".yml")
Kind = Literal["model", "cluster"]


def read_description(path: Path, *, kind: Kind) -> dict[str, Any]:
    """Read a description file; return its mapping without `format`."""
    text = read_text(path, error=ProfileError, label=f"the {kind} ")
    document = parse_yaml(text, name=str(path), error=ProfileError)
    found = document.pop("format", None) if isinstance(document, dict) else type(document).__name__
    if not isinstance(document, dict) or found != f"fcp-{kind}/1":
        raise ProfileError(f"{path} is not a {kind} description: expected 'format: fcp-{kind}/1', found {found!r}")
    return document


def find_shipped(name: str, *, kind: Kind) -> Path:
    """Return the shipped description with that name or alias; case, dashes and an organisation prefix are ignored."""
    if _is_path(name):
        what = "a YAML, a config.json or the folder of a checkpoint" if kind == "model" else "a YAML"
        near = _nearest_files(name, kind)
        hint = f"nearest: {', '.join(near)}" if near else f"names of shipped {kind}s: 'fcp list {kind}s'"
        raise ProfileError(f"{name} is not {what}, or does not exist; {hint}")
    names, path = _shipped_names(kind), _shipped_path(name, kind)
    if path is not None:
        return path
    keys = {_key(candidate): candidate for candidate in names}
    near = _nearest_files(name, kind)
    near += [keys[key] for key in nearest_words(_key(name), keys, most=3, cutoff=0.5)]
    hint = f"nearest: {', '.join(near[:3])}" if near else f"known: {', '.join(shipped_names(kind))}"
    other = "or give a YAML or the folder of a checkpoint" if kind == "model" else "or give a YAML"
    raise ProfileError(f"unknown {kind} {name!r}; {hint}; {other}")


def _nearest_files(name: str, kind: Kind) -> list[str]:
    """Return the descriptions with the most similar names in the folder that a name points to, written as it is."""
    start = name[: name.rfind("/") + 1]
    try:
        found = list(Path(start).expanduser().iterdir())
    except (OSError, RuntimeError):
        return []
    files = (one for one in found if one.suffix in _YAML or (kind == "model" and (one / "config.json").is_file()))
    return nearest_words(name, [f"{start}{one.name}" for one in files], most=3)


def is_shipped(name: str, *, kind: Kind) -> bool:
    """Return whether a description with that name or alias is shipped."""
    return _shipped_path(name, kind) is not None


def _is_path(name: str) -> bool:
    """Return whether a name is clearly a path, so that a mistyped path never matches a shipped name."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _shipped_path(name: str, kind: Kind) -> Path | None:
    if _is_path(name):
        return None
    by_key = {_key(candidate): path for candidate, path in _shipped_names(kind).items()}
    return by_key.get(_key(name)) or by_key.get(_key(name.rsplit("/", 1)[-1]))


def shipped_aliases(kind: Kind) -> dict[str, list[str]]:
    """Return the aliases of each shipped description."""
    aliases: dict[str, list[str]] = {name: [] for name in shipped_names(kind)}
    for name, path in _shipped_names(kind).items():
        if name != path.stem:
            aliases[path.stem].append(name)
    return aliases


def shipped_names(kind: Kind) -> list[str]:
    """Return the names of all shipped descriptions, without aliases."""
    return sorted(path.stem for path in (shipped("profiles") / f"{kind}s").glob("*.yaml"))


@cache
def _shipped_names(kind: Kind) -> dict[str, Path]:
    names: dict[str, Path] = {}
    for path in sorted((shipped("profiles") / f"{kind}s").glob("*.yaml")):
        document = read_description(path, kind=kind)
        names[document["name"]] = path
        names.update(dict.fromkeys(document.get("aliases", []), path))
    return names


def _key(name: str) -> str:
    # Keep dots, since 1.7 and 17 billion parameters differ, and slashes, for organisation names.
    return re.sub(r"[^a-z0-9./]", "", name.lower())
