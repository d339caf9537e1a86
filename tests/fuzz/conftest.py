"""The seeds, which a worker writes once."""

from __future__ import annotations

import pytest

from tests.fuzz.folder import SeedFolder


@pytest.fixture(scope="session")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> SeedFolder:
    from tests.fuzz.seeds import write_seeds

    return write_seeds(tmp_path_factory.mktemp("seeds"))
