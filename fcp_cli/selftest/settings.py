"""Settings of a test's ranks, stored as a file. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.files import write_text_atomically
from fcp_cli.reading.documents import read_json
from fcp_cli.selftest.findings import Diary


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of the ranks.

    Attributes:
        folder: folder for the diary, plans and samples; shared by all nodes.
        device: kind of device.
        quick: whether to use small sizes.
        writes_report: whether rank 0 writes and prints the report, if no parent process monitors it.
    """

    folder: Path
    device: str
    quick: bool
    writes_report: bool = False

    @property
    def diary(self) -> Diary:
        return Diary(self.folder / "diary.jsonl")

    @property
    def report(self) -> Path:
        """Report file of rank 0."""
        return self.folder / "report.json"

    @property
    def measurement(self) -> Path:
        """Measurement request for the packs check."""
        return self.folder / "measurement.json"

    def write(self) -> Path:
        """Write the settings file and return its path."""
        path = self.folder / "settings.json"
        write_text_atomically(path, json.dumps({**asdict(self), "folder": str(self.folder)}))
        return path


def read_settings(path: Path) -> Settings:
    """Read a file written by `Settings.write`."""
    document: dict[str, Any] = read_json(path, error=RunError)
    return Settings(**{**document, "folder": Path(document["folder"])})
