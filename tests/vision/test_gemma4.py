"""Sequences with images as Gemma 4's processor gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.util.masks import CAUSAL, Mask, segments

pytest.importorskip("transformers")

from fcp_cli.vision.gemma4 import visual_sequence
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE, MOST_PATCHES, PATCH, positions_of_patches

pytestmark = [pytest.mark.torch, pytest.mark.hf]

config = FAMILIES["gemma4"].config

# Images of 4 x 2 and 2 x 6 patches, of which 2 x 2 become a token.
GRIDS = [(4, 2), (2, 6)]
IDS = [1, IMAGE, IMAGE, 3, IMAGE, IMAGE, IMAGE]
PIXELS = torch.zeros(2, MOST_PATCHES, 3 * PATCH**2)


def sequence(ids: list[int] = IDS, **changes: Any) -> Any:
    given = {
        "pixel_values": PIXELS,
        "image_position_ids": torch.stack([positions_of_patches(*grid) for grid in GRIDS]),
        **changes,
    }
    return visual_sequence(given.pop("config", config()), ids, **given)


def test_parts_are_images_of_any_shape_and_their_tokens_see_each_other_in_windows_alone() -> None:
    found = sequence()
    assert found.mask == segments([(1, 3), (4, 7)], windows_only=True)
    assert [(part.start_token, part.num_tokens, part.grid) for part in found.parts] == [(1, 2, (4, 2)), (4, 3, (2, 6))]
    assert [tuple(part.pixels().shape) for part in found.parts] == 2 * [(1, MOST_PATCHES, 3 * PATCH**2)]


def test_images_that_follow_each_other_at_once_see_each_other_as_in_transformers() -> None:
    assert sequence([IMAGE] * 5).mask == segments([(0, 5)], windows_only=True)


@pytest.mark.parametrize("both_ways", [None, "vision"])
def test_text_alone_and_smaller_checkpoints_are_causal(both_ways: str | None) -> None:
    own = config(use_bidirectional_attention=both_ways)
    assert visual_sequence(own, [1, 2]).mask == CAUSAL
    expected: Mask = CAUSAL if both_ways is None else segments([(1, 3), (4, 7)], windows_only=True)
    assert sequence(config=own).mask == expected


def test_positions_are_those_of_transformers_image_processor() -> None:
    Image = pytest.importorskip("PIL.Image")
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    images = [Image.fromarray(np.full((height, width, 3), 90, np.uint8)) for height, width in ((300, 500), (900, 20))]
    made = Gemma4ImageProcessorPil(max_soft_tokens=70)(images=images, return_tensors="pt")
    tokens = made["num_soft_tokens_per_image"]
    real = config()
    real.vision_config.pooling_kernel_size = 3
    found = visual_sequence(
        real,
        [1, *[IMAGE] * int(sum(tokens))],
        pixel_values=made["pixel_values"],
        image_position_ids=made["image_position_ids"],
    )
    assert [part.num_tokens for part in found.parts] == [int(one) for one in tokens]
    assert found.parts[0].grid[1] > found.parts[0].grid[0] and found.parts[1].grid[0] > found.parts[1].grid[1]


@pytest.mark.parametrize(
    ("ids", "changes", "message"),
    [
        (IDS[:-1], {}, "has 4 image placeholders .token 60., but its 2 images make 5 tokens; give"),
        (IDS, {"pixel_values": None}, "2 images make 5 tokens, without pixels"),
        (IDS, {"image_position_ids": None}, "its 0 images make 0 tokens"),
        ([IMAGE, 1, IMAGE, 3, *[IMAGE] * 3], {}, "the 2 image placeholders from token 0 on are not contiguous"),
        ([*IDS, IMAGE + 1], {}, "has video placeholders"),
        ([*IDS, IMAGE + 2], {}, "has audio placeholders"),
        (
            IDS,
            {"image_position_ids": torch.stack([positions_of_patches(*grid).flip(-1) for grid in GRIDS])},
            "image_position_ids of image 0 are not those of 2 rows of 4 patches",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(ids: list[int], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        sequence(ids, **changes)
