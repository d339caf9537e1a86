"""The folder of seeds: its sound contents, and whatever a command changed there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path


class SeedFolder:
    """A folder of sound files that is put back after every input.

    Attributes:
        path: of the folder.
        contents: of every regular file, by its path below the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._marks: dict[str, tuple[int, int, int]] = {}
        self.contents: dict[str, bytes] = {}
        self._folders: set[str] = set()
        for name, entry in self._entries():
            if entry.is_dir(follow_symlinks=False):
                self._folders.add(name)
            else:
                self._marks[name] = _mark(entry.stat(follow_symlinks=False))
                if entry.is_file(follow_symlinks=False):
                    self.contents[name] = Path(entry.path).read_bytes()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files of an input."""
        for name, content in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._marks[name] = _mark(path.lstat())

    def restore(self, files: Mapping[str, bytes]) -> list[str]:
        """Put everything back; return the paths that were added, changed or removed since `write` wrote `files`."""
        found = dict(self._entries())
        changed = [name for name in self._marks if name not in found]
        changed += [name for name in self._folders if name not in found]
        for name in changed:
            if name in self._folders:
                (self.path / name).mkdir(parents=True, exist_ok=True)
        for name, entry in found.items():
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and name not in self._folders:
                changed.append(name)
                shutil.rmtree(entry.path, ignore_errors=True)
            elif not is_folder and name not in self._marks:
                changed.append(name)
                Path(entry.path).unlink(missing_ok=True)
            elif not is_folder and _mark(entry.stat(follow_symlinks=False)) != self._marks[name]:
                changed.append(name)
        for name in {*changed, *files}:
            if name in self.contents:
                path = self.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.contents[name])
                self._marks[name] = _mark(path.lstat())
            elif name in files:
                (self.path / name).unlink(missing_ok=True)
                self._marks.pop(name, None)
        return changed

    def _entries(self, folder: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        with os.scandir(self.path / folder) as entries:
            for entry in list(entries):
                name = f"{folder}/{entry.name}".lstrip("/")
                yield name, entry
                if entry.is_dir(follow_symlinks=False):
                    yield from self._entries(name)


def _mark(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
