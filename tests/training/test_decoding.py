"""Pixels of pictures are those of the checkpoint's own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.manifest.pictures import PictureRecords
from fcp_cli.manifest.tokens import open_pictures
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import Family, picture, processor, write_clip, write_processor

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from fcp_cli.training.decoding import Decoder, Values, Wanted

pytestmark = [pytest.mark.torch, pytest.mark.hf, pytest.mark.processes]

FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "internvl")
PLACEHOLDERS: dict[Family, str] = {
    **dict.fromkeys(FAMILIES, "<|image_pad|>"),
    "internvl": "<IMG_CONTEXT>",
    "gemma4": "<|image|>",
}
# Frames, height, width, frames per second; odd ones among them, and a picture that is smaller than a token.
CLIPS = [(7, 40, 64, 10), (30, 50, 30, 25), (61, 90, 160, 30), (5, 24, 100, 5), (3, 64, 64, 24), (100, 14, 34, 12)]


def records_of(folder: Path, records: list[dict[str, Any]]) -> PictureRecords:
    data = write_jsonl(folder / "data.jsonl", records)
    build(data, folder / "m.parquet", kind="media", processor=str(folder / "checkpoint"))
    rows = open_pictures(folder / "m.parquet")
    assert rows is not None
    return rows


def decoded(rows: PictureRecords, row: int, decode: Decoder) -> Values:
    """All rows of the first picture of a manifest row, asked for part by part."""
    found = rows.read(row)
    size = rows.processor.rows_per_part(found.visuals[0])
    ranges = tuple((size * part, size * (part + 1)) for part in range(found.visuals[0].grid[0]))
    return np.concatenate(
        decode(Wanted(picture=found.pictures[0], size=found.sizes[0], visual=found.visuals[0], ranges=ranges))
    )


@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_an_image_has_the_pixels_of_the_processor(family: Family, tmp_path: Path) -> None:
    folder = write_processor(tmp_path / "checkpoint", family)
    images = [picture(90, 40, 0), picture(33, 120, 1).convert("P"), picture(50, 50, 2).convert("L")]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    rows = records_of(tmp_path, [{"image": f"{number}.png", "caption": "it"} for number in range(3)])
    own, decode = processor(folder, family), Decoder(folder, rows.processor)
    for row, image in enumerate(images):
        expected = own(text=[PLACEHOLDERS[family]], images=[image.convert("RGB")], return_tensors="np")["pixel_values"]
        assert np.array_equal(decoded(rows, row, decode), expected)


def test_frames_are_sampled_as_the_formulas_count_them(tmp_path: Path) -> None:
    pytest.importorskip("av")
    write_processor(tmp_path / "checkpoint", "qwen3_vl")
    write_clip(tmp_path / "clip.mp4", 61, 90, 160, 30)
    rows = records_of(tmp_path, [{"video": "clip.mp4", "caption": "it"}])
    decode = Decoder(tmp_path / "checkpoint", rows.processor)
    whole = decoded(rows, 0, decode)
    assert whole.shape == (rows.read(0).visuals[0].patches, 3 * 2 * 8 * 8)
    # The rows of one pair of frames alone are those of it among all.
    found = rows.read(0)
    size = rows.processor.rows_per_part(found.visuals[0])
    (second,) = decode(
        Wanted(picture=found.pictures[0], size=found.sizes[0], visual=found.visuals[0], ranges=((size, 2 * size),))
    )
    assert np.array_equal(second, whole[size : 2 * size])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clip_has_the_tokens_and_pixels_of_the_video_processor(family: Family, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="transformers' video processors need torchvision", exc_type=ImportError)
    av = pytest.importorskip("av")
    from transformers.video_utils import VideoMetadata

    folder = write_processor(tmp_path / "checkpoint", family)
    for number, clip in enumerate(CLIPS):
        write_clip(tmp_path / f"{number}.mp4", *clip)
    names = [f"{number}.mp4" for number in range(len(CLIPS))]
    rows = records_of(tmp_path, [{"conversations": [{"from": "gpt", "value": "<video>!"}], "video": n} for n in names])
    own, decode = processor(folder, family, videos=True), Decoder(folder, rows.processor)
    text = own.apply_chat_template(
        [{"role": "assistant", "content": [{"type": "video"}, {"type": "text", "text": "!"}]}], tokenize=False
    )
    sampled = {} if family == "internvl" else {"do_sample_frames": True}
    for row, name in enumerate(names):
        with av.open(str(tmp_path / name)) as container:
            rate = float(container.streams.video[0].average_rate)
            frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        metadata: Any = VideoMetadata
        metadata = [metadata(total_num_frames=len(frames), fps=rate)]
        found = own(text=[text], videos=[frames], video_metadata=metadata, return_tensors="pt", **sampled)
        assert found["input_ids"][0].tolist() == rows.read(row).encoded.tokens.tolist()
        pixels = found["pixel_values" if family == "internvl" else "pixel_values_videos"].numpy()
        assert np.array_equal(decoded(rows, row, decode), pixels)
