"""Sizes from tables, LLaVA-style JSON and WebDataset tars."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import ManifestError
from fcp_cli.manifest.detect import detect_kind
from fcp_cli.manifest.media import image_size, video_size
from fcp_cli.manifest.tokens import open_media
from tests.manifest.datasets import build, tar, write_parquet, write_tokenizer
from tests.messages import raises


def png(height: int, width: int) -> bytes:
    """The header of a PNG; that is all there is to read."""
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII5B", 13, b"IHDR", width, height, 8, 2, 0, 0, 0) + bytes(4)


def write_tar(path: Path, files: Mapping[str, bytes]) -> Path:
    path.write_bytes(tar(files))
    return path


def counted(source: Path, **options: Any) -> dict[str, list[Any]]:
    """The manifest that a source makes, with Qwen3-VL's processor."""
    manifest = source.parent / "manifest-of-source"
    build(source, manifest, kind="media", processor="qwen3-vl", **options)
    columns: dict[str, list[Any]] = pq.read_table(manifest).to_pydict()
    return columns


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    pytest.importorskip("tokenizers")
    (tmp_path / "of").mkdir()
    return str(write_tokenizer(tmp_path / "of" / "tokenizer.json"))


VIDEO_TOKENS = 2 * (880 + 2 + 6)  # four sampled frames of 720p, two time stamps of six tokens


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet"])
def test_a_row_of_a_table_is_an_image_or_a_video(suffix: str, tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "id": ["a", "b", "c"],
        "width": [1280, 1280, 1280],
        "height": [720, 720, 720],
        "num_frames": [None, 60, None],
        "duration": [None, None, 2.0],
        "fps": [None, 30.0, 30.0],
        "text_tokens": [5, 6, 7],
    }
    source = tmp_path / f"metadata{suffix}"
    if suffix == ".parquet":
        write_parquet(source, columns)
    else:
        mark = "," if suffix == ".csv" else "\t"
        rows = zip(*columns.values(), strict=True)
        lines = [mark.join(columns), *(mark.join("" if v is None else str(v) for v in row) for row in rows)]
        source.write_text("\n".join(lines) + "\n")
    found = counted(source)
    assert found["length"] == [5 + 880, 6 + VIDEO_TOKENS, 7 + VIDEO_TOKENS]
    assert (found["num_images"], found["num_videos"]) == ([1, 0, 0], [0, 1, 1])
    assert found["id"] == ["a", "b", "c"]


def test_captions_of_a_table_are_counted_by_the_tokenizer(tmp_path: Path, tokenizer: str) -> None:
    source = write_parquet(tmp_path / "m.parquet", {"width": [448], "height": [448], "caption": ["a b c"]})
    # two turns of five marks, three words, a start and an end mark around the image of 196 tokens
    assert counted(source, tokenizer=tokenizer)["length"] == [2 * 4 + 3 + 2 + 196]
    with raises(
        snapshot(
            "ManifestError: FOLDER/m.parquet, row 1: texts are counted by a tokenizer; give its file with --tokenizer FILE"
        )
    ):
        counted(source)


def test_llava_json_reads_the_headers_of_the_images_it_names(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "coco").mkdir()
    (tmp_path / "coco" / "one.png").write_bytes(png(448, 448))
    (tmp_path / "coco" / "two.png").write_bytes(png(224, 224))
    turns = [{"from": "human", "value": "<image>\na b"}, {"from": "gpt", "value": "c"}]
    source = tmp_path / "llava.json"
    source.write_text(
        json.dumps(
            [
                {"id": "one", "image": "coco/one.png", "conversations": turns},
                {"id": "both", "image": ["coco/one.png", "coco/two.png"], "conversations": turns},
                {"id": "none", "conversations": turns},
                {"id": "sized", "image": "gone.png", "width": 448, "height": 448, "conversations": turns},
                {"id": "video", "video": "v.mp4", "width": 1280, "height": 720, "frames": 60, "fps": 30,
                 "conversations": turns},
            ]
        )
    )  # fmt: skip
    text = 2 * 4 + 3
    found = counted(source, tokenizer=tokenizer)
    assert found["length"] == [
        text + 2 + 196,
        text + 2 + 196 + 2 + 64,
        text,
        text + 2 + 196,
        text + 2 + VIDEO_TOKENS,
    ]
    assert open_media(tmp_path / "manifest-of-source") is None


def test_a_webdataset_is_read_by_headers_and_sidecars(tmp_path: Path, tokenizer: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    video = {"width": 1280, "height": 720, "duration": 2.0, "fps": 30, "caption": "a"}
    write_tar(
        folder / "00.tar",
        {
            "a/000.png": png(448, 448) + bytes(5000),
            "a/000.txt": b"a b",
            "a/001.0.png": png(448, 448),
            "a/001.1.png": png(224, 224),
            "a/001.json": json.dumps({"text_tokens": 11}).encode(),
        },
    )
    write_tar(folder / "01.tar", {"002.mp4": bytes(9000), "002.json": json.dumps(video).encode()})
    found = counted(folder, tokenizer=tokenizer)
    assert found["id"] == ["a/000", "a/001", "002"]
    assert found["length"] == [8 + 2 + 2 + 196, 11 + 196 + 64, 8 + 1 + 2 + VIDEO_TOKENS]
    assert detect_kind(folder) == detect_kind(folder / "00.tar") == "media"


def write_video(path: Path, *, frames: int, height: int, width: int, fps: int, padding: int = 0) -> bytes:
    """A small real video; `padding` bytes lie before the header, which comes last."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for _ in range(frames):
            container.mux(stream.encode(av.VideoFrame(width, height, "yuv420p")))
        container.mux(stream.encode())
    content = path.read_bytes()
    if padding:
        header = content.index(b"moov") - 4
        content = content[:header] + struct.pack(">I4s", padding, b"free") + bytes(padding - 8) + content[header:]
        path.write_bytes(content)
    return content


@pytest.mark.lengthy
@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov", ".avi"])
def test_videos_without_sizes_are_read_by_their_headers(suffix: str, tmp_path: Path, tokenizer: str) -> None:
    write_video(tmp_path / f"v{suffix}", frames=60, height=720, width=1280, fps=30)
    turns = [{"from": "human", "value": "<video>\na"}, {"from": "gpt", "value": "b"}]
    source = tmp_path / "llava.json"
    source.write_text(json.dumps([{"id": "v", "video": f"v{suffix}", "conversations": turns}]))
    found = counted(source, tokenizer=tokenizer)
    assert found["length"] == [2 * 4 + 2 + 2 + VIDEO_TOKENS]
    assert (found["num_images"], found["num_videos"]) == ([0], [1])


def test_videos_in_a_tar_are_read_by_their_headers(tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.mp4", frames=60, height=720, width=1280, fps=30)
    text = json.dumps({"text_tokens": 7}).encode()
    source = write_tar(tmp_path / "s.tar", {"0.mp4": video, "0.json": text, "1.json": text, "1.mp4": video})
    assert counted(source)["length"] == [7 + VIDEO_TOKENS] * 2


def test_of_a_video_little_more_than_its_header_is_read(tmp_path: Path) -> None:
    padding = 50_000_000
    content = write_video(tmp_path / "v.mp4", frames=10, height=48, width=64, fps=25, padding=padding)
    read = 0

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read
            found = super().read(size)
            read += len(found)
            return found

    assert video_size(Counted(content), "v.mp4") == {"height": 48, "width": 64, "frames": 10, "fps": 25.0}
    assert read < padding / 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"no video at all",
            snapshot(
                "ManifestError: FOLDER/s.json, record 1: v.mp4: cannot read it as a video: Invalid data found when processing input"
            ),
        ),
        (
            None,
            snapshot(
                "ManifestError: FOLDER/s.json, record 1: v.mp4: cannot read it as a video: No such file or directory"
            ),
        ),
    ],
)
def test_a_video_that_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    pytest.importorskip("av")
    source = tmp_path / "s.json"
    source.write_text('[{"video": "v.mp4", "text_tokens": 1}]')
    if content is not None:
        (tmp_path / "v.mp4").write_bytes(content)
    with raises(message):
        counted(source)


@pytest.mark.parametrize("size_of", [image_size, video_size])
@pytest.mark.parametrize("name", ["a\0b.mp4", "\ud800.mp4"])
def test_a_name_that_no_file_can_have_is_one_line(size_of: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"embedded null|surrogates not allowed"):
        size_of(tmp_path / name, "row 1")


def test_without_a_reader_of_videos_the_columns_that_help_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    source = write_tar(tmp_path / "s.tar", {"0.mp4": b"", "0.json": b'{"text_tokens": 7}'})
    with raises(
        snapshot(
            "ManifestError: FOLDER/s.tar: 0.mp4: the headers of videos are read by PyAV; pip install 'av>=14', or give 'width', 'height' and 'frames', or 'duration' in seconds and 'fps', beside the video"
        )
    ):
        counted(source)


FILES: dict[str, tuple[str, bytes]] = {
    "a video without a rate": (
        "s.tar",
        tar({"a.mp4": b"", "a.json": b'{"width": 4, "height": 4, "duration": 2}'}),
    ),
    "no picture": ("s.tar", tar({"a.png": b"no picture at all"})),
    "a picture without text": ("s.tar", tar({"a.png": png(448, 448)})),
    "a sample of damaged JSON": ("s.tar", tar({"a.json": b"{"})),
    "no tar": ("s.tar", b"x" * 600),
    "an object in place of a list": ("s.json", b"{}"),
    "damaged JSON": ("s.json", b"["),
    "an image that is gone": ("s.json", b'[{"image": "gone.png", "text_tokens": 1}]'),
    "turns that are numbers": ("s.json", b'[{"conversations": [1]}]'),
    "a table without heights": ("s.csv", b"width,text_tokens\n4,1\n"),
    "a row cut short": ("s.csv", b"a,b\n1\n"),
}
FILES_MESSAGES = snapshot(
    {
        "a video without a rate": "ManifestError: FOLDER/s.tar: a: a video needs 'frames', or 'duration' in seconds and 'fps'",
        "no picture": "ManifestError: FOLDER/s.tar: a.png has no header of a known image format",
        "a picture without text": "ManifestError: FOLDER/s.tar: a: 'text_tokens' is missing; it must be a whole number >= 0",
        "a sample of damaged JSON": "ManifestError: FOLDER/s.tar: a.json is not JSON: b'{'",
        "no tar": "ManifestError: FOLDER/s.tar cannot be read as an uncompressed tar: there is no header at byte 0",
        "an object in place of a list": "ManifestError: FOLDER/s.json is not a list of records; one record per line is .jsonl",
        "damaged JSON": "ManifestError: FOLDER/s.json is not JSON: Expecting value: line 1 column 2 (char 1)",
        "an image that is gone": "ManifestError: FOLDER/s.json, record 1: gone.png: cannot read it: No such file or directory",
        "turns that are numbers": "ManifestError: FOLDER/s.json, record 1: 'conversations' must be a list of objects with a text under 'value'",
        "a table without heights": "ManifestError: FOLDER/s.csv, row 1: 'height' is missing; its columns are width, text_tokens",
        "a row cut short": "ManifestError: FOLDER/s.csv cannot be read as CSV (CSV parse error: Expected 2 columns, got 1: 1): truncated, damaged or another format; copy or make it again",
    }
)


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_named(tmp_path: Path, case: str) -> None:
    name, content = FILES[case]
    (tmp_path / name).write_bytes(content)
    with raises(FILES_MESSAGES[case]):
        counted(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_without_tars_says_what_media_may_be(tmp_path: Path) -> None:
    with raises(snapshot("ManifestError: FOLDER holds no .tar file; --kind media takes tars, tables, .json or .jsonl")):
        counted(tmp_path)


@pytest.mark.parametrize("orientation", [None, 1, 6])
@pytest.mark.parametrize(
    ("form", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"comment": b"x" * 9000}), ("WEBP", {})],
)
def test_the_size_of_a_picture_is_that_of_its_turned_pixels(
    form: str, options: dict[str, Any], orientation: int | None
) -> None:
    image_module = pytest.importorskip("PIL.Image")
    exif = image_module.Exif()
    if orientation is not None and form == "JPEG":  # of PNG and WebP, the tag is not looked at
        exif[274] = orientation
    stream = io.BytesIO()
    image_module.new("RGB", (300, 200)).save(stream, form, exif=exif, **options)
    wanted = (300, 200) if orientation == 6 and form == "JPEG" else (200, 300)
    found = image_size(io.BytesIO(stream.getvalue()), "a picture")
    assert (found["height"], found["width"]) == wanted
