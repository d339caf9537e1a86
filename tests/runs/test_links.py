"""A run writes and deletes through a link of its folder only if it led to nothing when a job took the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runs.owner import own
from fcp_cli.runs.run_dir import require_own_link


def others(tmp_path: Path, name: str) -> Path:
    """A file or folder with content that the run did not write."""
    place = tmp_path / "others" / name
    if name == "metrics.jsonl":
        place.parent.mkdir(exist_ok=True)
        place.write_text("{}\n")
    else:
        place.mkdir(parents=True)
        (place / "kept").touch()
    return place


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "logs", "model", "origin", "tensorboard"])
def test_a_link_to_the_files_of_others_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(others(tmp_path, name))
    with pytest.raises(RunError, match=f"{name} links to .*others/{name}, which has files that this run did not write"):
        own(run)
    assert [path.name for path in run.iterdir()] == [name]


def test_a_link_to_nothing_is_refused_since_no_folder_can_be_made_there(tmp_path: Path) -> None:
    (tmp_path / "logs").symlink_to(tmp_path / "gone")
    with pytest.raises(RunError, match="which does not exist; remove the link"):
        own(tmp_path)


def test_a_link_to_an_empty_folder_is_followed_by_later_starts_too_and_no_other_in_its_place(tmp_path: Path) -> None:
    run, scratch = tmp_path / "run", tmp_path / "scratch"
    run.mkdir()
    scratch.mkdir()
    link = run / "checkpoints"
    link.symlink_to(scratch)
    own(run).release()
    (scratch / "step-00000001").mkdir()
    own(run).release()
    require_own_link(link)

    elsewhere = others(tmp_path, "checkpoints")
    link.unlink()
    link.symlink_to(elsewhere)
    with pytest.raises(RunError, match="this run did not write"):
        require_own_link(link)
    (run / "links.json").write_text(json.dumps({"checkpoints": str(elsewhere)}))  # as the message says
    own(run).release()
