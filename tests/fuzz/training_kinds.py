"""Files that only the ranks of a job, or their supervisor, open: handed to the functions that read them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.errors import FcpError
from fcp_cli.launching.failure import TorchrunRanks
from fcp_cli.manifest.pictures import PictureRecords
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.tokens import open_pictures, open_tokens
from fcp_cli.models.weights import find_weights
from fcp_cli.plan.metadata import read_online_settings
from fcp_cli.runs.checkpoints import checkpoints, read_header
from tests.fuzz import mutations
from tests.fuzz.kind import Change, Kind, of_calls, of_files, parquet
from tests.fuzz.planning_kinds import run_fcp
from tests.manifest.datasets import write_jsonl

_ERROR = "log/job/attempt_0/0/error.json"


def write_training(folder: Path) -> None:
    """Write weights, checkpoints, logs, and manifests with the data behind them; texts and pictures are there."""
    import torch
    from safetensors.torch import save_file

    weights = folder / "weights"
    shutil.copytree(folder / "hf" / "tiny", weights)
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for layer in range(2) for part in ("up", "down")]
    for number, piece in enumerate((names[:2], names[2:])):
        save_file({name: torch.ones(2, 2) for name in piece}, weights / f"model-{number}.safetensors", {"format": "pt"})
    places = {name: f"model-{index // 2}.safetensors" for index, name in enumerate(names)}
    (weights / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _write_log(folder / "log")
    _write_cache(folder / "embeddings")
    from tests.training.test_checkpoint import alone, make, save

    with pytest.MonkeyPatch.context() as patch:
        alone(patch)
        save(folder / "saved", make(0).state)
    for source, tokenizer in (("texts.jsonl", ""), ("chat.jsonl", "--kind chat --tokenizer chat")):
        run_fcp(folder, f"manifest build {source} {tokenizer} -o {Path(source).stem}-tokens.parquet")
    run_fcp(folder, "manifest build megatron.idx -o megatron-tokens.parquet")
    records = [{"image": "picture.png", "caption": "it"}, {"video": "clip.mp4", "caption": "it"}]
    write_jsonl(folder / "pixels.jsonl", records)
    run_fcp(folder, "manifest build pixels.jsonl --kind media --processor vision -o pixels.parquet")
    run_fcp(
        folder,
        "manifest build cells.parquet --kind media --tokenizer vision --processor vision -o cells-pixels.parquet",
    )


def _write_log(folder: Path) -> None:
    (folder / "job" / "attempt_0" / "0").mkdir(parents=True)
    (folder / "torchrun.log").write_text("torchrun began\nFAILED rank 0 exitcode: 1\n")
    (folder / "job" / "attempt_0" / "0" / "stderr.log").write_text("Traceback\nRuntimeError: x\n")
    (folder / "job" / "attempt_0" / "0" / "error.json").write_text(
        json.dumps({"message": {"message": "no", "extraInfo": {"py_callstack": "no", "timestamp": "1"}}})
    )


def _write_cache(folder: Path) -> None:
    (folder / "ab").mkdir(parents=True)
    head = json.dumps({"dtype": "float32", "shape": [2, 1, 4]}).encode()
    (folder / "ab" / "cdef").write_bytes(head + b"\n" + np.ones(8, "<f4").tobytes())


def resume_checkpoint(folder: Path) -> None:
    """Load a checkpoint as a rank does that resumes."""
    from fcp_cli.training.checkpoint import load_checkpoint
    from tests.training.test_checkpoint import make

    checkpoint = checkpoints(folder / "saved")[-1]
    load_checkpoint(checkpoint, make(1).state, header=read_header(checkpoint), rank=0)


def read_weights(folder: Path) -> None:
    """Find the weights that training begins with."""
    find_weights(folder / "weights")


def blame_ranks(folder: Path) -> None:
    """Name the rank that failed."""
    TorchrunRanks(folder / "log").find_failure(1)


def read_settings(folder: Path) -> None:
    """Read what a job that plans while it trains plans for."""
    read_online_settings(folder / "online.json")


def read_texts(folder: Path) -> None:
    """Read the tokens behind a manifest of texts."""
    _read_tokens(folder / "texts-tokens.parquet")


def read_conversations(folder: Path) -> None:
    """Read the tokens behind a manifest of conversations."""
    _read_tokens(folder / "chat-tokens.parquet")


def read_megatron(folder: Path) -> None:
    """Read the tokens behind a manifest of Megatron's files."""
    _read_tokens(folder / "megatron-tokens.parquet")


def _read_tokens(manifest: Path) -> None:
    tokens = open_tokens(manifest)
    for row in range(min(3, len(read_manifest(manifest)))):
        tokens(row)


def decode_pictures(folder: Path) -> None:
    """Decode the pixels behind a manifest of pictures."""
    _decode(folder, "pixels.parquet")


def decode_cells(folder: Path) -> None:
    """Decode the pixels in the cells of a table."""
    _decode(folder, "cells-pixels.parquet")


def _decode(folder: Path, manifest: str) -> None:
    from fcp_cli.training.decoding import BadPictureError, Decoder, Wanted

    rows: PictureRecords | None = open_pictures(folder / manifest)
    if rows is None:
        raise FcpError("no pixels")
    decode: Any = Decoder(folder / "vision", rows.processor)
    for row in range(min(2, len(read_manifest(folder / manifest)))):
        found = rows.read(row)
        size = rows.processor.rows_per_part(found.visuals[0])
        try:
            decode(Wanted(picture=found.pictures[0], size=found.sizes[0], visual=found.visuals[0], ranges=((0, size),)))
        except BadPictureError as error:
            raise FcpError(str(error)) from error


_WEIGHTS: dict[str, Change] = {
    "weights/model.safetensors.index.json": mutations.of_json,
    "weights/model-0.safetensors": mutations.of_tensors,
    "weights/config.json": mutations.of_json,
}
_SAVED: dict[str, Change] = {
    "saved/step-00000005/state.safetensors": mutations.of_tensors,
    "saved/step-00000005/rng-00000.safetensors": mutations.of_tensors,
    "saved/step-00000005/checkpoint.json": mutations.of_json,
}
KINDS: dict[str, Kind] = {
    "weights": of_calls(_WEIGHTS, read_weights),
    "weights of a launch": of_files(
        _WEIGHTS, "launch --plan plan.parquet --model weights --synthetic --dry-run --json"
    ),
    "checkpoint": of_calls(_SAVED, resume_checkpoint),
    "logs of ranks": of_calls(
        {
            _ERROR: mutations.of_json,
            "log/torchrun.log": mutations.of_text,
            "log/job/attempt_0/0/stderr.log": mutations.of_bytes,
        },
        blame_ranks,
        share=0.5,
    ),
    "settings of an online job": of_calls({"online.json": mutations.of_json}, read_settings, share=0.5),
    "texts in training": of_calls(
        {"texts-tokens.parquet": parquet, "texts.jsonl": mutations.of_lines}, read_texts, share=0.5
    ),
    "conversations in training": of_calls(
        {
            "chat-tokens.parquet": parquet,
            "chat.jsonl": mutations.of_lines,
            "chat/chat_template.jinja": mutations.of_template,
        },
        read_conversations,
        share=0.5,
    ),
    "megatron in training": of_calls(
        {
            "megatron-tokens.parquet": parquet,
            "megatron.idx": mutations.of_numbers,
            "megatron.bin": mutations.of_bytes,
        },
        read_megatron,
        share=0.5,
    ),
    "pictures in training": of_calls(
        {
            "pixels.parquet": parquet,
            "pixels.jsonl": mutations.of_lines,
            "picture.png": mutations.of_numbers,
            "clip.mp4": mutations.of_numbers,
            "vision/video_preprocessor_config.json": mutations.of_json,
            "vision/preprocessor_config.json": mutations.of_json,
        },
        decode_pictures,
        share=0.5,
    ),
    "cells in training": of_calls({"cells.parquet": parquet, "cells-pixels.parquet": parquet}, decode_cells, share=0.5),
}
