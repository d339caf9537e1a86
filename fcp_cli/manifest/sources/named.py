"""Resolve command-line arguments that name data: paths, URLs, and globs of either."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.reading.remote import RemotePath, data_path, retried


def named_source(words: Sequence[str]) -> tuple[Path, tuple[Path, ...]]:
    """Return the path of a source, and its files if several were named or a glob was used.

    Args:
        words: one file, folder or prefix; or any number of files and globs, in row order. Files that match a glob are
            in name order.
    """
    if len(words) == 1 and not _is_glob(words[0]):
        return data_path(words[0]), ()
    files = [file for word in words for file in _matching(word)]
    seen: set[Path] = set()
    for file in files:
        if file in seen:
            raise UsageError(f"{file} is named twice: its sequences would be counted twice; name it once")
        seen.add(file)
    return (files[0], ()) if len(files) == 1 else (_folder_of(files), tuple(files))


def _matching(word: str) -> Iterator[Path]:
    path = data_path(word)
    if not _is_glob(word):
        if path.is_dir():
            raise UsageError(
                f"{word} is a folder among several sources; name its files, as '{word.rstrip('/')}/*.jsonl'"
            )
        if not path.exists():
            raise ManifestError(f"there is no source {word}")
        yield path.absolute()
        return
    found: list[Path]
    if isinstance(path, RemotePath):
        system, name = path.store()
        found = [RemotePath(system.unstrip_protocol(one)) for one in retried(lambda: system.glob(name), word)]
    else:
        found = [Path(one).absolute() for one in glob.glob(word, recursive=True) if Path(one).is_file()]  # noqa: PTH207  the glob may be absolute
    if not found:
        raise ManifestError(f"no file matches {word}")
    yield from sorted(found)


def _is_glob(word: str) -> bool:
    path = data_path(word)
    if isinstance(path, RemotePath):
        return "*" in word or "[" in word  # in a URL, ? begins the query
    return glob.has_magic(word) and not path.exists()


def _folder_of(files: Sequence[Path]) -> Path:
    common = files[0].parent
    while not all(type(file) is type(common) and common in file.parents for file in files):
        if common in (common.parent, common.parent.parent):
            raise UsageError(f"{files[0]} and {files[-1]} have no folder in common; build a manifest of each")
        common = common.parent
    return common
