"""Conversations about pictures: their tokens are those of the checkpoint's own processor, one by one."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.errors import ManifestError
from fcp_cli.manifest import pictures
from fcp_cli.manifest.detect import detect_kind
from fcp_cli.manifest.tokens import open_pictures
from fcp_cli.vision.processors import Visual
from tests.manifest.datasets import build, write_jsonl
from tests.manifest.picture_checkpoint import Family, odd_sizes, picture, png, processor, write_processor

pytest.importorskip("transformers")
pytest.importorskip("PIL")

pytestmark = [pytest.mark.hf, pytest.mark.processes]

FAMILIES: tuple[Family, ...] = ("qwen3_vl", "qwen2_5_vl", "internvl", "gemma4")


def turns(images: int, answer: str = "it is") -> list[dict[str, Any]]:
    """A conversation whose pictures stand between its words, as transformers' processors take it."""
    parts: list[dict[str, Any]] = []
    for number in range(images):
        parts += [{"type": "text", "text": f"{number}: "}, {"type": "image"}]
    parts.append({"type": "text", "text": " what?"})
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("family", FAMILIES)
def test_200_pictures_of_odd_sizes_have_the_tokens_of_the_processor(family: Family, tmp_path: Path) -> None:
    folder = write_processor(tmp_path / "checkpoint", family)
    own, sizes, records, number = processor(folder, family), odd_sizes(200, 1), [], 0
    pictures = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.png")
    counts = [1 + number % 7 for number in range(50)]
    names = iter(f"{number}.png" for number in range(sum(counts)))
    for count in counts:
        question = "".join(f"{at}: <image>" for at in range(count)) + " what?"
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "it is"}]
        records.append({"messages": said, "images": [next(names) for _ in range(count)]})
    data = write_jsonl(tmp_path / "data.jsonl", records)
    build(data, tmp_path / "m.parquet", processor=str(folder))
    rows, images = open_pictures(tmp_path / "m.parquet"), iter(pictures)
    assert rows is not None and sum(counts) >= 196
    for row, count in enumerate(counts):
        text = own.apply_chat_template(turns(count), tokenize=False)
        found = own(text=[text], images=[next(images) for _ in range(count)])
        tokens, labels = rows(row)
        assert found["input_ids"][0] == tokens.tolist()
        assert own.tokenizer.decode(labels[labels != -100]) == "it is<|im_end|>"


def write_samples(path: Path, images: list[bytes]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, content in enumerate(images):
            for name, data in ((f"{number:03d}.png", content), (f"{number:03d}.txt", b"it is")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def test_every_form_of_the_same_conversations_has_the_same_tokens(tmp_path: Path) -> None:
    folder = write_processor(tmp_path / "checkpoint", "qwen3_vl")
    images = [picture(*size, seed=number) for number, size in enumerate(odd_sizes(5, 3))]
    contents = [png(image) for image in images]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    said = {"role": "assistant", "content": "it is"}
    shown = [{"type": "image_url", "image_url": {"url": f"{number}.png"}} for number in range(5)]
    llava = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "it is"}]
    captions = ["it is"] * 5
    cells = [{"bytes": content, "path": None} for content in contents]
    pq.write_table(pa.table({"image": cells, "caption": captions}), tmp_path / "cells.parquet", row_group_size=2)
    pq.write_table(pa.table({"images": [[content] for content in contents], "text": captions}), tmp_path / "b.parquet")
    sources = [
        write_jsonl(tmp_path / "parts.jsonl", [{"messages": [{"role": "user", "content": [p]}, said]} for p in shown]),
        write_jsonl(tmp_path / "llava.jsonl", [{"conversations": llava, "image": f"{n}.png"} for n in range(5)]),
        write_samples(tmp_path / "samples.tar", contents),
        tmp_path / "cells.parquet",
        tmp_path / "b.parquet",
    ]
    expected = None
    for source in sources:
        build(source, tmp_path / "m.manifest", kind="media", processor=str(folder))
        rows = open_pictures(tmp_path / "m.manifest")
        assert rows is not None
        found = [[values.tolist() for values in rows(row)] for row in range(5)]
        expected = expected or found
        assert found == expected, source
        read = rows.read(4)
        held = read.pictures[0].content()
        assert (held.read_bytes() if isinstance(held, Path) else held.read()) == contents[4]
    assert detect_kind(sources[0]) == detect_kind(sources[1]) == detect_kind(sources[2]) == "media"


def test_a_picture_of_more_patches_than_numbers_can_count_is_one_line() -> None:
    class Endless:
        def visual(self, processor: Any) -> Visual:
            return Visual(tokens=1, grid=(1, 1 << 16, 1 << 16))

    endless: Any = Endless()
    with pytest.raises(
        ManifestError, match=r"record 3: a picture of 4,294,967,296 patches is more than any encoder takes"
    ):
        pictures._visual(endless, endless, "record 3")
