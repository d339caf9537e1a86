"""What every family of vision-language models does alike, compared with transformers."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.loader import load_shard
from tests.runtime.plans import Row, write_plan

pytest.importorskip("transformers")

from tests.runtime.vision_families import FAMILIES, Family
from tests.runtime.vision_inputs import IMAGE, VIDEO

pytestmark = [pytest.mark.torch, pytest.mark.hf]

# Families whose positions have three axes, with the arguments that they take beside the grids.
ROTATED: dict[Family, tuple[str, ...]] = {"qwen2_5_vl": ("second_per_grid_ts",), "qwen3_vl": ()}
# One patch or merged patch, whose embedding nobody asks for; Qwen3-VL adds two levels of deepstack to it.
BLANK: dict[Family, tuple[int, int, int]] = {
    "gemma3": (4, 1, 32),
    "gemma4": (1, 1, 32),
    "internvl": (1, 1, 32),
    "qwen2_5_vl": (1, 1, 32),
    "qwen3_vl": (1, 3, 32),
}


@cache
def bare(family: Family) -> Any:
    """The model without its head."""
    return FAMILIES[family].model().model


@cache
def positions_of_transformers(family: Family, row: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[3, tokens]"""
    inputs = FAMILIES[family].inputs_of(row)
    ids = torch.from_numpy(inputs.input_ids)[None]
    given = {name: inputs.pictures[name] for name in ("image_grid_thw", "video_grid_thw", *ROTATED[family])}
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    wanted, _ = bare(family).get_rope_index(ids, mm_token_type_ids=types, **given)
    found: np.ndarray[Any, np.dtype[np.int64]] = wanted[:, 0].numpy()
    return found


@pytest.mark.parametrize("row", range(20))
@pytest.mark.parametrize("family", ROTATED)
def test_positions_are_those_of_transformers(family: Family, row: int) -> None:
    models = FAMILIES[family]
    found, wanted = models.sequence(models.inputs_of(row), None).position_ids, positions_of_transformers(family, row)
    if found is None:  # text alone counts 0, 1, 2, ...
        found = np.broadcast_to(np.arange(wanted.shape[1]), wanted.shape)
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("family", ROTATED)
def test_every_shard_has_the_positions_of_transformers_at_its_tokens(
    family: Family, members: int, tmp_path: Path
) -> None:
    models = FAMILIES[family]
    lengths = [len(models.inputs_of(row).input_ids) for row in range(5)]
    plan = write_plan(tmp_path / "plan.parquet", [[Row(range(members), lengths)]], num_ranks=members)
    whole = np.concatenate([positions_of_transformers(family, row) for row in range(5)], axis=1)
    (microbatch,) = next(PlanReader(plan).steps()).microbatches()
    for rank in range(members):
        shard = load_shard(microbatch, lambda row: models.sequence(models.inputs_of(row), None), rank=rank)
        assert shard.position_ids[:, 0].tolist() == whole[:, shard.layout.index(rank)].tolist()


@pytest.mark.parametrize(("family", "shape"), BLANK.items())
def test_a_rank_without_pictures_encodes_as_little_as_can_be(family: Family, shape: tuple[int, int, int]) -> None:
    assert import_module(f"fcp_cli.vision.{family}").encode(bare(family), (), None).shape == shape
