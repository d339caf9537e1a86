"""Trust in an `fcp.yaml` that stands in the current folder: the folder's author wrote it, not always the user.

Settings that become code or commands, or write elsewhere, are taken from it only once `fcp trust` was typed there. The
list of trusted files belongs to the user and names each by its content: a changed file asks again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcp_cli.errors import FcpError, UsageError
from fcp_cli.options import Option


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigFile:
    """The config file of this command line.

    Attributes:
        path: the path, as it was named or found.
        digest: SHA-256 of its content, or None if it needs no trust: the user named it.
    """

    path: Path
    digest: str | None

    def is_trusted(self) -> bool:
        return self.digest is None or _line(self.path, self.digest) in _trusted()


def refuse_untrusted(
    config: ConfigFile | None, options: Iterable[Option], values: Mapping[str, Any], verb: str
) -> None:
    """Refuse settings of a found config file that need trust.

    Args:
        config: the file, or None.
        options: those that it sets for this command.
        values: the values of the command's options.
        verb: the command, as "launch".
    """
    if config is None or config.digest is None:
        return
    asking = [option for option in options if _needs_trust(option, values[option.name], config.path.parent)]
    if asking and not config.is_trusted():
        names = ", ".join(f"{verb}.{option.flag.removeprefix('--')}" for option in asking)
        reason = "run commands" if any(_mark(option) == "runs" for option in asking) else "write outside of its folder"
        raise UsageError(
            f"{config.path} was found in this folder and sets {names}, which may {reason}; read it, then type "
            f"'fcp trust', or name it with '--config {config.path}'"
        )


def _needs_trust(option: Option, value: Any, folder: Path) -> bool:
    if _mark(option) == "writes" and value is not None and str(value) != "-":
        return not (folder / value).resolve().is_relative_to(folder.resolve())
    return _mark(option) == "runs" and bool(value)


def _mark(option: Option) -> str | None:
    return getattr(option.mark, "trust", None)


def digest_of(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def add_trust(path: Path, digest: str) -> Path:
    """Add a file with its content to the user's list, replacing an earlier entry of that name."""
    return _write([*_others(path), _line(path, digest)])


def remove_trust(path: Path) -> Path:
    """Take a file from the user's list."""
    return _write(_others(path))


def _others(path: Path) -> list[str]:
    return [line for line in _trusted() if line.partition(" ")[2] != path.resolve().as_uri()]


def _line(path: Path, digest: str) -> str:
    return f"{digest} {path.resolve().as_uri()}"  # a name may hold line breaks


def _trusted() -> list[str]:
    """Return the lines of the user's list; none if others than the user could have written it."""
    from fcp_cli.reading.documents import read_text

    try:
        state = _list().stat()
        if state.st_uid != os.getuid() or state.st_mode & 0o022:
            return []
        return read_text(_list(), error=UsageError, most_bytes=1 << 20).splitlines()
    except (OSError, FcpError):
        return []


def _write(lines: list[str]) -> Path:
    from fcp_cli.files import replaced_atomically

    path = _list()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FcpError(f"cannot write {path}: {error.strerror}") from error
    with replaced_atomically(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.chmod(0o600)
    path.chmod(0o600)  # one that stood there with other rights keeps them
    return path


def _list() -> Path:
    """Return the user's list of trusted files."""
    configured = os.environ.get("XDG_CONFIG_HOME", "")
    if Path(configured).is_absolute():  # others are to be ignored, by the standard
        return Path(configured, "fcp", "trusted")
    try:
        return Path.home() / ".config" / "fcp" / "trusted"
    except RuntimeError as error:
        raise FcpError("this user has no home folder; set XDG_CONFIG_HOME") from error
