"""A small InternVL and sequences with tiles for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fcp_cli.vision.internvl import visual_sequence
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.grid_inputs import IMAGE, VOCAB_SIZE
from tests.runtime.tile_inputs import TILE_PIXELS, TILE_TOKENS, Inputs
from tests.runtime.tile_inputs import inputs_of as inputs_of


def config(**text: Any) -> Any:
    """Of InternVL on Qwen2, unless the language model's settings say otherwise."""
    import transformers

    return transformers.InternVLConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            **text,
        },
        vision_config={
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "image_size": [TILE_PIXELS] * 2,
            "patch_size": [2, 2],
        },
        image_token_id=IMAGE,
        image_seq_length=TILE_TOKENS,
        tie_word_embeddings=False,
    )


def model() -> Any:
    """Unmodified, with random weights."""
    import transformers

    return transformers.InternVLForConditionalGeneration(config())


def sequence(inputs: Inputs, labels: Any) -> VisualSequence:
    return visual_sequence(
        config(),
        inputs.input_ids,
        labels=labels,
        pixel_values=lambda start, stop: inputs.pixel_values[start:stop],
    )


def logits_alone(model: Any, inputs: Inputs) -> Tensor:
    """What transformers itself computes for the sequence."""
    logits: Tensor = model(input_ids=torch.from_numpy(inputs.input_ids)[None], **inputs.visual).logits
    return logits
