"""Look up Hugging Face hub names in the local cache; nothing is downloaded while counting lengths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from fcp_cli.errors import ManifestError

_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_checkpoint(name: str) -> Path:
    """Return the path if it exists, else the cached snapshot of that hub name."""
    path = Path(name)
    if path.exists() or not _NAME.fullmatch(name) or path.suffix in (".json", ".model"):
        return path
    repository = _cache() / f"models--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        snapshot = next((found for found in sorted(repository.glob("snapshots/*"))), repository)
    if not any(snapshot.glob("tokenizer*")):
        raise ManifestError(
            f"there is no tokenizer {name}, neither here nor in the Hugging Face cache {_cache()}; download it with: "
            f"hf download {name} --include 'tokenizer*' '*.json' '*.jinja'"
        )
    return snapshot


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
