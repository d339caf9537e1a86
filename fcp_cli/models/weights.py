"""Finds and checks the weights of a Hugging Face checkpoint folder without torch.

Reads only safetensors, which cannot run code.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import RunError
from fcp_cli.util.inputs import read_json
from fcp_cli.util.validation import shown
from fcp_cli.util.words import first_line

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_FILE_NAME: Final = re.compile(r"[^\x00-\x1f\x7f]{1,255}")  # the file system's limit


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The weights of a checkpoint folder.

    Attributes:
        files: file of each tensor, by tensor name.
    """

    folder: Path
    files: Mapping[str, Path]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has safetensors weights."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def find_weights(folder: Path) -> WeightFiles:
    """Find the weights of a checkpoint folder, and check that its files are complete."""
    if (folder / INDEX).is_file():
        document = read_json(folder / INDEX, error=RunError)
        names = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in names.values()
        ):
            raise RunError(f"{folder / INDEX} has no 'weight_map' from tensors to files; copy the checkpoint again")
        files = {tensor: folder / Path(name).name for tensor, name in names.items()}
    elif (folder / SINGLE).is_file():
        files = dict.fromkeys(_tensors_of(folder / SINGLE), folder / SINGLE)
    else:
        pickled = next(iter(sorted(folder.glob("pytorch_model*.bin"))), None)
        remedy = "give a checkpoint's folder with --weights, or --weights random"
        if pickled is not None:
            command = _conversion(folder)
            remedy = f"{pickled.name} is a pickle, which may run code; write safetensors beside it with: {command}"
        raise RunError(f"{folder} holds no {SINGLE}; {remedy}")
    for file in sorted(set(files.values())):
        missing = {tensor for tensor, place in files.items() if place == file} - set(_tensors_of(file))
        if missing:
            raise RunError(f"{file} has no tensor {shown(min(missing))}, which {INDEX} lists for it; copy it again")
    return WeightFiles(folder=folder, files=files)


def _conversion(folder: Path) -> str:
    """Return a command that converts pickled weights to safetensors; transformers unpickles only tensors."""
    file = folder / "config.json"
    document = read_json(file, error=RunError) if file.is_file() else None
    names = document.get("architectures") if isinstance(document, dict) else None
    name = names[0] if isinstance(names, list) and names and str(names[0]).isidentifier() else "AutoModelForCausalLM"
    path = json.dumps(str(folder))
    code = f'import transformers; transformers.{name}.from_pretrained({path}, dtype="auto").save_pretrained({path})'
    return shlex.join(["python", "-c", code])


def _tensors_of(file: Path) -> list[str]:
    with opened_file(file) as opened:
        return list(opened.keys())


def opened_file(file: Path, *, framework: str = "numpy") -> Any:
    """Open a safetensors file; `framework` is `pt` for torch tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework)
    except FileNotFoundError as error:
        raise RunError(f"{file} is missing; copy the checkpoint again") from error
    except (SafetensorError, OSError) as error:
        raise RunError(f"{file} is truncated or damaged ({first_line(error)}); copy it again") from error
