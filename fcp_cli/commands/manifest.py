"""`fcp manifest`: build a length manifest from data, and show one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcp_cli.command_line import App
from fcp_cli.console import human, note, print_json, progress
from fcp_cli.errors import UsageError
from fcp_cli.files import refuse_to_overwrite
from fcp_cli.words import counted

if TYPE_CHECKING:
    from rich.console import Console

    from fcp_cli.manifest.sources.detect import SourceOptions
    from fcp_cli.manifest.summary import ManifestSummary

manifest_app = App(no_args_is_help=True, help="Build or show a length manifest: how long every sequence is.")

_BAR_CELLS = 22
_KINDS = ("text", "jsonl", "parquet", "arrow", "megatron", "media", "auto")


@manifest_app.command()
def build(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of text files; JSONL, Parquet, Arrow or tar file, or a folder of them; Megatron .idx."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The manifest to write.")] = Path("lengths.parquet"),
    kind: Annotated[
        str, typer.Option(metavar="KIND", help=f"What SOURCE is: {', '.join(_KINDS)} (by its name and content).")
    ] = "auto",
    tokenizer: Annotated[
        str, typer.Option(metavar="bytes|FILE", help="Tokens of a text: its UTF-8 bytes, or by a tokenizer.json.")
    ] = "bytes",
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            "--text-field",
            help="Field or column with texts, token ids or lengths; else text in JSONL, and input_ids, text or length "
            "(the first there is) in Parquet and Arrow.",
        ),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Files of a folder of text to take, as '*.py'; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Files and folders to leave out; repeatable.")
    ] = None,
    processor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="Of media (sizes of images and videos): qwen3-vl, internvl or the folder of a checkpoint.",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Of Megatron data; without it the .bin, if there, is read for its largest token."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON document on stdout.")] = False,
) -> None:
    """Count the tokens of every sequence of SOURCE and write them as a manifest.

    The manifest remembers where its sequences are, so that training reads the same tokens again.
    Sequences without tokens are left out and counted.
    """
    from fcp_cli.manifest.build import build_manifest
    from fcp_cli.manifest.sources.detect import SourceOptions, detect_kind, open_source

    if kind not in _KINDS:
        raise UsageError(f"--kind {kind} is none of {', '.join(_KINDS)}")
    refuse_to_overwrite(output, source)
    if kind == "auto":
        kind = detect_kind(source)
        note(f"reading {source} as {kind}")
    options = SourceOptions(
        tokenizer=tokenizer,
        column=column,
        include=tuple(include or ["*"]),
        exclude=tuple(exclude or []),
        processor=processor,
        vocab_size=vocab_size,
    )
    opened = open_source(source, kind, options, output=output.absolute())
    _note_unused(opened.describe(), options)
    with _advancing(opened.units, kind) as advance:
        built = build_manifest(opened, output, advance=advance)
    for reason, count in built.skipped.items():
        note(f"left out {counted(count, f'{reason} sequence')}")
    _report(output, "length", json=json, extra={"skipped": built.skipped})
    note(f"wrote {output}; next: fcp plan {output}")


@manifest_app.command()
def show(
    path: Annotated[Path, typer.Argument(help="Manifest: a Parquet file, a folder of them, or - for JSON lines.")],
    length_column: Annotated[
        str, typer.Option(help="Column with the lengths, or a list column to measure.")
    ] = "length",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Show counts, percentiles and a histogram of the lengths of a manifest."""
    _report(path, length_column, json=json, extra={})


@manifest_app.command()
def synth(
    name: Annotated[str, typer.Argument(metavar="DATASET", help="msrvtt, internvid, openvid, or mixed.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSON lines to write.")] = Path("sizes.jsonl"),
    rows: Annotated[int, typer.Option(min=1, help="Sequences.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    short_side: Annotated[
        int | None,
        typer.Option(min=1, help="Scale pictures to so many pixels on their shorter side, for small models."),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(min=0.01, help="Frames per second of the clips (30); InternVL takes every frame it is given."),
    ] = None,
) -> None:
    """Make up sizes of images and videos that follow published data sets, and say where the figures are from.

    mixed is a fifth text alone, a fifth one image, a fifth two to eight images, and clips of all three sets.
    """
    from fcp_cli.manifest.synth import CLIP_SETS, NAMES, Scale, write_media_records

    if name not in NAMES:
        raise UsageError(f"{name} is none of {', '.join(NAMES)}")
    scale = Scale(short_side=short_side, frames_per_second=fps)
    with progress() as bar:
        task = bar.add_task("drawing", total=rows)
        write_media_records(output, name, rows, seed=seed, scale=scale, advance=lambda done: bar.advance(task, done))
    for clips in [name] if name in CLIP_SETS else CLIP_SETS:
        for figure, source in CLIP_SETS[clips].sources.items():
            note(f"{clips} {figure}: {source}")
    note(f"wrote {rows:,} records to {output}; next: fcp manifest build {output} --kind media --processor qwen3-vl")


def _note_unused(description: dict[str, Any], options: SourceOptions) -> None:
    """An option that does not apply is said, never dropped in silence."""
    kind = description["kind"]
    if kind == "media" and description["tokenizer"] is None:
        note("assumed tokens of time stamps by Qwen's pre-tokenizer rule; --tokenizer FILE counts them exactly")
    if options.processor is not None and kind != "media":
        note(f"--processor is not used for {kind}; --kind media reads sizes of images and videos")
    if options.tokenizer != "bytes" and description.get("tokenizer") is None:
        note(f"--tokenizer is not used: {description['path']} holds {description.get('content', 'tokens')} already")
    if options.column is not None and kind in ("text", "megatron", "media"):
        note(f"--column is not used for {kind}")
    if (options.include != ("*",) or options.exclude) and kind != "text":
        note(f"--include and --exclude are not used for {kind}; they choose files of a folder of text")
    if options.vocab_size is not None and kind != "megatron":
        note(f"--vocab-size is not used for {kind}; it follows from the tokens")


@contextmanager
def _advancing(units: int | None, kind: str) -> Iterator[Callable[[int], None]]:
    with progress() as bar:
        task = bar.add_task(f"reading {kind}", total=units)
        yield lambda done: bar.advance(task, done)


def _report(path: Path, length_column: str, *, json: bool, extra: dict[str, Any]) -> None:
    from fcp_cli.manifest.header import manifest_source
    from fcp_cli.manifest.read import read_manifest, remarks
    from fcp_cli.manifest.summary import summarize

    table = read_manifest(path, length_column=length_column)
    source = None if str(path) == "-" else manifest_source(path)
    summary = summarize(table)
    if json:
        head = {"manifest": str(path), "content_hash": table.content_hash(), "source": source}
        print_json(head | summary.as_json() | extra)
    else:
        _print_summary(human(), source, summary)
    for remark in remarks(table):
        note(remark)


def _print_summary(console: Console, source: dict[str, Any] | None, summary: ManifestSummary) -> None:
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_row("sequences", f"{summary.rows:,}")
    facts.add_row("tokens", f"{summary.tokens:,}")
    facts.add_row("length", f"min {summary.min_tokens:,}  mean {summary.mean_tokens:,.1f}  max {summary.max_tokens:,}")
    facts.add_row("", "  ".join(f"p{p:g} {length:,}" for p, length in summary.percentiles.items()))
    facts.add_row("longest 1 %", f"{summary.longest_percent_token_share:.1%} of all tokens")
    facts.add_row("source", _source_text(source))
    console.print(facts)
    console.print(_histogram(summary, ascii_only=console.options.ascii_only))


def _source_text(source: dict[str, Any] | None) -> str:
    if source is None:
        return "not recorded: the file was not made by fcp manifest build"
    place = f"{source['kind']} {source['path']}"
    return f"{place}, tokens by {source['tokenizer']}" if source.get("tokenizer") else place


def _histogram(summary: ManifestSummary, *, ascii_only: bool) -> Any:
    from rich import box
    from rich.table import Table

    from fcp_cli.report.bars import bar

    chart = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    chart.add_column("length", justify="right", no_wrap=True)
    for title in ("% of sequences", "% of tokens"):
        chart.add_column(title, no_wrap=True, min_width=7 + _BAR_CELLS)
    shares = [(span.sequences / summary.rows, span.tokens / summary.tokens) for span in summary.bins]
    largest = max(max(pair) for pair in shares)
    for span, pair in zip(summary.bins, shares, strict=True):
        bars = [f"{share:6.1%} {bar(share / largest, _BAR_CELLS, ascii_only=ascii_only)}" for share in pair]
        chart.add_row(f"{_short(span.from_tokens)} - {_short(span.to_tokens)}", *bars)
    return chart


def _short(tokens: int) -> str:
    """A power of two the way people say it: 512, 4k, 2M (binary)."""
    for factor, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k")):
        if tokens >= factor:
            return f"{tokens // factor}{letter}"
    return str(tokens)
