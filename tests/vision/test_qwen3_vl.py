"""Sequences with images and videos as Qwen3-VL's processor gives them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.plan.reader import PlanReader
from fcp_cli.runtime.data.loader import load_shard
from tests.runtime.plans import Row, write_plan

pytest.importorskip("transformers")

from fcp_cli.vision.qwen3_vl import encode, visual_sequence
from tests.runtime.grid_inputs import END, IMAGE, PATCH_VALUES, START, VIDEO
from tests.runtime.qwen3_vl_models import config, inputs_of, model, sequence
from tests.runtime.vision_models import assert_exchange_keeps_encoder_gradients

pytestmark = [pytest.mark.torch, pytest.mark.hf]


@cache
def positions_of_transformers(row: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[3, tokens]"""
    inputs = inputs_of(row)
    ids = torch.from_numpy(inputs.input_ids)[None]
    wanted, _ = model().model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        image_grid_thw=inputs.image_grid_thw,
        video_grid_thw=inputs.video_grid_thw,
    )
    found: np.ndarray[Any, np.dtype[np.int64]] = wanted[:, 0].numpy()
    return found


@pytest.mark.parametrize("row", range(20))
def test_positions_are_those_of_transformers(row: int) -> None:
    found, wanted = sequence(inputs_of(row), None).position_ids, positions_of_transformers(row)
    if found is None:  # text alone counts 0, 1, 2, ...
        found = np.broadcast_to(np.arange(wanted.shape[1]), wanted.shape)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("members", [1, 2, 3])
def test_every_shard_has_the_positions_of_transformers_at_its_tokens(members: int, tmp_path: Path) -> None:
    lengths = [len(inputs_of(row).input_ids) for row in range(5)]
    plan = write_plan(tmp_path / "plan.parquet", [[Row(range(members), lengths)]], num_ranks=members)
    whole = np.concatenate([positions_of_transformers(row) for row in range(5)], axis=1)
    (microbatch,) = next(PlanReader(plan).steps()).microbatches()
    for rank in range(members):
        shard = load_shard(microbatch, lambda row: sequence(inputs_of(row), None), rank=rank)
        assert shard.position_ids[:, 0].tolist() == whole[:, shard.layout.index(rank)].tolist()


def test_a_rank_without_pictures_encodes_one_blank_patch() -> None:
    assert encode(model().model, (), None).shape == (1, 1 + 2, 32)  # an embedding, two deepstack levels; nobody asks


def test_the_exchange_keeps_the_gradient_of_every_parameter_of_encoder_merger_and_deepstack() -> None:
    assert_exchange_keeps_encoder_gradients("qwen3_vl", range(5), members=3)


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
    ({"image_grid_thw": [[1, 2, 4]]}, "the 2 image placeholders from token 1 on are not all together"),
    ({"image_grid_thw": [[1, 2, 4]], "pixel_values": None}, "a sequence has images but no pixel_values"),
    ({"video_grid_thw": [[1, 2, 4]]}, r"has 0 video placeholders \(token none\), but its grids make 2 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_grids_that_do_not_fit_the_placeholders_are_refused(arguments: dict[str, Any], message: str) -> None:
    ids = [9, 5] if "video_grid_thw" in arguments else [9, IMAGE, 5, IMAGE]
    with pytest.raises(RunError, match=message):
        visual_sequence(config(), ids, **{"pixel_values": torch.zeros(0), **arguments})
