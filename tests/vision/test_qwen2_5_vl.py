"""Sequences with images and videos as Qwen2.5-VL's processor gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inline_snapshot import snapshot

from fcp_cli.plan.reader import PlanReader
from fcp_cli.runtime.data.loader import load_shard
from tests.messages import raises
from tests.runtime.plans import Row, write_plan

pytest.importorskip("transformers")

from fcp_cli.vision.qwen2_5_vl import encode, visual_sequence
from tests.runtime.grid_inputs import IMAGE, PATCH_VALUES, VIDEO
from tests.runtime.qwen2_5_vl_models import config, inputs_of, model, sequence
from tests.runtime.vision_models import assert_exchange_keeps_encoder_gradients

pytestmark = [pytest.mark.torch, pytest.mark.hf]


def positions_of_transformers(row: int, **changes: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[3, tokens]"""
    inputs = inputs_of(row)
    ids = torch.from_numpy(inputs.input_ids)[None]
    arguments = {
        "image_grid_thw": inputs.image_grid_thw,
        "video_grid_thw": inputs.video_grid_thw,
        "second_per_grid_ts": inputs.second_per_grid_ts,
    }
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    wanted, _ = model().model.get_rope_index(ids, mm_token_type_ids=types, **{**arguments, **changes})
    found: np.ndarray[Any, np.dtype[np.int64]] = wanted[:, 0].numpy()
    return found


@pytest.mark.parametrize("row", range(20))
def test_positions_are_those_of_transformers(row: int) -> None:
    found, wanted = sequence(inputs_of(row), None).position_ids, positions_of_transformers(row)
    if found is None:  # text alone counts 0, 1, 2, ...
        found = np.broadcast_to(np.arange(wanted.shape[1]), wanted.shape)
    assert found.tolist() == wanted.tolist()


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
    _MODEL[:] = _MODEL or [model().model]
    ids, types, grid, seconds = arguments
    return _MODEL[0].get_rope_index(ids, mm_token_type_ids=types, video_grid_thw=grid, second_per_grid_ts=seconds)


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
    assert encode(model().model, (), None).shape == (1, 1, 32)


def test_the_exchange_keeps_the_gradient_of_every_parameter_of_encoder_and_merger() -> None:
    assert_exchange_keeps_encoder_gradients("qwen2_5_vl", range(5), members=3)


def test_the_work_of_a_part_is_the_multiplications_that_its_encoder_makes() -> None:
    """Counted by torch over the blocks, windows at the edges cut off; patch embedding and merger left out."""
    from torch.utils.flop_counter import FlopCounterMode

    tower = model().model.visual.eval()
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
        snapshot("RunError: the 2 video placeholders from token 1 on are not all together"),
    ),
    (
        {"video_grid_thw": [[3, 2, 2]]},
        snapshot(
            "RunError: a sequence has 2 video placeholders (token 61), but its grids make 3 tokens; give the processor's video_grid_thw of this very sequence"
        ),
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_videos_that_do_not_fit_their_placeholders_are_refused(arguments: dict[str, Any], message: str) -> None:
    with raises(message):
        visual_sequence(config(), [9, VIDEO, 5, VIDEO], pixel_values_videos=torch.zeros(8, PATCH_VALUES), **arguments)
