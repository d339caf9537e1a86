"""A small Qwen2.5-VL and sequences with images and videos for it."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fcp_cli.vision.parts import VisualSequence
from fcp_cli.vision.qwen2_5_vl import visual_sequence
from tests.runtime.grid_inputs import TOKENS, VOCAB_SIZE, Inputs, logits_of
from tests.runtime.grid_inputs import inputs_of as inputs_of_grids

inputs_of = partial(inputs_of_grids, stamped=False)


def config() -> Any:
    import transformers

    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            # Windows of four patches: sides of two to eight patches make one window, several, and cut ones.
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **TOKENS,
    )


def model() -> Any:
    """Unmodified, with random weights."""
    import transformers

    return transformers.Qwen2_5_VLForConditionalGeneration(config())


def sequence(inputs: Inputs, labels: Any) -> VisualSequence:
    return visual_sequence(
        config(),
        inputs.input_ids,
        labels=labels,
        image_grid_thw=inputs.image_grid_thw,
        video_grid_thw=inputs.video_grid_thw,
        second_per_grid_ts=inputs.second_per_grid_ts,
        pixel_values=inputs.pixel_values,
        pixel_values_videos=lambda start, stop: inputs.pixel_values_videos[start:stop],
    )


def logits_alone(model: Any, inputs: Inputs) -> Tensor:
    return logits_of(model, inputs, second_per_grid_ts=inputs.second_per_grid_ts)
