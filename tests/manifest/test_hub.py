"""Checkpoints that were downloaded before are found by their name on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.tokenizer import local_checkpoint


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of snapshots of `org/name`, of which `main` is one."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    repository = tmp_path / "hub" / "models--org--name"
    for folder in ("refs", "snapshots/abc", "snapshots/def"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs" / "main").write_text("def")
    return repository / "snapshots"


def test_a_name_of_the_hub_is_the_main_snapshot_in_its_cache(snapshots: Path) -> None:
    (snapshots / "def" / "tokenizer.json").touch()
    assert local_checkpoint("org/name") == snapshots / "def"


def test_a_name_that_was_not_downloaded_is_told_how_to(snapshots: Path) -> None:
    with pytest.raises(ManifestError, match=r"there is no tokenizer org/name, .* hf download org/name --include 'tok"):
        local_checkpoint("org/name")  # its snapshot holds weights alone


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert local_checkpoint(str(tmp_path)) == tmp_path
    assert local_checkpoint("none/tokenizer.json") == Path("none/tokenizer.json")
