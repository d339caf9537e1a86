"""Whatever a file holds, the command that reads it answers, or says in one line what is wrong: a few inputs of every kind.

`make fuzz` runs 20,000.
"""

from __future__ import annotations

import pytest

from tests.fuzz.campaign import KINDS, inputs
from tests.fuzz.folder import SeedFolder

# Sound inputs start jobs up to the first process, and read what only ranks read.
pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

# More than seconds are left to `make fuzz`.
_INPUTS = 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused_in_one_line(seeds: SeedFolder, kind: str) -> None:
    count = max(1, round(_INPUTS * KINDS[kind].share))
    assert [(name, wrong) for _, _, name, wrong in inputs(kind, seeds, 0, count) if wrong] == []
