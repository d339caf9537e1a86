"""Sequences with tiles as InternVL's processor gives them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from tests.messages import raises

pytest.importorskip("transformers")

from fcp_cli.vision.internvl import visual_sequence
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE

pytestmark = [pytest.mark.torch, pytest.mark.hf]

config = FAMILIES["internvl"].config

TILE = [IMAGE] * 4


def test_every_tile_is_a_part_and_read_when_asked() -> None:
    asked: list[tuple[int, int]] = []

    def pixels(start: int, stop: int) -> torch.Tensor:
        asked.append((start, stop))
        return torch.zeros(stop - start, 3, 8, 8)

    found = visual_sequence(config(), [1, *TILE, *TILE, 2, *TILE], pixel_values=pixels)
    assert [(part.start_token, part.num_tokens, part.grid) for part in found.parts] == [
        (1, 4, (4, 4)),
        (5, 4, (4, 4)),
        (10, 4, (4, 4)),
    ]
    assert found.position_ids is None
    found.parts[2].pixels()
    assert asked == [(2, 3)]


WRONG: dict[str, tuple[list[int], Any]] = {
    "fewer placeholders than tiles make": (TILE[:3], torch.zeros(1, 3, 8, 8)),
    "more tiles than placeholders": (TILE, torch.zeros(2, 3, 8, 8)),
    "no tiles": (TILE, None),
    "placeholders apart": ([*TILE[:2], 5, *TILE[:2]], torch.zeros(1, 3, 8, 8)),
}
WRONG_MESSAGES = snapshot(
    {
        "fewer placeholders than tiles make": "RunError: a sequence has 3 placeholders (token 60), 4 for each tile, but 1 tiles; give the processor's pixel_values of this sequence",
        "more tiles than placeholders": "RunError: a sequence has 4 placeholders (token 60), 4 for each tile, but 2 tiles; give the processor's pixel_values of this sequence",
        "no tiles": "RunError: a sequence has 4 placeholders (token 60), 4 for each tile, but no tiles; give the processor's pixel_values of this sequence",
        "placeholders apart": "RunError: the 4 placeholders from token 0 on are not contiguous",
    }
)


@pytest.mark.parametrize("case", WRONG)
def test_tiles_that_do_not_fit_the_placeholders_are_refused(case: str) -> None:
    ids, pixels = WRONG[case]
    with raises(WRONG_MESSAGES[case]):
        visual_sequence(config(), ids, pixel_values=pixels)
