"""Files that exist whole or not at all, and the data files that travel with the package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fcp_cli.errors import FcpError, UsageError

USUAL_MANIFESTS = ("lengths.parquet", "dataset.parquet")


def manifest_here() -> Path | None:
    """Return the manifest of a usual name in the current folder, which messages then name; None: there is none."""
    return next((Path(name) for name in USUAL_MANIFESTS if Path(name).is_file()), None)


@contextmanager
def replaced_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` if the block succeeds, remove it otherwise.

    A block left by Ctrl-C or a full disk leaves nothing behind, and whatever stood at `path` before is untouched. A
    symbolic link stays one: what it points to is replaced.

    Raises:
        FcpError: the file cannot be written (no such folder, not a file, no permission, disk full).
    """
    name, path = path, path.resolve()  # messages name the path as typed
    if path.exists() and not path.is_file():  # renaming over a device would put a file in its place
        raise FcpError(f"cannot write {name}: it is not a file")
    if not path.parent.is_dir():
        raise FcpError(f"cannot write {name}: there is no folder {name.parent}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        # pyarrow puts the name of the temporary and its own words around what the system said.
        reason = os.strerror(error.errno) if error.errno else error
        raise FcpError(f"cannot write {name}: {reason}") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def refuse_to_overwrite(output: Path, *sources: Path | None) -> None:
    """Keep a file that is read from being replaced by what is made of it.

    Raises:
        UsageError: `output` is one of `sources`.
    """
    for source in sources:
        if source is not None and output.exists() and source.exists() and output.samefile(source):
            raise UsageError(f"-o {output} would overwrite the source; name another file with -o")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a small text file whole or not at all."""
    with replaced_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def shipped(kind: str) -> Path:
    """Return the folder of shipped data: `profiles` or `launchers`.

    In a wheel it lies inside the package; in a checkout at the top level, where people look for it.
    """
    packaged = Path(__file__).parent / "_data" / kind
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / kind
