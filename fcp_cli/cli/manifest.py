"""`fcp manifest`: build a length manifest from data, merge parts of one, and show one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fcp_cli.cli.command import App, takes
from fcp_cli.errors import UsageError
from fcp_cli.util.console import note, print_json, progress, results
from fcp_cli.util.files import as_word, refuse_to_overwrite
from fcp_cli.util.options import MOST_WORKERS, Arg, Opt, Typed
from fcp_cli.util.words import counted

if TYPE_CHECKING:
    from fcp_cli.manifest.build import BuiltManifest
    from fcp_cli.manifest.detect import SourceOptions
    from fcp_cli.manifest.sources import Part, Source
    from fcp_cli.manifest.table import LengthTable


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


manifest_app = App(
    no_args_is_help=True,
    help="Build or show a length manifest: how long every sequence is.",
    epilog="fcp manifest build corpus/ -o lengths.parquet\nfcp manifest show lengths.parquet",
)


@manifest_app.command()
@takes(
    "fcp manifest build corpus/ --include '*.txt' -o lengths.parquet",
    "fcp manifest build sizes.jsonl --kind media --processor qwen3-vl",
)
def build(options: BuildOptions) -> None:
    """Count the tokens of every sequence of SOURCE and write them as a manifest.

    The manifest records where its sequences are, so that training reads the same tokens.
    Sequences without tokens are skipped and counted.
    """
    from fcp_cli.manifest.build import CountedByWorkers, default_workers, divisible, parse_part
    from fcp_cli.manifest.detect import LISTED_KINDS, SourceOptions, detect_kind, open_source
    from fcp_cli.manifest.sources import WHOLE, named_source

    output, kind = options.output, str(options.kind)
    source, files = named_source(options.source)
    refuse_to_overwrite(output, *(files or [source]))
    if kind == "auto":
        kind = detect_kind(source, files)
        note(f"reading {source} as {kind}")
    reading = SourceOptions(
        tokenizer=options.tokenizer,
        column=options.column,
        include=options.include or ("*",),
        exclude=options.exclude,
        processor=options.processor,
        train_on=options.train_on,
        skips_bad=options.bad_rows == "skip",
        vocab_size=options.vocab_size,
        mask=options.mask,
    )
    if files and kind not in LISTED_KINDS:
        raise UsageError(f"--kind {kind} reads one source; {len(files)} were given")
    opened = open_source(source, kind, reading, output=output.absolute(), files=files)
    _note_unused(opened.describe(), reading)
    _note_assumed(opened.describe(), options)
    part = WHOLE if options.shard is None else parse_part(options.shard)
    rows = opened if options.shard is None else divisible(opened).only(part)
    workers = options.workers or default_workers(rows)
    if workers > 1 and rows.parts > 1:
        reopen = partial(open_source, source, kind, reading, output=output.absolute(), files=files)
        rows = CountedByWorkers(source=rows, reopen=reopen, workers=workers, part=part)
    if options.shard is not None:
        _build_part(opened, rows, part, options)
        return
    _report_built(_build(rows, f"reading {kind}", output), options.json)


def _build_part(opened: Source, rows: Source, part: Part, options: BuildOptions) -> None:
    from fcp_cli.manifest.build import counted_rows, divisible, part_identity, write_part

    whole = divisible(opened)
    count = counted_rows(options.output, part_identity(whole, part))
    verb = "kept" if count is not None else "wrote"
    if count is None:
        with progress() as bar:
            task = bar.add_task(f"reading part {options.shard}", total=rows.units)
            count = write_part(whole, rows, part, options.output, advance=lambda done: bar.advance(task, done))
    if options.json:
        print_json({"part": str(options.output), "shard": options.shard, "sequences": count})
    note(f"{verb} {counted(count, 'sequence')} of part {options.shard} in {options.output}; next, with all parts:")
    note("fcp manifest merge PARTS -o lengths.parquet")


def _build(rows: Source, title: str, output: Path) -> BuiltManifest:
    from fcp_cli.manifest.build import build_manifest

    with progress() as bar:
        task = bar.add_task(title, total=rows.units)
        return build_manifest(rows, output, advance=lambda done: bar.advance(task, done))


def _report_built(built: BuiltManifest, json: bool) -> None:
    if built.unlearned:
        rows = counted(built.rows, "sequence")
        note(f"no token is trained in {built.unlearned:,} of {rows}: they take time but train nothing")
    for reason, count in built.skipped.items():
        note(f"skipped {counted(count, f'{reason} sequence')}")
    _report(built.path, built.table, built.source, json=json, extra={"skipped": built.skipped})
    note(f"wrote {built.path}; next: fcp plan {as_word(built.path)}")


@manifest_app.command()
@takes(
    "fcp manifest merge part-*.parquet -o lengths.parquet",
    "fcp manifest merge part-1.parquet part-2.parquet --json",
)
def merge(
    *,
    parts: Annotated[tuple[Path, ...], Arg("All parts of one build, in any order.", metavar="PART")],
    output: Annotated[Path, Opt("The manifest to write.", flags=("--output", "-o"), trust="writes")] = Path(
        "lengths.parquet"
    ),
    json: Annotated[bool, Opt("Print the summary as one JSON document.")] = False,
) -> None:
    """Merge the parts that `fcp manifest build --shard I/N` wrote, on any number of nodes, into one manifest.

    It is the manifest, byte for byte, that one build of the whole source writes.
    """
    from fcp_cli.manifest.build import MergedParts

    refuse_to_overwrite(output, *parts)
    _report_built(_build(MergedParts(parts), "merging", output), json)


@manifest_app.command()
@takes(
    "fcp manifest show lengths.parquet",
    "fcp manifest show dataset.parquet --length-column input_ids",
)
def show(
    *,
    path: Annotated[Path, Arg("Lengths in any format that `fcp plan` takes; - reads JSON lines.", metavar="MANIFEST")],
    length_column: Annotated[str, Opt("Column with lengths, or with lists of tokens.")] = "length",
    json: Annotated[bool, Opt("Print one JSON document on stdout.")] = False,
) -> None:
    """Show counts, percentiles and a histogram of the lengths of a manifest."""
    from fcp_cli.manifest.read import read_manifest
    from fcp_cli.manifest.table import manifest_source

    table = read_manifest(path, length_column=length_column)
    source = None if str(path) == "-" else manifest_source(path)
    _report(path, table, source, json=json, extra={})


def _note_assumed(description: dict[str, Any], options: BuildOptions) -> None:
    """Print a note if the column was assumed, and a warning if bytes are counted instead of tokens."""
    if description.get("column") and options.column is None:
        note(f"assumed --column = {description['column']}")
    is_text = description.get("column") not in ("input_ids", "tokens", "token_ids")
    if is_text and description.get("tokenizer") == "bytes" and "tokenizer" not in options.typed:
        note(
            "warning: texts are counted in bytes, about four times as many as tokens; count your model's tokens with "
            "--tokenizer FOLDER, or keep bytes with --tokenizer bytes"
        )


def _note_unused(description: dict[str, Any], options: SourceOptions) -> None:
    """Print a note for each option that does not apply, so that none is ignored silently."""
    kind = description["kind"]
    has_pixels = description.get("content") == "pixels"
    if options.skips_bad and not has_pixels:
        note(f"--bad-rows is not used for {kind} without images")
    if has_pixels and options.tokenizer not in ("bytes", description["tokenizer"]) and options.processor is not None:
        note(f"--tokenizer is not used: {description['tokenizer']} has its own")
    if kind == "media" and description["tokenizer"] is None:
        note("assumed tokens of time stamps by Qwen's pre-tokenizer rule; --tokenizer FILE counts them exactly")
    if options.processor is not None and kind != "media":
        note(f"--processor is not used for {kind}; --kind media reads sizes of images and videos")
    if options.tokenizer != "bytes" and description.get("tokenizer") is None:
        note(f"--tokenizer is not used: {description['path']} holds {description.get('content', 'tokens')} already")
    if options.column is not None and kind in ("text", "chat", "megatron", "media"):
        note(f"--column is not used for {kind}")
    if (options.include != ("*",) or options.exclude) and kind != "text":
        note(f"--include and --exclude are not used for {kind}; they choose files of a folder of text")
    if options.train_on != "assistant" and kind != "chat" and not has_pixels:
        note(f"--train-on is not used for {kind}: every token is trained")
    if options.vocab_size is not None and kind != "megatron":
        note(f"--vocab-size is not used for {kind}; it follows from the tokens")


def _report(
    path: Path, table: LengthTable, source: dict[str, Any] | None, *, json: bool, extra: dict[str, Any]
) -> None:
    from fcp_cli.manifest.read import count_pictures, remarks, summarize
    from fcp_cli.report.profiles import print_manifest

    summary, pictures = summarize(table), count_pictures(path)
    if json:
        head = {"manifest": str(path), "content_hash": table.content_hash(), "source": source}
        print_json(head | summary.as_json() | pictures | extra)
    else:
        print_manifest(results(), source, summary, pictures)
    for remark in remarks(table):
        note(remark)
