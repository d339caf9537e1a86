"""Made-up sizes: their distributions against what was published, and their files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.clips import CLIP_SETS, NAMES, Scale, media_records, write_media_records
from fcp_cli.manifest.read import read_manifest
from tests.manifest.datasets import build

ROWS = 4000


def seconds(name: str) -> np.ndarray:
    videos = [record["videos"][0] for record in media_records(name, ROWS, seed=0)]
    return np.array([video["frames"] / video["fps"] for video in videos])


@pytest.mark.parametrize(("name", "mean"), [("msrvtt", 41.2 * 3600 / 10e3), ("internvid", 760e3 * 3600 / 234e6)])
def test_durations_have_the_mean_that_hours_and_clips_give(name: str, mean: float) -> None:
    assert seconds(name).mean() == pytest.approx(mean, rel=0.06)


@pytest.mark.lengthy
def test_durations_have_the_published_shapes() -> None:
    msrvtt, internvid, openvid = (seconds(name) for name in CLIP_SETS)
    assert (msrvtt.min(), msrvtt.max()) >= (10.0, 20.0)
    assert msrvtt.max() <= 30.1
    published = {2.0: 0.36, 4.0: 0.62, 10.0: 0.85, 20.0: 0.93}  # InternVid, Figure 4
    for clip_seconds, share in published.items():
        assert (internvid < clip_seconds).mean() == pytest.approx(share, abs=0.03)
    for clips in (internvid, openvid):
        assert (clips < 8).mean() > 0.5
        assert 0.0 < (clips > 64).mean() < 0.05
    assert openvid.mean() == pytest.approx(7.2, rel=0.06)


@pytest.mark.parametrize("name", CLIP_SETS)
def test_every_figure_has_a_source(name: str) -> None:
    figures = {"seconds", "sizes", "frames_per_second", "caption_tokens"}
    assert set(CLIP_SETS[name].sources) == figures
    assert sum(CLIP_SETS[name].sizes.values()) == pytest.approx(1.0)


def test_a_mixed_set_holds_every_kind_of_sequence() -> None:
    kinds = [
        (len(record.get("images", ())) > 0) + 2 * (len(record.get("images", ())) > 1) + 4 * ("videos" in record)
        for record in media_records("mixed", 400, seed=0)
    ]
    shares = np.bincount(kinds, minlength=5) / 400
    assert shares[[0, 1, 3, 4]] == pytest.approx([0.2, 0.2, 0.2, 0.4], abs=0.07)


def test_a_row_depends_on_the_seed_and_its_number_alone() -> None:
    few, many = (list(itertools.islice(media_records("mixed", rows, seed=3), 5)) for rows in (5, 50))
    assert few == many
    assert few != list(media_records("mixed", 5, seed=4))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_up_builds_into_a_manifest(name: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.jsonl"
    write_media_records(path, name, 50, seed=0, scale=Scale(short_side=64))
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert all(min(one["height"], one["width"]) == 64 for one in record.get("videos", record.get("images", [])))
    build(path, tmp_path / "m.parquet", kind="media", processor="qwen3-vl")
    assert len(read_manifest(tmp_path / "m.parquet")) == 50


def test_clips_may_be_written_at_the_rate_that_a_model_sees() -> None:
    (record,) = media_records("openvid", 1, seed=0, scale=Scale(frames_per_second=2.0))
    (original,) = media_records("openvid", 1, seed=0)
    video, published = record["videos"][0], original["videos"][0]
    assert (video["fps"], published["fps"]) == (2.0, 30.0)
    assert video["frames"] == pytest.approx(published["frames"] / 15, abs=1)
