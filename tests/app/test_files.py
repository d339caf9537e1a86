"""A file exists whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError
from fcp_cli.util.files import refuse_to_overwrite, replaced_atomically, shipped, write_text_atomically
from tests.messages import raises


def test_a_finished_block_leaves_only_the_target(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "plan.txt", "whole")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.txt"]
    assert (tmp_path / "plan.txt").read_text() == "whole"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_block_keeps_what_stood_there_before(tmp_path: Path, interruption: type[BaseException]) -> None:
    target = tmp_path / "plan.txt"
    target.write_text("before")
    with pytest.raises(interruption), replaced_atomically(target) as temporary:
        temporary.write_text("half")
        raise interruption
    assert [p.name for p in tmp_path.iterdir()] == ["plan.txt"]
    assert target.read_text() == "before"


def test_a_full_disk_is_one_line_of_the_systems_words_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(
            FcpError, match=r"cannot write .*plan.txt: No space left on device \([0-9,]+ bytes free in \S+\)$"
        ),
        replaced_atomically(tmp_path / "plan.txt") as temporary,
    ):
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with raises(snapshot("FcpError: cannot write FOLDER/absent/plan.txt: there is no folder FOLDER/absent")):
        write_text_atomically(tmp_path / "absent" / "plan.txt", "text")


def test_shipped_data_is_found_from_a_checkout() -> None:
    assert (shipped("profiles") / "models").is_dir()


def test_a_source_is_recognised_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lengths.parquet").touch()
    (tmp_path / "link.parquet").symlink_to("lengths.parquet")
    with raises(snapshot("UsageError: -o FOLDER/link.parquet would overwrite the source; name another file with -o")):
        refuse_to_overwrite(tmp_path / "link.parquet", None, tmp_path / "lengths.parquet")
    refuse_to_overwrite(tmp_path / "plan.parquet", tmp_path / "lengths.parquet", tmp_path / "absent.parquet")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file_is_left_alone(tmp_path: Path, kind: str) -> None:
    target = tmp_path / kind
    target.mkdir() if kind == "folder" else os.mkfifo(target)
    with pytest.raises(FcpError, match=f"cannot write .*/{kind}: it is not a file"):
        write_text_atomically(target, "whole")
    assert [p.name for p in tmp_path.iterdir()] == [kind]
    assert not target.is_file()


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to("plan.txt")
    write_text_atomically(tmp_path / "link.txt", "whole")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "plan.txt").read_text() == "whole"


@pytest.mark.parametrize("inside", [False, True])
def test_a_loop_of_links_is_one_line(tmp_path: Path, inside: bool) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    target = loop / "plan.txt" if inside else loop
    with pytest.raises(FcpError, match=f"^cannot write {target}: it is a loop of symbolic links$"):
        write_text_atomically(target, "whole")


def test_a_target_keeps_its_permissions_and_a_new_file_has_the_usual_ones(tmp_path: Path) -> None:
    target = tmp_path / "plan.txt"
    for before, wanted in ((None, 0o640), (0o600, 0o600), (0o664, 0o664)):
        if before is not None:
            target.chmod(before)
        mask = os.umask(0o027)
        try:
            write_text_atomically(target, "whole")
        finally:
            os.umask(mask)
        assert stat.S_IMODE(target.stat().st_mode) == wanted


def test_a_planted_link_is_never_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write into the folder puts a link where the temporary file is about to be."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(os, "urandom", bytes)
    (tmp_path / f".plan.txt.{bytes(8).hex()}.partial").symlink_to(victim)
    with pytest.raises(FcpError, match=r"cannot write .*plan.txt: File exists"):
        write_text_atomically(tmp_path / "plan.txt", "whole")
    assert victim.read_text() == "precious"


def test_the_disk_has_the_file_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    write_text_atomically(tmp_path / "plan.txt", "whole")
    write_text_atomically(tmp_path / "position.txt", "whole", durable=False)
    assert calls == ["file", "rename", "folder", "rename"]


def test_a_folder_that_cannot_be_flushed_fails_nothing_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_text_atomically(tmp_path / "plan.txt", "whole")
    assert (tmp_path / "plan.txt").read_text() == "whole"


@pytest.mark.parametrize(("hours", "locked", "stays"), [(2, False, False), (2, True, True), (0, False, True)])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, hours: int, locked: bool, stays: bool) -> None:
    leftover, other = tmp_path / ".plan.txt.0123.partial", tmp_path / ".other.txt.0123.partial"
    for path in (leftover, other):
        path.write_text("half")
        os.utime(path, (time.time() - 3601 * hours,) * 2)
    with leftover.open("r+") as file:
        if locked:
            fcntl.flock(file, fcntl.LOCK_EX)
        write_text_atomically(tmp_path / "plan.txt", "whole")
    assert leftover.exists() is stays
    assert other.exists()
