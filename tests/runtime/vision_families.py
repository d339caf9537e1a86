"""Small vision-language models of every family, unmodified, with the sequences that each is trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import Tensor

from fcp_cli.vision import gemma3, gemma4, internvl, qwen2_5_vl, qwen3_vl
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.linear_models import LINEAR, InDouble
from tests.runtime.models import SMALL_DECODER
from tests.runtime.vision_inputs import (
    END,
    IMAGE,
    KERNEL,
    PATCH,
    START,
    TILE_PIXELS,
    TILE_TOKENS,
    VIDEO,
    VOCAB_SIZE,
    Inputs,
    InputsOf,
    of_grids,
    of_shapes,
    of_tiles,
)

Family = Literal[
    "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl", "internvl", "internvl_moe", "gemma3", "gemma4"
]
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFamily:
    """A family.

    Attributes:
        kind: its `model_type`.
        text, vision, whole: settings of its decoder, of its encoder, and besides both.
        inputs_of: sequence `row` of an endless data set, of kind `row % 5`.
        cut: takes a sequence of it apart for fcp.
        read_late: pixels that `cut` is given as a function of their rows.
        types: argument by which the model is told what each token is.
        in_double: computes in fp64 what it computes in fp32.
    """

    kind: str
    text: Settings
    vision: Settings
    whole: Settings
    inputs_of: InputsOf
    cut: Callable[..., VisualSequence]
    read_late: str = "pixel_values"
    types: str | None = None
    in_double: bool = False

    def config(self, **text: Any) -> Any:
        """Its configuration; `text`: other settings of the decoder."""
        import transformers

        given: dict[str, Any] = {"text_config": {**self.text, **text}, "vision_config": dict(self.vision), **self.whole}
        return transformers.AutoConfig.for_model(self.kind, **given, tie_word_embeddings=False)

    def plain_model(self) -> Any:
        """As transformers makes it, with random weights."""
        import transformers

        family: Any = transformers.AutoModelForImageTextToText
        # Experts as a loop over them: the grouped products of CPUs know no fp64.
        return family.from_config(self.config(), experts_implementation="eager")

    def model(self) -> Any:
        """As transformers makes it, for comparisons in fp64."""
        return _in_double(self.plain_model()) if self.in_double else self.plain_model()

    def sequence(self, inputs: Inputs, labels: Any) -> VisualSequence:
        pictures: dict[str, Any] = dict(inputs.pictures)
        late = pictures[self.read_late]
        pictures[self.read_late] = lambda start, stop: late[start:stop]
        return self.cut(self.config(), inputs.input_ids, labels=labels, **pictures)

    def token_types(self, ids: Tensor) -> dict[str, Tensor]:
        """The argument by which the model is told what each token is, if it takes one."""
        return {} if self.types is None else {self.types: (ids == IMAGE).long() + 2 * (ids == VIDEO).long()}

    def logits_alone(self, model: Any, inputs: Inputs) -> Tensor:
        """What transformers itself computes for the sequence, positions included."""
        ids = torch.from_numpy(inputs.input_ids)[None]
        logits: Tensor = model(input_ids=ids, **self.token_types(ids), **inputs.visual).logits
        return logits


def _in_double(made: Any) -> Any:
    """Let a model compute in fp64 what it computes in fp32."""
    own = made.forward

    @wraps(own)
    def forward(*args: Any, **given: Any) -> Any:
        with InDouble():
            return own(*args, **given)

    made.forward = forward
    return made


_DECODER: Settings = {"vocab_size": VOCAB_SIZE, **SMALL_DECODER}
_HEADS_OF_8: Settings = {**_DECODER, "head_dim": 8}
_WINDOWS: Settings = {
    **_HEADS_OF_8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
_EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROTATED: Settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_ENCODER: Settings = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_OF_GRIDS: Settings = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
}
_EMBEDDED: Settings = {**_OF_GRIDS, "num_position_embeddings": 16}
_TOKENS: Settings = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_GRIDS: dict[str, Any] = {"whole": _TOKENS, "read_late": "pixel_values_videos", "types": "mm_token_type_ids"}
_QWEN3_VL: dict[str, Any] = {**_GRIDS, "inputs_of": partial(of_grids, stamped=True), "cut": qwen3_vl.visual_sequence}
_QWEN3_VL_TEXT: Settings = {**_HEADS_OF_8, "num_hidden_layers": 4, "rope_parameters": _ROTATED}
_QWEN3_5_TEXT: Settings = {
    **LINEAR,
    "vocab_size": VOCAB_SIZE,
    "head_dim": 16,
    "rope_parameters": {**_ROTATED, "partial_rotary_factor": 0.5},
}
_INTERNVL: dict[str, Any] = {
    "kind": "internvl",
    "vision": {**_ENCODER, "image_size": [TILE_PIXELS] * 2, "patch_size": [2, 2]},
    "whole": {"image_token_id": IMAGE, "image_seq_length": TILE_TOKENS},
    "inputs_of": of_tiles,
    "cut": internvl.visual_sequence,
}

FAMILIES: Mapping[Family, VisionFamily] = {
    "qwen3_vl": VisionFamily(
        kind="qwen3_vl",
        text=_QWEN3_VL_TEXT,
        vision={**_EMBEDDED, "deepstack_visual_indexes": [0, 1]},
        **_QWEN3_VL,
    ),
    "qwen3_vl_moe": VisionFamily(
        kind="qwen3_vl_moe",
        text={**_QWEN3_VL_TEXT, **_EXPERTS},
        vision={**_EMBEDDED, "deepstack_visual_indexes": [0, 1]},
        **_QWEN3_VL,
    ),
    "qwen3_5": VisionFamily(kind="qwen3_5", text=_QWEN3_5_TEXT, vision=_EMBEDDED, **_QWEN3_VL),
    "qwen3_5_moe": VisionFamily(kind="qwen3_5_moe", text=_QWEN3_5_TEXT, vision=_EMBEDDED, **_QWEN3_VL),
    "qwen2_5_vl": VisionFamily(
        kind="qwen2_5_vl",
        text={**_DECODER, "num_hidden_layers": 3, "rope_parameters": _ROTATED},
        # Windows of four patches: sides of two to eight patches make one window, several, and cut ones.
        vision={**_OF_GRIDS, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        inputs_of=partial(of_grids, stamped=False),
        cut=qwen2_5_vl.visual_sequence,
        **_GRIDS,
    ),
    "internvl": VisionFamily(text={**_DECODER, "model_type": "qwen2"}, **_INTERNVL),
    "internvl_moe": VisionFamily(text={**_HEADS_OF_8, **_EXPERTS, "model_type": "qwen3_moe"}, **_INTERNVL),
    "gemma3": VisionFamily(
        kind="gemma3",
        text={**_WINDOWS, "model_type": "gemma3_text"},
        vision={
            **_ENCODER,
            "model_type": "siglip_vision_model",
            "image_size": TILE_PIXELS,
            "patch_size": 2,
            "vision_use_head": False,
        },
        whole={
            "mm_tokens_per_image": TILE_TOKENS,
            "image_token_index": IMAGE,
            "boi_token_index": IMAGE + 1,
            "eoi_token_index": IMAGE + 2,
        },
        inputs_of=of_tiles,
        cut=gemma3.visual_sequence,
        types="token_type_ids",
        in_double=True,
    ),
    "gemma4": VisionFamily(
        kind="gemma4",
        text={
            **_WINDOWS,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 16,
            "use_bidirectional_attention": "vision",
        },
        vision={
            **_ENCODER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": KERNEL,
            "patch_size": PATCH,
            "position_embedding_size": 16,
        },
        whole={"audio_config": None, "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": VIDEO + 1},
        inputs_of=of_shapes,
        cut=gemma4.visual_sequence,
        types="mm_token_type_ids",
        in_double=True,
    ),
}
