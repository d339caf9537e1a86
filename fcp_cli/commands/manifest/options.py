"""The options of the commands of `fcp manifest`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fcp_cli.options import MOST_WORKERS, Arg, Opt, Typed


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions:
    """Options of `fcp manifest build`."""

    source: Annotated[
        tuple[str, ...],
        Arg(
            "Folder of text files; JSONL (.gz, .zst), Parquet, Arrow or tar files, or a folder of them; Megatron .idx. "
            "Paths, globs, or URLs such as s3://bucket/shards/*.jsonl.zst.",
            metavar="SOURCE",
        ),
    ]
    output: Annotated[Path, Opt("The manifest to write.", flags=("--output", "-o"), trust="writes", common=True)] = (
        Path("lengths.parquet")
    )
    tokenizer: Annotated[
        str,
        Opt(
            "What counts as a token: UTF-8 bytes, or tokens of a tokenizer.json, a checkpoint's folder, or hub name "
            "in the local cache.",
            metavar="bytes|FILE|FOLDER|NAME",
            common=True,
        ),
    ] = "bytes"
    kind: Annotated[
        Literal["text", "chat", "jsonl", "parquet", "arrow", "megatron", "media", "auto"],
        Opt("Format of SOURCE; auto: by name and content.", common=True),
    ] = "auto"
    column: Annotated[
        str | None,
        Opt(
            "Field or column with texts, token ids or lengths.",
            common=True,
            unset="the first found of text, input_ids, tokens, content, length, num_tokens",
        ),
    ] = None
    include: Annotated[
        tuple[str, ...],
        Opt(
            "Files of a text folder to read, e.g. '*.py'; repeatable.",
            metavar="GLOB",
            group="Parts of the source",
        ),
    ] = ()
    exclude: Annotated[tuple[str, ...], Opt("Files and folders to skip; repeatable.", metavar="GLOB")] = ()
    train_on: Annotated[
        Literal["all", "assistant", "completion"],
        Opt(
            "Tokens of conversations to train on: all, every assistant turn, or the last one.",
            common=True,
            group="Conversations and media",
        ),
    ] = "assistant"
    processor: Annotated[
        str | None,
        Opt(
            "For media (images and videos, or their sizes): qwen3-vl, qwen2.5-vl, internvl, gemma3, gemma4 or the "
            "folder of a checkpoint.",
            metavar="NAME|FOLDER",
            common=True,
        ),
    ] = None
    bad_rows: Annotated[
        Literal["error", "skip"], Opt("Stop at a record whose image fails to decode, or skip and count it.")
    ] = "error"
    mask: Annotated[
        str | None,
        Opt(
            "Attention mask of sequences: full, or from a column with prefix lengths, [start, stop] of bidirectional "
            "spans, or sizes of clean and noisy chunks.",
            metavar="full|prefix:COLUMN|segments:COLUMN|pairs:COLUMN",
            group="Masks",
            unset="causal",
        ),
    ] = None
    vocab_size: Annotated[
        int | None,
        Opt(
            "Vocabulary size of Megatron data.",
            min=1,
            unset="one more than the largest token in the .bin, if there is one",
            group="Parts of the source",
        ),
    ] = None
    workers: Annotated[
        int | None,
        Opt("Counting processes.", min=1, max=MOST_WORKERS, unset="automatic", common=True, group="Many nodes"),
    ] = None
    shard: Annotated[
        str | None,
        Opt(
            "Count only the I-th of N parts, for `fcp manifest merge`.",
            metavar="I/N",
            unset="all of SOURCE",
            common=True,
            group="Many nodes",
        ),
    ] = None
    json: Annotated[bool, Opt("Print the summary as one JSON document.", common=True, group="Options")] = False
    typed: Annotated[frozenset[str], Typed()] = frozenset()
