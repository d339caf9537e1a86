"""Which member encodes which part of a pack's images and videos, and whose tokens they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.visuals import VisualPack, VisualShard, begin_visual_shard
from fcp_cli.verification.emulation import Meeting, thread_session
from fcp_cli.vision.parts import PixelRows, PixelsRead, VisualPart, VisualSequence
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.torch


def part(start_token: int, num_tokens: int, work: float = 1.0) -> VisualPart:
    """One whose pixels are its tokens' positions."""
    return VisualPart(
        kind="image",
        start_token=start_token,
        num_tokens=num_tokens,
        work=work,
        grid=(2, 2 * num_tokens),
        pixels=lambda: torch.arange(start_token, start_token + num_tokens),
    )


def shards(lengths: Sequence[int], parts: Sequence[Sequence[VisualPart]], degree: int) -> list[VisualShard]:
    return wave([pack(lengths, parts, range(degree))])


def pack(lengths: Sequence[int], parts: Sequence[Sequence[VisualPart]], ranks: Sequence[int]) -> VisualPack:
    layout = shard_layout(tuple(lengths), len(ranks))
    return VisualPack(parts=parts, rows=range(len(parts)), layout=layout, ranks=tuple(ranks))


def wave(packs: Sequence[VisualPack]) -> list[VisualShard]:
    """The shards of all ranks, which are numbered as they stand in the packs."""
    begun = [begin_visual_shard(packs, rank=rank) for rank in range(sum(len(pack.ranks) for pack in packs))]
    assert None not in begun
    return [shard() for shard in begun if shard is not None]


def test_ranks_of_a_wave_whose_sequences_have_no_images_encode_those_of_others() -> None:
    frames = [part(10 * i, 10) for i in range(8)]
    found = wave([pack([80], [frames], [0, 1]), pack([30], [[]], [2]), pack([], [], [3])])
    assert [len(shard.parts) for shard in found] == [2, 2, 2, 2]
    assert [len(shard.kinds) > 0 for shard in found] == [True, True, False, False]
    assert sum(len(shard.kinds) for shard in found) == 80


def test_of_a_wave_only_what_is_beyond_an_even_share_leaves_its_ring() -> None:
    here, there = [part(10 * i, 10) for i in range(6)], [part(10 * i, 10) for i in range(2)]
    found = wave([pack([60], [here], [0]), pack([20], [there], [1])])
    assert [len(shard.parts) for shard in found] == [4, 4]
    assert [found[0].route.sends[1].size, found[1].route.sends[0].size] == [0, 20]


def test_the_members_of_a_ring_share_a_video_whoever_holds_its_tokens() -> None:
    """Sixteen frames of ten tokens behind 400 tokens of text: their tokens lie with one member, their work with all."""
    layout = shard_layout((560,), 4)
    frames = [part(400 + 10 * i, 10) for i in range(16)]
    assert len({member for member in range(4) for at in layout.position_ids(member).tolist() if at >= 420}) < 4
    assert [len(shard.parts) for shard in shards([560], [frames], 4)] == [4, 4, 4, 4]


def test_an_image_may_span_several_shards_and_its_pixels_are_read_once() -> None:
    found = shards([40], [[part(3, 30)]], 3)
    assert sum(shard.pixels is not None for shard in found) == 1
    assert sum(len(shard.kinds) for shard in found) == 30
    assert all(len(shard.kinds) > 0 for shard in found)


def test_a_pack_without_images_has_no_share() -> None:
    assert begin_visual_shard([pack((5, 6), [(), ()], (0, 1))], rank=0) is None


def test_of_a_sequence_that_the_plan_cuts_the_tokens_left_are_filled() -> None:
    (shard,) = shards([10], [[part(2, 4), part(8, 5), part(20, 5)]], 1)
    assert [one.start_token for one in shard.parts] == [2, 8]  # the third lies beyond the cut
    assert shard.route.sends[0].tolist() == [0, 1, 2, 3, 4, 5]  # of 9 embeddings, those of 6 tokens


def test_parts_out_of_order_are_refused() -> None:
    with pytest.raises(RunError, match=r"part at token 5 .* begins before the one before it ends, at 6"):
        shards([10], [[part(2, 4), part(5, 2)]], 1)


def test_images_without_an_encoder_stop_the_job(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0], [9])]], num_ranks=1)
    session = thread_session(plan, lambda row: VisualSequence(tokens=range(9), parts=(part(2, 4),)), Meeting(1), 0)
    step = next(session.steps())
    with pytest.raises(RunError, match="step 0, micro-batch 0 has images or videos, but no vision encoder ran for it"):
        for microbatch in step:
            microbatch.ring.attention_calls += 1


class Unreadable:
    """A reader of images that cannot be decoded."""

    def begin(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], PixelsRead]:
        blank = [torch.zeros(stop - start) for start, stop in ranges]
        return lambda: PixelsRead(rows=blank, problem="image.png is truncated")


@pytest.mark.parametrize(("mean_over", "denominator"), [("rows", 2), ("tokens", 6 + 4)])
def test_a_skipped_row_counts_in_no_mean(
    tmp_path: Path, mean_over: Literal["rows", "tokens"], denominator: int
) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [[Row([0], [7, 9, 5])]], num_ranks=1)
    bad = replace(part(2, 4), pixels=PixelRows(Unreadable(), 2, 6))

    def fetch(row: int) -> VisualSequence:
        return VisualSequence(tokens=range(9), parts=(bad,) if row == 1 else ())

    session = thread_session(plan, fetch, Meeting(1), 0)
    session.skip_bad_rows = True
    step = next(session.steps(mean_over=mean_over))
    assert (step.bad_rows, step.tokens) == ((1,), denominator)
