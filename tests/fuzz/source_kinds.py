"""Data that manifests are built of: texts, conversations, pictures and videos, tars, Megatron's files, and what makes tokens of them."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.fuzz import mutations
from tests.fuzz.kind import Kind, of_files, parquet
from tests.manifest.chat_checkpoint import write_checkpoint
from tests.manifest.datasets import write_arrow, write_jsonl, write_megatron, write_parquet, write_tokenizer
from tests.manifest.picture_checkpoint import picture, png, write_clip, write_processor

_BUILT = "manifest build FILE -o out.parquet"
_MEDIA = f"{_BUILT} --kind media --processor qwen3-vl"
PICTURES = ("png", "jpg", "gif", "webp", "bmp", "tiff")
VIDEOS = ("mp4", "mkv", "avi", "mov")
FOLDERS = ("qwen2.5-vl", "qwen3-vl", "internvl", "gemma3", "newer")


def write_sources(folder: Path) -> None:
    """Write them all."""
    draw = random.Random(0)
    _write_texts(folder, draw)
    _write_media(folder)
    _write_folders(folder)
    write_tokenizer(folder / "tokenizer.json")
    write_megatron(folder / "megatron", [np.arange(1, 1 + draw.randrange(1, 30), dtype=np.int32) for _ in range(9)])
    write_checkpoint(folder / "chat")
    talks = [
        {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": "x" * i}]}
        for i in range(1, 6)
    ]
    write_jsonl(folder / "chat.jsonl", [*talks, {"prompt": "a", "completion": "b"}])


def _write_texts(folder: Path, draw: random.Random) -> None:
    texts = ["word " * draw.randrange(1, 40) for _ in range(12)]
    write_jsonl(folder / "texts.jsonl", [{"text": text, "id": i} for i, text in enumerate(texts)])
    lines = (folder / "texts.jsonl").read_bytes()
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    with pa.OSFile(str(folder / "packed.jsonl.zst"), "wb") as file, pa.CompressedOutputStream(file, "zstd") as packed:
        packed.write(lines)
    _write_tar(folder / "lines.tar", {"jsonl": lines})
    when = pa.array([0] * 12, pa.timestamp("us"))
    write_parquet(folder / "texts.parquet", {"text": texts, "when": when})
    write_arrow(folder / "texts.arrow", {"text": texts, "input_ids": [[1, 2, 3]] * 12}, stream=False)
    (folder / "corpus").mkdir()
    for i, text in enumerate(texts[:3]):
        (folder / "corpus" / f"{i}.txt").write_text(text)
    hub = folder / "hub"  # a data set as the hub's library saves it
    hub.mkdir()
    write_arrow(hub / "data-00000-of-00001.arrow", {"text": texts}, stream=True)
    (hub / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (hub / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))


def _write_media(folder: Path) -> None:
    when = pa.array([0] * 12, pa.timestamp("us"))
    sizes = {"width": [280] * 12, "height": [280] * 12, "text_tokens": [7] * 12}
    write_parquet(folder / "media.parquet", {"when": when, **sizes})
    sized = [{"images": [{"height": 280, "width": 560}], "text_tokens": 5, "id": i} for i in range(4)]
    video = {"videos": [{"height": 280, "width": 280, "frames": 16, "fps": 4.0}], "text_tokens": 7}
    write_jsonl(folder / "media.jsonl", [*sized, video])
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "This."}]
    listed = [
        {"id": str(i), "image": f"{i}.jpg", "width": 280, "height": 280, "conversations": turns} for i in range(3)
    ]
    (folder / "media.json").write_text(json.dumps(listed))
    (folder / "media.csv").write_text(
        "id,width,height,duration,fps,text_tokens\n" + "a,280,280,2.5,24.0,7\nb,560,280,,,7\n" * 3
    )
    small = picture(280, 280, 0)
    for kind in PICTURES:
        small.save(folder / f"picture.{kind}")
        named = [{"id": "0", "image": f"picture.{kind}", "text_tokens": 5}]
        (folder / f"with-{kind}.json").write_text(json.dumps(named))
    for kind in VIDEOS:
        write_clip(folder / f"clip.{kind}", 8, 64, 64, 4)
        clips = [{"id": "0", "video": f"clip.{kind}", "text_tokens": 5}]
        (folder / f"with-{kind}.json").write_text(json.dumps(clips))
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": [{"type": "text", "text": "This."}]}]
    write_processor(folder / "vision", "qwen3_vl")
    write_jsonl(folder / "shown.jsonl", [{"messages": talk, "images": ["picture.png"]}] * 3)
    cells = [[{"bytes": png(picture(40, 40, 1)), "path": "a.png"}]] * 2
    write_parquet(folder / "cells.parquet", {"images": cells, "messages": [talk] * 2})
    _write_tar(folder / "media.tar", {"png": _PNG, "json": b'{"text_tokens": 9}'})
    clip = (folder / "clip.mp4").read_bytes()
    _write_tar(folder / "clips.tar", {"mp4": clip, "json": b'{"text_tokens": 4}'})


def _write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for i in range(4):
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"{i:04d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


# The header of a picture of 280 x 280 pixels, which is all that is read of it.
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (280).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00" + bytes(4)
_QWEN25: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen2_5_VLProcessor",
}
_PATCHES: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}


def _write_folders(folder: Path) -> None:
    """Write the processors of checkpoints."""
    qwen25: dict[str, Any] = {**_QWEN25, **_PATCHES, "min_pixels": 3136, "max_pixels": 12845056}
    edges: dict[str, Any] = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    qwen3: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        **edges,
    }
    qwen3 |= {**_PATCHES, "patch_size": 16}
    videos: dict[str, Any] = {
        **_PATCHES,
        "patch_size": 16,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "fps": 2,
        **edges,
    }
    videos |= {"min_frames": 4, "max_frames": 768}
    intern: dict[str, Any] = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}
    intern |= {"crop_to_patches": True, "min_patches": 1, "max_patches": 12}
    gemma: dict[str, Any] = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
    gemma |= {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_crop_size": 256}
    gemma |= {"pan_and_scan_min_ratio_to_activate": 1.2}
    files = {
        "qwen2.5-vl/preprocessor_config.json": qwen25,
        "qwen3-vl/preprocessor_config.json": qwen3,
        "qwen3-vl/video_preprocessor_config.json": videos,
        "internvl/preprocessor_config.json": intern,
        "internvl/processor_config.json": {"image_seq_length": 256},
        "gemma3/preprocessor_config.json": gemma,
        "gemma3/processor_config.json": {"image_seq_length": 256},
        "newer/processor_config.json": {
            "image_processor": {**qwen25, **edges},
            "video_processor": {**videos, "patch_size": 14},
        },
    }
    for name, document in files.items():
        path = folder / "processors" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))


_TALKS = "manifest build chat.jsonl --kind chat --tokenizer chat -o out.parquet"
_SHOWN = "manifest build FILE --kind media --tokenizer vision --processor vision -o out.parquet"
_PROCESSED = "manifest build media.jsonl --kind media --processor processors/{} -o out.parquet"
KINDS: dict[str, Kind] = {
    "texts": of_files("texts.jsonl", _BUILT, change=mutations.of_lines),
    "packed texts": of_files("packed.jsonl.zst", _BUILT, change=mutations.of_bytes, share=0.5),
    "zipped texts": of_files("packed.jsonl.gz", _BUILT, change=mutations.of_bytes, share=0.5),
    "tar of texts": of_files("lines.tar", _BUILT, change=mutations.of_tar, share=0.5),
    "text table": of_files("texts.parquet", _BUILT, change=parquet),
    "text arrow": of_files("texts.arrow", _BUILT, f"{_BUILT} --column input_ids", change=mutations.of_arrow),
    "folder of text": of_files(
        "corpus/0.txt", "manifest build corpus -o out.parquet", change=mutations.of_text, share=0.3
    ),
    "data set of the hub": of_files(
        {
            "hub/data-00000-of-00001.arrow": mutations.of_arrow,
            "hub/state.json": mutations.of_json,
            "hub/dataset_info.json": mutations.of_json,
        },
        "manifest build hub -o out.parquet",
        share=0.5,
    ),
    "masked texts": of_files(
        "masked.jsonl",
        f"{_BUILT} --mask segments:spans",
        f"{_BUILT} --mask prefix:prefix",
        change=mutations.of_lines,
    ),
    "tokenizer": of_files(
        "tokenizer.json", "manifest build texts.jsonl --tokenizer FILE -o out.parquet", change=mutations.of_json
    ),
    "conversations": of_files("chat.jsonl", _TALKS, f"{_TALKS} --train-on completion", change=mutations.of_lines),
    "chat template": of_files("chat/chat_template.jinja", _TALKS, change=mutations.of_template),
    "tokenizer of a checkpoint": of_files(
        {
            "chat/tokenizer_config.json": mutations.of_json,
            "chat/tokenizer.json": mutations.of_json,
            "chat/chat_template.jinja": mutations.of_text,
        },
        _TALKS,
        share=0.5,
    ),
    "media of a table": of_files("media.parquet", _MEDIA, change=parquet),
    "media": of_files("media.jsonl", _MEDIA, change=mutations.of_lines),
    "media list": of_files("media.json", f"{_MEDIA} --tokenizer tokenizer.json", change=mutations.of_json),
    "media table": of_files("media.csv", f"{_BUILT} --kind media --processor qwen2.5-vl", change=mutations.of_text),
    "conversations with pictures": of_files("shown.jsonl", _SHOWN, change=mutations.of_lines),
    "cells with pictures": of_files("cells.parquet", _SHOWN, change=parquet),
    "checkpoint with a processor": of_files(
        {
            "vision/preprocessor_config.json": mutations.of_json,
            "vision/video_preprocessor_config.json": mutations.of_json,
            "vision/tokenizer_config.json": mutations.of_json,
            "vision/chat_template.jinja": mutations.of_template,
        },
        _SHOWN.replace("FILE", "shown.jsonl"),
        share=0.5,
    ),
    "tar": of_files("media.tar", f"{_BUILT} --processor internvl", change=mutations.of_tar),
    "tar of clips": of_files("clips.tar", f"{_BUILT} --processor qwen3-vl", change=mutations.of_tar, share=0.5),
    **{
        f"picture {kind}": of_files(
            f"picture.{kind}",
            f"manifest build with-{kind}.json --kind media --processor internvl -o out.parquet",
            change=mutations.of_numbers,
            share=0.4,
        )
        for kind in PICTURES
    },
    **{
        f"video {kind}": of_files(
            f"clip.{kind}",
            f"manifest build with-{kind}.json --kind media --processor qwen3-vl -o out.parquet",
            change=mutations.of_numbers,
            share=0.4,
        )
        for kind in VIDEOS
    },
    "megatron": of_files(
        {"megatron.idx": mutations.of_numbers, "megatron.bin": mutations.of_bytes},
        "manifest build megatron.idx -o out.parquet",
        "manifest build megatron.idx --vocab-size 100 -o out.parquet",
    ),
    **{
        f"processor of {name}": of_files(
            {f"processors/{name}/{file}.json": mutations.of_json for file in files},
            _PROCESSED.format(name),
            share=0.4,
        )
        for name, files in {
            "qwen2.5-vl": ("preprocessor_config",),
            "qwen3-vl": ("preprocessor_config", "video_preprocessor_config"),
            "internvl": ("preprocessor_config", "processor_config"),
            "newer": ("processor_config",),
        }.items()
    },
    "processor of gemma3": of_files(
        {f"processors/gemma3/{file}.json": mutations.of_json for file in ("preprocessor_config", "processor_config")},
        "manifest build pictures.jsonl --kind media --processor processors/gemma3 -o out.parquet",
        share=0.4,
    ),
}
