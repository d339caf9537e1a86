"""Sequences with images and videos as Qwen2.5-VL's processor gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from inline_snapshot import snapshot

from tests.messages import raises

pytest.importorskip("transformers")

from fcp_cli.vision.qwen2_5_vl import visual_sequence
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE, PATCH_VALUES, VIDEO

pytestmark = [pytest.mark.torch, pytest.mark.hf]

config = FAMILIES["qwen2_5_vl"].config


def test_times_are_rounded_as_transformers_rounds_them_whatever_kind_of_number_a_second_is() -> None:
    grid, ids = torch.tensor([[60, 2, 2]]), np.array([1, *[VIDEO] * 60, 2])
    rates = (0.1, 1 / 3, 0.7, 1.0, 2 / 23.976, np.float32(0.3), torch.tensor(0.15))
    for seconds in [*rates, *np.random.default_rng(0).uniform(0.01, 4, size=200)]:
        found = visual_sequence(
            config(), ids, video_grid_thw=grid, second_per_grid_ts=[seconds], pixel_values_videos=torch.zeros(240, 1)
        )
        types = torch.from_numpy(2 * (ids == VIDEO))[None]
        wanted, _ = model_positions(torch.from_numpy(ids)[None], types, grid, [seconds])
        assert found.position_ids is not None
        assert found.position_ids.tolist() == wanted[:, 0].tolist(), seconds


_MODEL: list[Any] = []


def model_positions(*arguments: Any) -> Any:
    _MODEL[:] = _MODEL or [FAMILIES["qwen2_5_vl"].model().model]
    ids, types, grid, seconds = arguments
    return _MODEL[0].get_rope_index(ids, mm_token_type_ids=types, video_grid_thw=grid, second_per_grid_ts=seconds)


def test_the_work_of_a_part_is_the_multiplications_that_its_encoder_makes() -> None:
    """Counted by torch over the blocks, windows at the edges cut off; patch embedding and merger left out."""
    from torch.utils.flop_counter import FlopCounterMode

    tower = FAMILIES["qwen2_5_vl"].model().model.visual.eval()
    tower.set_attn_implementation("eager")
    for height, width in ((2, 2), (4, 4), (8, 8), (6, 10), (2, 14), (12, 16)):
        ids, pixels = [IMAGE] * (height * width // 4), torch.zeros(height * width, PATCH_VALUES)
        (part,) = visual_sequence(config(), ids, image_grid_thw=[[1, height, width]], pixel_values=pixels).parts
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            tower(pixels, grid_thw=torch.tensor([[1, height, width]]))
        by_module = counted.get_flop_counts()
        blocks = sum(sum(by_module[f"Qwen2_5_VisionTransformerPretrainedModel.blocks.{i}"].values()) for i in range(3))
        assert part.work == blocks / 2, (height, width)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"video_grid_thw": [[2, 2, 2]], "second_per_grid_ts": []},
        snapshot("RunError: a sequence has 1 videos but 0 second_per_grid_ts; give one for each"),
    ),
    (
        {"video_grid_thw": [[2, 2, 2]]},
        snapshot("RunError: the 2 video placeholders from token 1 on are not contiguous"),
    ),
    (
        {"video_grid_thw": [[3, 2, 2]]},
        snapshot(
            "RunError: a sequence has 2 video placeholders (token 61), but its grids make 3 tokens; give the processor's video_grid_thw of this sequence"
        ),
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_videos_that_do_not_fit_their_placeholders_are_refused(arguments: dict[str, Any], message: str) -> None:
    with raises(message):
        visual_sequence(config(), [9, VIDEO, 5, VIDEO], pixel_values_videos=torch.zeros(8, PATCH_VALUES), **arguments)
