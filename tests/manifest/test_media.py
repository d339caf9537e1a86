from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import build_command, manifest_source
from fcp_cli.manifest.tokens import open_media, open_tokens
from tests.manifest.datasets import build, write_jsonl, write_tokenizer
from tests.messages import raises

IMAGE = {"height": 720, "width": 1280}
VIDEO = {"frames": 60, "height": 720, "width": 1280, "fps": 30}
RECORDS = [
    {"id": "text", "text_tokens": 50},
    {"id": "both", "text_tokens": 10, "images": [IMAGE, {"height": 224, "width": 224}], "videos": [VIDEO]},
    {"text_tokens": 7, "images": [IMAGE]},
    {"text_tokens": 0},
]


def test_sizes_become_lengths_and_encoder_work(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", RECORDS)
    built = build(source, tmp_path / "m.parquet", kind="media", processor="qwen3-vl")
    assert built.skipped == {"empty": 1}
    columns = pq.read_table(tmp_path / "m.parquet").to_pydict()
    lines = source.read_bytes().splitlines(keepends=True)
    video_tokens = 2 * (880 + 2 + 6)  # four frames, two time stamps of six tokens: <0.3 seconds>, <1.6 seconds>
    assert columns == {
        "id": ["text", "both", "2"],
        "length": [50, 10 + 880 + 64 + video_tokens, 887],
        "text_tokens": [50, 10, 7],
        "vision_patches": [0, 3520 + 256 + 2 * 3520, 3520],
        "vision_patch_pairs": [0, 3520**2 + 256**2 + 2 * 3520**2, 3520**2],
        "num_images": [0, 2, 1],
        "num_videos": [0, 1, 0],
        "byte_offset": [0, len(lines[0]), len(lines[0]) + len(lines[1])],
    }
    table = read_manifest(tmp_path / "m.parquet")
    assert table.vision_patches is not None
    assert table.vision_patches.tolist() == columns["vision_patches"]


def test_a_tokenizer_counts_the_time_stamps(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", [{"text_tokens": 1, "videos": [VIDEO]}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")  # splits <0.3 seconds> into < 0 . 3 seconds >
    build(source, tmp_path / "m.parquet", kind="media", processor="qwen3-vl", tokenizer=str(tokenizer))
    assert read_manifest(tmp_path / "m.parquet").length_tokens.tolist() == [1 + 2 * (880 + 2 + 6)]
    recorded = manifest_source(tmp_path / "m.parquet")
    assert recorded is not None
    assert recorded["tokenizer"] == str(tokenizer)


def test_a_media_manifest_has_no_tokens_and_knows_how_it_was_built(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", RECORDS)
    build(source, tmp_path / "m.parquet", kind="media", processor="internvl")
    recorded = manifest_source(tmp_path / "m.parquet")
    assert recorded is not None
    assert recorded["processor"]["tile_pixels"] == 448
    assert build_command(recorded, Path("m.parquet")) == (
        f"fcp manifest build {source} --kind media --processor internvl -o m.parquet"
    )
    with pytest.raises(ManifestError, match="holds no tokens; train on synthetic tokens"):
        open_tokens(tmp_path / "m.parquet")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"images": [IMAGE]}, "'text_tokens' is missing; it must be a whole number >= 0"),
        ({"text_tokens": -1}, "'text_tokens' is -1; it must be a whole number >= 0"),
        ({"text_tokens": 1, "images": [{"height": 0, "width": 4}]}, "'height' is 0; it must be a whole number >= 1"),
        ({"text_tokens": 1, "images": [{"height": 4}]}, "'width' is missing; it must be a whole number >= 1"),
        ({"text_tokens": 1, "images": [4]}, "'images' must be a list of objects with height and width"),
        ({"text_tokens": 1, "videos": [IMAGE]}, "every object of 'videos' needs 'frames', and none of 'images' has it"),
        ({"text_tokens": 1, "images": [VIDEO]}, "every object of 'videos' needs 'frames', and none of 'images' has it"),
        ({"text_tokens": 1, "videos": [{**VIDEO, "fps": 0}]}, "'fps' is 0; it must be a number > 0"),
        ({"text_tokens": 1, "images": [{"height": 1, "width": 900}]}, "maximum aspect ratio of 200"),
        (
            {"text_tokens": 1, "videos": [{**VIDEO, "frames": 1}]},
            "a video needs at least 2 frames; drop the record",
        ),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", [RECORDS[0], record])
    with pytest.raises(ManifestError, match=re.escape("media.jsonl:2: ") + ".*" + re.escape(message)):
        build(source, tmp_path / "m.parquet", kind="media", processor="qwen3-vl")
    assert list(tmp_path.iterdir()) == [source]


def test_figures_that_no_column_holds_are_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", [{"text_tokens": 1, "images": [{"height": 2**29, "width": 2**29}]}])
    folder = tmp_path / "processor"
    folder.mkdir()
    figures = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2_5_VLProcessor"}
    pixels = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 2**62}
    (folder / "preprocessor_config.json").write_text(json.dumps({**figures, **pixels}))
    with raises(
        snapshot(
            "ManifestError: FOLDER/media.jsonl:1: its vision_patch_pairs is 2.16e+30; are the figures of the processor right?"
        )
    ):
        build(source, tmp_path / "m.parquet", kind="media", processor=str(folder))


def test_an_id_of_half_a_character_is_written_with_a_mark_in_its_place(tmp_path: Path) -> None:
    source = tmp_path / "media.jsonl"
    source.write_text('{"id": "a\\ud800", "text_tokens": 3}\n')
    build(source, tmp_path / "m.parquet", kind="media", processor="qwen3-vl")
    assert pq.read_table(tmp_path / "m.parquet")["id"].to_pylist() == ["a?"]


def test_media_without_a_processor_is_wrong_usage(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", RECORDS)
    with raises(
        snapshot(
            "UsageError: --kind media needs --processor: qwen3-vl, qwen2.5-vl, internvl, gemma3, gemma4 or the folder of a checkpoint"
        )
    ):
        build(source, tmp_path / "m.parquet", kind="media")


def test_a_media_manifest_finds_the_pictures_of_its_rows_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "media.jsonl", [RECORDS[3], *RECORDS])  # rows without tokens are left out
    build(source, tmp_path / "m.parquet", kind="media", processor="qwen3-vl")
    records = open_media(tmp_path / "m.parquet")
    assert records is not None
    assert records(0) == ((), ())
    images, videos = records(1)
    assert [image.grid for image in images] == [(1, 44, 80), (1, 16, 16)]
    assert [video.grid for video in videos] == [(2, 44, 80)]
    source.unlink()
    with raises(
        snapshot(
            "ManifestError: FOLDER/m.parquet was built from FOLDER/media.jsonl, which is gone; build and plan again: fcp manifest build FOLDER/media.jsonl --kind media --processor qwen3-vl -o FOLDER/m.parquet, then fcp plan FOLDER/m.parquet"
        )
    ):
        open_media(tmp_path / "m.parquet")


def test_other_manifests_hold_no_pictures(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a"}])
    build(source, tmp_path / "m.parquet", kind="jsonl")
    assert open_media(tmp_path / "m.parquet") is None
