"""A file exists whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError
from fcp_cli.files import refuse_to_overwrite, replaced_atomically, shipped, write_text_atomically
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


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(FcpError, match=r"cannot write .*plan.txt: No space left on device"),
        replaced_atomically(tmp_path / "plan.txt") as temporary,
    ):
        temporary.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with raises(snapshot("FcpError: cannot write FOLDER/absent/plan.txt: there is no folder FOLDER/absent")):
        write_text_atomically(tmp_path / "absent" / "plan.txt", "text")


def test_shipped_data_is_found_from_a_checkout() -> None:
    assert (shipped("profiles") / "models").is_dir()


def test_the_reason_is_the_systems_and_not_a_librarys(tmp_path: Path) -> None:
    with (
        pytest.raises(FcpError, match=r"cannot write .*plan.txt: No space left on device$"),
        replaced_atomically(tmp_path / "plan.txt"),
    ):
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")


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
