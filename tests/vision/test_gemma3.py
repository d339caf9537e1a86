"""Sequences with images as Gemma 3's processor gives them."""

from __future__ import annotations

import pytest
import torch

from fcp_cli.util.masks import CAUSAL, segments

pytest.importorskip("transformers")

from fcp_cli.vision.gemma3 import visual_sequence
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE

pytestmark = [pytest.mark.torch, pytest.mark.hf]

config = FAMILIES["gemma3"].config

TILE = [IMAGE] * 4


def test_the_tokens_of_each_image_see_each_other() -> None:
    pixels = torch.zeros(2, 3, 8, 8)
    found = visual_sequence(config(), [1, *TILE, 3, *TILE], pixel_values=pixels)
    assert found.mask == segments([(1, 5), (6, 10)])
    assert [(part.start_token, part.num_tokens, part.grid) for part in found.parts] == [(1, 4, (4, 4)), (6, 4, (4, 4))]
    assert visual_sequence(config(), [1, 2]).mask == CAUSAL
    assert visual_sequence(config(), [*TILE, *TILE], pixel_values=pixels).mask == segments([(0, 8)])  # as transformers
