"""Sequences with images and videos as Qwen3-VL's processor gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fcp_cli.errors import RunError

pytest.importorskip("transformers")

from fcp_cli.vision.qwen3_vl import visual_sequence
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import END, IMAGE, PATCH_VALUES, START, VIDEO

pytestmark = [pytest.mark.torch, pytest.mark.hf]

config = FAMILIES["qwen3_vl"].config


def test_a_video_is_cut_into_its_frame_pairs_and_read_when_asked() -> None:
    asked: list[tuple[int, int]] = []

    def pixels(start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return torch.zeros(stop - start, PATCH_VALUES)

    ids = [1, START, VIDEO, VIDEO, END, 2, START, VIDEO, VIDEO, END]
    found = visual_sequence(config(), ids, video_grid_thw=[[2, 2, 4]], pixel_values_videos=pixels)
    assert [(part.start_token, part.num_tokens, part.grid) for part in found.parts] == [
        (2, 2, (2, 4)),
        (7, 2, (2, 4)),
    ]
    assert asked == []
    found.parts[1].pixels()
    assert asked == [(8, 16)]


def test_larger_pictures_weigh_more_than_their_patches() -> None:
    """Attention within a picture grows with the square of its patches."""
    grids = [[1, 2, 2], [1, 8, 8]]
    ids = [IMAGE, 5, *[IMAGE] * 16]
    small, large = visual_sequence(
        config(), ids, image_grid_thw=grids, pixel_values=torch.zeros(68, PATCH_VALUES)
    ).parts
    assert large.work > 16 * small.work


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"image_grid_thw": [[1, 4, 4]]}, r"has 2 image placeholders \(token 60\), but its grids make 4 tokens"),
    ({}, r"has 2 image placeholders \(token 60\), but its grids make 0 tokens"),
    ({"image_grid_thw": [[1, 2, 4]]}, "the 2 image placeholders from token 1 on are not contiguous"),
    ({"image_grid_thw": [[1, 2, 4]], "pixel_values": None}, "a sequence has images but no pixel_values"),
    ({"video_grid_thw": [[1, 2, 4]]}, r"has 0 video placeholders \(token none\), but its grids make 2 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_grids_that_do_not_fit_the_placeholders_are_refused(arguments: dict[str, Any], message: str) -> None:
    ids = [9, 5] if "video_grid_thw" in arguments else [9, IMAGE, 5, IMAGE]
    with pytest.raises(RunError, match=message):
        visual_sequence(config(), ids, **{"pixel_values": torch.zeros(0), **arguments})
