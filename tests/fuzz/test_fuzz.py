"""Whatever a file holds, the command that reads it answers, or says in one line what is wrong: a few inputs of every kind.

`make fuzz` runs 10,000.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.planning_folder import fcp
from tests.fuzz.campaign import KINDS, inputs, words_of
from tests.fuzz.seeds import write_seeds

# More than seconds are left to `make fuzz`.
_INPUTS = 40
_SLOW = {"samples": 5, "cluster": 5}  # each input fits a profile, or computes one


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeds(tmp_path_factory.mktemp("seeds"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_a_kind_take_its_sound_file(seeds: Path, kind: str) -> None:
    for command in KINDS[kind].commands:
        result = fcp(*words_of(command, KINDS[kind].file), cwd=seeds)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused_in_one_line(seeds: Path, kind: str) -> None:
    assert [wrong for _, wrong in inputs(kind, seeds, 0, _SLOW.get(kind, _INPUTS)) if wrong] == []
