"""The run's copy of its initial checkpoint without weights, for resuming and exporting if the original is gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from fcp_cli.errors import RunError
from fcp_cli.reading.documents import read_json
from fcp_cli.training.weights.weights import copy_companions, published_folder

_NAMES = "tensor-names.json"


def keep_origin(target: Path, *, model: str, source: Path, names: Mapping[str, str]) -> None:
    """Copy configuration, tokenizer and processor of a checkpoint. Called by one rank at the start of a run.

    Args:
        target: folder to create.
        model: model as named; if it is a folder or a config.json, that configuration is copied.
        source: initial checkpoint.
        names: checkpoint name of each tensor, from `match_weights`.
    """
    given = Path(model)
    config = given / "config.json" if given.is_dir() else given
    with published_folder(target, rank=0, barrier=lambda: None) as partial:
        if config.name.endswith(".json") and config.is_file():
            shutil.copyfile(config, partial / "config.json")
        copy_companions(source, partial)
        (partial / _NAMES).write_text(json.dumps(dict(names), indent=2) + "\n", encoding="utf-8")


def kept_names(origin: Path) -> dict[str, str] | None:
    """Return the checkpoint names of a run's tensors, or None if it had no initial checkpoint."""
    path = origin / _NAMES
    if not path.is_file():
        return None
    names = read_json(path, error=RunError)
    if not isinstance(names, dict):
        raise RunError(f"{path} is damaged; remove it, and give the checkpoint with --weights")
    return names
