"""The first stage on made-up data sets; `benchmarks.encoder_balance` has all of them, and more rows."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.encoder_balance import TARGET, could_be_even, data_set, spreads

pytestmark = [pytest.mark.torch, pytest.mark.hf]

MODELS = {"qwen3-vl": "qwen3-vl-8b", "internvl": "internvl3-8b"}


@pytest.mark.parametrize("name", ["internvid", "openvid", "mixed"])
def test_ranks_of_a_group_encode_within_a_tenth_of_their_even_share(name: str) -> None:
    packs = spreads(*data_set(name, "qwen3-vl-8b", "qwen3-vl", rows=60), 8, 16_384)
    assert max(pack.balanced for pack in packs) <= TARGET
    assert max(pack.without for pack in packs) > TARGET


@pytest.mark.parametrize("processor", MODELS)
@pytest.mark.parametrize("name", ["msrvtt", "internvid", "openvid", "mixed"])
def test_packs_of_few_parts_are_as_even_as_their_parts_allow(name: str, processor: str) -> None:
    """With few tokens to a rank a pack has a handful of frames, and a tenth is not always to be had."""
    for seed in range(2):
        data = data_set(name, MODELS[processor], processor, rows=60, seed=seed)
        for degree in (2, 3, 8):
            for pack in spreads(*data, degree, 4096):
                assert pack.balanced <= TARGET or not could_be_even(pack.work, degree), (seed, degree, pack.work)
