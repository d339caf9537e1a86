"""A small Gemma 3 with its encoder, and sequences with tiles for it."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.vision.gemma3 import visual_sequence
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.grid_inputs import IMAGE, VOCAB_SIZE
from tests.runtime.linear_models import InDouble
from tests.runtime.tile_inputs import TILE_PIXELS, TILE_TOKENS, Inputs
from tests.runtime.tile_inputs import inputs_of as inputs_of

_WINDOW = 6


def image_spans(row: int) -> list[tuple[int, int]]:
    """Where the images of a sequence lie; those that follow each other at once are one."""
    is_image = np.concatenate(([False], inputs_of(row).input_ids == IMAGE, [False]))
    return [(start, stop) for start, stop in np.flatnonzero(is_image[1:] != is_image[:-1]).reshape(-1, 2).tolist()]


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
            "image_size": TILE_PIXELS,
            "patch_size": 2,
            "vision_use_head": False,
        },
        mm_tokens_per_image=TILE_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=IMAGE + 1,
        eoi_token_index=IMAGE + 2,
        tie_word_embeddings=False,
    )


def model() -> Any:
    """Unmodified, with random weights; what it computes in fp32 is computed in fp64."""
    import transformers

    return in_double(transformers.Gemma3ForConditionalGeneration(config()))


def in_double(made: Any) -> Any:
    """Let a model compute in fp64 what it computes in fp32."""
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
    ids = torch.from_numpy(inputs.input_ids)[None]
    logits: Tensor = model(input_ids=ids, token_type_ids=(ids == IMAGE).long(), **inputs.visual).logits
    return logits
