"""A small Gemma 3 with its encoder, and sequences with tiles for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.vision.gemma3 import visual_sequence
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.linear_models import InDouble

VOCAB_SIZE, IMAGE = 64, 60
TILES = (0, 1, 3, 6, 9)
"""Tiles of a sequence by its kind: text alone, an image, an image of several tiles, a video, and many images."""
_TILE_TOKENS, _TILE_PIXELS = 4, 8
_WINDOW = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a processor gives for one sequence."""

    input_ids: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    pixel_values: Tensor


def inputs_of(row: int) -> Inputs:
    """Sequence `row` of an endless data set, of kind `row % 5`."""
    draw = np.random.default_rng(row)
    tiles = TILES[row % 5]
    pieces: list[list[int]] = [_text(draw)]
    for _ in range(tiles):  # tiles of an image follow each other at once, images and frames have text between them
        pieces += [[IMAGE] * _TILE_TOKENS, _text(draw) if draw.random() < 0.5 else []]
    pieces.append(_text(draw))
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    pixels = draw.standard_normal((tiles, 3, _TILE_PIXELS, _TILE_PIXELS))
    return Inputs(input_ids=ids, labels=np.where(ids == IMAGE, -100, ids), pixel_values=torch.from_numpy(pixels))


def image_spans(row: int) -> list[tuple[int, int]]:
    """Where the images of a sequence lie; those that follow each other at once are one."""
    is_image = np.concatenate(([False], inputs_of(row).input_ids == IMAGE, [False]))
    return [(start, stop) for start, stop in np.flatnonzero(is_image[1:] != is_image[:-1]).reshape(-1, 2).tolist()]


def _text(draw: np.random.Generator) -> list[int]:
    return draw.integers(0, IMAGE, size=draw.integers(1, 6)).tolist()  # type: ignore[no-any-return]


def config() -> Any:
    import transformers

    return transformers.Gemma3Config(
        text_config={
            "model_type": "gemma3_text",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "image_size": _TILE_PIXELS,
            "patch_size": 2,
            "vision_use_head": False,
        },
        mm_tokens_per_image=_TILE_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
        tie_word_embeddings=False,
    )


def model() -> Any:
    """Unmodified, with random weights; what it computes in fp32 is computed in fp64."""
    import transformers

    made = transformers.Gemma3ForConditionalGeneration(config())
    own = made.forward

    @wraps(own)
    def forward(*args: Any, **given: Any) -> Any:
        with InDouble():
            return own(*args, **given)

    made.forward = forward
    return made


def sequence(inputs: Inputs, labels: Any) -> VisualSequence:
    return visual_sequence(
        config(),
        inputs.input_ids,
        labels=labels,
        pixel_values=lambda start, stop: inputs.pixel_values[start:stop],
    )


def logits_alone(model: Any, inputs: Inputs) -> Tensor:
    """What transformers itself computes for the sequence."""
    visual = {"pixel_values": inputs.pixel_values} if len(inputs.pixel_values) else {}
    ids = torch.from_numpy(inputs.input_ids)[None]
    logits: Tensor = model(input_ids=ids, token_type_ids=(ids == IMAGE).long(), **visual).logits
    return logits
