"""A small Gemma 4 with its encoder, and sequences with images of any shape for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcp_cli.vision.gemma4 import visual_sequence
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.gemma3_vision_models import in_double
from tests.runtime.grid_inputs import IMAGE, VOCAB_SIZE, text

KERNEL, PATCH, MOST_PATCHES = 2, 2, 24
_WINDOW = 6
IMAGES = (0, 1, 3, 4, 2)
"""Images of a sequence by its kind: text alone, one, and several, of which some follow each other at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a processor gives for one sequence."""

    input_ids: np.ndarray[Any, np.dtype[np.int64]]
    labels: np.ndarray[Any, np.dtype[np.int64]]
    pixel_values: Tensor
    image_position_ids: Tensor

    @property
    def visual(self) -> dict[str, Tensor]:
        """Arguments of the model, which takes no empty tensors."""
        if not len(self.pixel_values):
            return {}
        return {"pixel_values": self.pixel_values, "image_position_ids": self.image_position_ids}


def positions(height: int, width: int) -> Tensor:
    """Of an image, as Gemma 4's image processor makes them."""
    grid = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
    found = torch.stack(grid, dim=-1).reshape(height * width, 2)
    return torch.nn.functional.pad(found, (0, 0, 0, MOST_PATCHES - len(found)), value=-1)


def inputs_of(row: int) -> Inputs:
    """Sequence `row` of an endless data set, of kind `row % 5`."""
    draw = np.random.default_rng(row)
    grids = [(KERNEL * int(draw.integers(1, 4)), KERNEL * int(draw.integers(1, 3))) for _ in range(IMAGES[row % 5])]
    pieces: list[list[int]] = [text(draw)]
    for height, width in grids:
        pieces += [[IMAGE] * (height * width // KERNEL**2), text(draw) if draw.random() < 0.5 else []]
    pieces.append(text(draw))
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    pixels = draw.random((len(grids), MOST_PATCHES, 3 * PATCH**2))
    for image, (height, width) in zip(pixels, grids, strict=True):
        image[height * width :] = 0
    return Inputs(
        input_ids=ids,
        labels=np.where(ids == IMAGE, -100, ids),
        pixel_values=torch.from_numpy(pixels),
        image_position_ids=torch.stack([positions(*grid) for grid in grids])
        if grids
        else torch.empty(0, MOST_PATCHES, 2, dtype=torch.int64),
    )


def config(**text_settings: Any) -> Any:
    import transformers

    return transformers.Gemma4Config(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": _WINDOW,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "use_bidirectional_attention": "vision",
            **text_settings,
        },
        vision_config={
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": KERNEL,
            "patch_size": PATCH,
            "position_embedding_size": 16,
        },
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        audio_token_id=IMAGE + 2,
        tie_word_embeddings=False,
    )


def model() -> Any:
    """Unmodified, with random weights; what it computes in fp32 is computed in fp64."""
    import transformers

    return in_double(transformers.Gemma4ForConditionalGeneration(config()))


def sequence(inputs: Inputs, labels: Any) -> VisualSequence:
    return visual_sequence(
        config(),
        inputs.input_ids,
        labels=labels,
        pixel_values=lambda start, stop: inputs.pixel_values[start:stop],
        image_position_ids=inputs.image_position_ids,
    )


def logits_alone(model: Any, inputs: Inputs) -> Tensor:
    """What transformers itself computes for the sequence."""
    ids = torch.from_numpy(inputs.input_ids)[None]
    logits: Tensor = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **inputs.visual).logits
    return logits
