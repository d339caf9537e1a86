"""Small inputs that make much: tokenizers that multiply a text, packed lines, links below a run folder, strange names."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from fcp_cli.runs.owner import own
from fcp_cli.runs.run_dir import note_links, require_own_links
from tests.fuzz import mutations
from tests.fuzz.kind import Input, Kind, words_of

_CHARACTERS = "aex ."
_WHOLE = {"Sequence": {"id": "A", "type_id": 0}}
_CONTENTS = (b"\n", b"\r\n", b"  \n", b'{"length": 7}\n', b"7\n", b"{}\n", b"[", b"\0", b'{"text": "a"}\n')
_BUILT = ("manifest build FILE -o out.parquet", "plan FILE --model qwen3-tiny PLAN -o out.parquet")


def _growing(draw: random.Random, contents: Mapping[str, bytes]) -> Input:
    """A tokenizer whose normalizers and post-processor make up to some millions of tokens of a text."""
    steps: list[dict[str, Any]] = []
    growth = 1
    while growth < 1_000 and len(steps) < 8:
        character, length = draw.choice(_CHARACTERS), draw.choice((1, 2, 3, 10, 100))
        growth *= length
        replaced = {"type": "Replace", "pattern": {"String": character}, "content": character * length}
        steps.append(draw.choice((replaced, replaced, {"type": "ByteLevel"}, {"type": "NFKC"}, {"type": "Lowercase"})))
    document = json.loads(contents["tokenizer.json"])
    document["normalizer"] = {"type": "Sequence", "normalizers": steps}
    if draw.random() < 0.5:
        copies = [_WHOLE] * draw.choice((2, 50, 1000))
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": copies,
            "pair": [_WHOLE, _WHOLE],
            "special_tokens": {},
        }
    file = json.dumps(document).encode()
    return Input(
        name=f"a tokenizer that makes {growth} of one, and {len(file)} bytes of it",
        words=words_of("manifest build growth.jsonl --tokenizer tokenizer.json -o out.parquet"),
        files={"tokenizer.json": file, "growth.jsonl": b'{"text": "a text, e.g. of x"}\n'},
        writes=("out.parquet",),
    )


def _packed(draw: random.Random, contents: Mapping[str, bytes]) -> Input:
    """A compressed file of few bytes that unpacks to up to 100 MB of the same lines."""
    suffix, codec = draw.choice(((".zst", "zstd"), (".gz", "gzip")))
    line, size = draw.choice(_CONTENTS), draw.choice((10, 10_000, 300_000, 100_000_000))
    if line.strip() and size > 300_000:
        size = 300_000  # as many records as it holds are no find
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(line * (size // len(line)))
    name = f"packed.jsonl{suffix}"
    return Input(
        name=f"{size} bytes of {line!r} in {name}",
        words=words_of(draw.choice(_BUILT), name),
        files={name: bytes(sink.getvalue())},
        writes=("out.parquet",),
    )


def _linked(draw: random.Random, contents: Mapping[str, bytes]) -> Input:
    """A run folder with links, of which one leads to the files of others, and with a record that may be damaged."""
    names = draw.sample(
        ["checkpoints", "metrics.jsonl", "logs", "model", "origin", "tensorboard"], draw.randrange(1, 4)
    )
    record = draw.choice((None, b"", b"", mutations.of_json(draw, b'{"logs": "../others/logs"}')))
    return _taking(names, is_theirs=draw.random() < 0.5, record=record)


def _taking(names: list[str], *, is_theirs: bool, record: bytes | None) -> Input:
    """A run folder that is taken; `record`: of its links, None without, empty if it is the run's own."""

    def take(_: Path) -> None:
        with tempfile.TemporaryDirectory() as made:
            run, others = Path(made) / "run", Path(made) / "others"
            run.mkdir()
            for name in names:
                (others / name).mkdir(parents=True)
                (run / name).symlink_to(Path("..", "others", name))
            if record is not None:
                note_links(run)
            if record:
                (run / "links.json").write_bytes(record)
            if is_theirs:
                (others / names[0] / "kept").touch()
            before = sorted(others.rglob("*"))
            try:
                own(run).release()
                assert record is not None or not is_theirs, "a strange link is followed"
                require_own_links(run)
            finally:
                assert sorted(others.rglob("*")) == before

    return Input(name=f"links {names}, theirs {is_theirs}, recorded {record!r}", call=take)


def _named(draw: random.Random, contents: Mapping[str, bytes]) -> Input:
    """Pictures and clips whose names no file can have."""
    kind = draw.choice(("image", "video"))
    characters = ("\0", "\ud800", "\udcff", "/", "..", "a", "\n", "%s", "é" * 100, ".png", ".mp4")
    name = "".join(draw.choice(characters) for _ in range(draw.randrange(1, 6)))
    record = {"id": "0", kind: draw.choice((name, [name], [name, name])), "text_tokens": 5}
    return Input(
        name=f"a record {record!a}",
        words=words_of("manifest build named.json --kind media --processor qwen3-vl -o out.parquet"),
        files={"named.json": json.dumps([record]).encode()},
        writes=("out.parquet",),
    )


_SOUND = (
    Input(
        name="a packed list of lengths",
        words=words_of("manifest build packed.jsonl.gz -o out.parquet"),
        files={"packed.jsonl.gz": gzip.compress(b'{"text": "a b"}\n' * 3)},
        writes=("out.parquet",),
    ),
)
KINDS: dict[str, Kind] = {
    "growing tokenizer": Kind(draw=_growing, sound=(), share=0.3),
    "packed lines": Kind(draw=_packed, sound=_SOUND, share=0.5),
    "links of a run": Kind(draw=_linked, sound=(_taking(["checkpoints"], is_theirs=True, record=b""),)),
    "names of pictures": Kind(draw=_named, sound=()),
}
