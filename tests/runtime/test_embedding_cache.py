"""Embeddings of a frozen encoder that are computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache
from fcp_cli.runtime.pictures.visuals import VisualPack, VisualShard
from fcp_cli.verification.emulation import Meeting
from fcp_cli.verification.replay import Replayed, gradients_on_rank, thread_session
from fcp_cli.vision.parts import VisualPart
from tests.runtime.plans import write_plan
from tests.runtime.visual_shards import visual_shard

pytest.importorskip("transformers")

from tests.runtime.vision_models import VisionCase, build, fetch, rows, unmodified

pytestmark = [pytest.mark.torch, pytest.mark.hf]

CASE = VisionCase(frozen=True)


def bound(folder: Path, **changes: Any) -> EmbeddingCache:
    cache = EmbeddingCache(folder, **changes)
    cache.bind(unmodified(CASE))
    return cache


def run(plan: Path, cache: EmbeddingCache | None) -> Replayed:
    model, loss = build(CASE)
    session = thread_session(plan, fetch(CASE), Meeting(1), 0)
    session.embedding_cache = cache
    return gradients_on_rank(session, model, loss)


def test_what_is_cached_trains_to_the_same_bits_and_is_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = write_plan(tmp_path / "plan.parquet", [rows(([0], [0, 1, 2, 3, 4]))], num_ranks=1)
    computed = run(plan, None)
    first, again = bound(tmp_path / "cache"), bound(tmp_path / "cache")
    cold, warm = run(plan, first), run(plan, again)
    for found in (cold, warm):
        assert (found.losses == computed.losses).all()
        assert (found.gradients == computed.gradients).all()
    assert (first.hits, again.misses) == (0, 0)
    assert again.hits == first.misses > 3


def part(start_token: int, value: float) -> VisualPart:
    """One of two tokens whose two patches have this value."""
    return VisualPart(
        kind="image",
        start_token=start_token,
        num_tokens=2,
        work=1.0,
        grid=(1, 2),
        pixels=lambda: torch.full((2,), value),
    )


def shard_of(cache: EmbeddingCache, *values: float) -> VisualShard:
    parts = [part(2 * number, value) for number, value in enumerate(values)]
    layout = shard_layout((2 * len(parts),), 1)
    found = visual_shard([VisualPack(parts=[parts], rows=[7], layout=layout, ranks=(0,))], rank=0, cache=cache)
    assert found is not None
    return found


def test_new_parts_stand_among_cached_ones_in_the_order_of_their_tokens(tmp_path: Path) -> None:
    def encoded(shard: VisualShard) -> Tensor:
        """The pixels themselves, one level; a blank one where there are none."""
        return (torch.zeros(1) if shard.pixels is None else shard.pixels).view(-1, 1, 1)

    cache = bound(tmp_path)
    first = shard_of(cache, 1.0, 2.0)
    assert first.embeddings(encoded(first), cache).flatten().tolist() == [1, 1, 2, 2]
    second = shard_of(cache, 3.0, 1.0, 4.0, 2.0)
    assert len(second.parts) == 2
    assert second.embeddings(encoded(second), cache).flatten().tolist() == [3, 3, 1, 1, 4, 4, 2, 2]
    third = shard_of(cache, 4.0, 3.0)
    assert third.pixels is None
    assert third.embeddings(encoded(third), cache).flatten().tolist() == [4, 4, 3, 3]


def test_damaged_files_and_other_encoders_and_precisions_miss(tmp_path: Path) -> None:
    cache, picture = bound(tmp_path), part(0, 1.0)
    cache.write([cache.key(picture)], [torch.ones(2, 1, 3)])
    assert cache.read(cache.key(picture)) is not None
    other = EmbeddingCache(tmp_path)
    model = unmodified(CASE)
    with torch.no_grad():
        next(model.model.visual.parameters()).flatten()[0].add_(1e-9)
    other.bind(model)
    assert other.read(other.key(picture)) is None
    assert bound(tmp_path, about="amp").key(picture) != cache.key(picture)
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        file.write_bytes(file.read_bytes()[:-1])
    assert cache.read(cache.key(picture)) is None


def test_a_trained_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        EmbeddingCache(tmp_path).bind(unmodified(VisionCase()))
    assert str(refused.value) == (
        "cached embeddings are those of a frozen vision encoder, but this run trains it "
        "(model.visual.patch_embed.proj.weight); freeze it (--freeze-vision), or drop the cache (--cache-embeddings)"
    )


def test_a_disk_that_takes_no_more_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Path, __: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    cache = bound(tmp_path)
    cache.write(["ab1", "ab2"], [torch.ones(2), torch.ones(2)])
    cache.write(["ab3"], [torch.ones(2)])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(
        "no more embeddings are cached; images without one are encoded in every epoch: cannot write"
    )
    assert "No space left on device (" in said[0]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
