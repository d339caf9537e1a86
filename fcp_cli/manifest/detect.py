"""Detect and open the source behind a path that the user typed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.chat import PICTURE_FIELDS, ChatData, ChatEncoder, TrainOn, has_pictures, is_chat
from fcp_cli.manifest.columnar import ARROW_SUFFIXES, DATA_SUFFIXES, PARQUET_SUFFIXES, columnar, open_shard, python_rows
from fcp_cli.manifest.mask_column import MaskedSource, mask_rule
from fcp_cli.manifest.media import MediaSizes, media_files
from fcp_cli.manifest.megatron import MegatronIndex
from fcp_cli.manifest.pictures import PictureData
from fcp_cli.manifest.records import records_of
from fcp_cli.manifest.sources import Source
from fcp_cli.manifest.table import read_header, readable
from fcp_cli.manifest.text import JsonLines, TextTree, holds_lines, size_of, usual_field
from fcp_cli.manifest.tokenizer import FileTokenizer, local_checkpoint, open_tokenizer
from fcp_cli.util.files import as_word, near_file
from fcp_cli.util.inputs import inner_suffix, is_compressed
from fcp_cli.util.parquet import open_footer
from fcp_cli.util.remote import each
from fcp_cli.vision.processors import open_processor, words_of

_SUFFIXES: Final = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": PARQUET_SUFFIXES,
    "arrow": ARROW_SUFFIXES,
    "megatron": (".idx",),
    "media": (".tar",),
}
_LENGTH_SUFFIXES: Final = (".txt", ".csv", ".tsv")
KINDS: Final = ("text", "chat", *_SUFFIXES)
LISTED_KINDS: Final = ("jsonl", "chat", "parquet", "arrow", "media")
"""Kinds whose source may consist of several files."""
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
_SPLITS: Final = "dataset_dict.json"  # `DatasetDict.save_to_disk` writes it next to the folders of its splits
_SHARDED: Final = ("parquet", "arrow", "jsonl", "media")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Settings for reading a source; each applies to some kinds only.

    Attributes:
        tokenizer: `bytes`, a `tokenizer.json`, a checkpoint folder, or the hub name of a checkpoint in the local cache.
        column: field or column with tokens, texts or lengths; None: try common names.
        include: globs of files of a text tree to read.
        exclude: globs of files and folders of a text tree to skip.
        processor: media processor: the name of a published one, or a checkpoint folder.
        vocab_size: vocabulary size of Megatron data, if known; saves scanning its `.bin` for the largest token.
        train_on: turns of chat data to train on.
        skips_bad: skip records whose images or videos fail to decode.
        mask: mask rule (see `mask_rule`); None: all sequences are causal.
    """

    tokenizer: str = "bytes"
    train_on: TrainOn = "assistant"
    column: str | None = None
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    processor: str | None = None
    vocab_size: int | None = None
    skips_bad: bool = False
    mask: str | None = None


def detect_kind(path: Path, files: Sequence[Path] = ()) -> str:
    """Detect the kind of a source from its suffix, and chat data from its first record.

    A folder has the kind of its files, else it is a text tree. A tar that contains JSON lines is read as JSON lines.

    Args:
        path: the source.
        files: its files, if they were named one by one.
    """
    kind = _kind_by_name(files[0] if files else path)
    files = files or (_shard_paths(path, kind) if kind in _SHARDED and path.is_dir() else [path])
    if kind == "media" and files[0].suffix == ".tar":
        kind = "jsonl" if holds_lines(files[0]) else kind
    if kind in ("jsonl", "parquet", "arrow"):
        with suppress(ManifestError, StopIteration):  # errors are reported when the source is opened
            record = _first_record(files[0])
            if is_chat(record) and _is_about_pictures(record):
                return "media"
            if is_chat(record) and not record.get("text"):
                return "chat"
    return kind


def _first_record(file: Path) -> dict[str, Any]:
    """Return the first record of a file; of a table, only if its columns are those of conversations, else {}."""
    if file.suffix not in DATA_SUFFIXES:
        return next(records_of(file)).record
    shard = open_shard(file)
    names = list(shard.schema.names)
    return python_rows(next(shard.batches(names, 1)), file)[0] if is_chat(dict.fromkeys(names, True)) else {}


def _is_about_pictures(record: dict[str, Any]) -> bool:
    turns = record.get("messages") or record.get("conversations") or []
    contents = [turn.get("content") for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    return any(record.get(name) for name in PICTURE_FIELDS) or any(map(has_pictures, contents))


def _kind_by_name(path: Path) -> str:
    if path.name and path.with_name(f"{path.name}.idx").is_file():
        return "megatron"  # Megatron-LM users type the prefix
    if path.is_dir():
        if (path / _SPLITS).is_file():
            splits = ", ".join(str(state.parent) for state in sorted(path.glob("*/state.json"))) or f"{path}/SPLIT"
            raise ManifestError(f"{path} holds several splits; name the one to read: {splits}")
        return next((kind for kind in _SHARDED if _shard_paths(path, kind)), "text")
    if not path.exists():
        raise ManifestError(f"there is no source {path}{near_file(path)}")
    for kind, suffixes in _SUFFIXES.items():
        if inner_suffix(path) in suffixes:
            if is_compressed(path) and kind != "jsonl":
                raise ManifestError(f"{path} is compressed; only JSON lines are read from .gz and .zst: unpack it")
            return kind
    if path.suffix == ".bin" and path.with_suffix(".idx").is_file():
        return "megatron"
    if path.suffix in _LENGTH_SUFFIXES:
        raise ManifestError(
            f"{path} holds lengths, which are planned as they are: fcp plan {as_word(path)}; for texts name the "
            f"folder that holds {path.name}, for sizes of images and videos add --kind media"
        )
    raise ManifestError(f"cannot recognize the kind of {path} by its name; choose with --kind {'|'.join(KINDS)}")


def open_source(
    path: Path, kind: str, options: SourceOptions, *, output: Path | None = None, files: Sequence[Path] = ()
) -> Source:
    """Open a source to count its sequences, with masks if the options name a rule."""
    if options.mask is None:
        return _open_source(path, kind, options, output, files)
    rule = mask_rule(options.mask)
    if kind == "media" or (rule.column and kind not in ("jsonl", "parquet", "arrow")):
        named = "sequences of token ids or texts" if kind == "media" else "JSONL, Parquet or Arrow with that column"
        raise UsageError(f"--mask {rule} needs {named}, not --kind {kind}")
    return MaskedSource(_open_source(path, kind, options, output, files, rule.column), rule)


def _open_source(
    path: Path,
    kind: str,
    options: SourceOptions,
    output: Path | None,
    named: Sequence[Path],
    mask_column: str = "",
) -> Source:
    """Open a source without masks.

    Args:
        path: the source.
        kind: one of `KINDS`.
        options: how to read it.
        output: absolute path of the manifest; a text tree skips it, and it must not become a shard.
        named: files named one by one.
        mask_column: column copied as `mask`; "" for none.
    """
    path = path.absolute()
    if kind == "megatron":
        # Megatron's --data-path is a prefix without a suffix, which may contain dots.
        is_file = path.suffix in (".bin", ".idx")
        index = path.with_suffix(".idx") if is_file else path.with_name(f"{path.name}.idx")
        return MegatronIndex.open(index, vocab_size=options.vocab_size)
    if kind == "media":
        return _media(path, options, named)
    if kind == "chat":
        return _chat(path, options, named)
    tokenizer = open_tokenizer(options.tokenizer)
    if kind == "text":
        if not path.is_dir():
            raise ManifestError(f"{path} is not a folder; --kind text takes a folder of text files")
        return TextTree(root=path, include=options.include, exclude=options.exclude, tokenizer=tokenizer, output=output)
    if output is not None and not named and output.parent == path:
        raise UsageError(f"-o {output} would be among the files of {path}; name another folder with -o")
    files = list(named) or (_shard_paths(path, kind) if path.is_dir() else [path])
    if not files:
        raise ManifestError(f"{path} holds no {' or '.join(_SUFFIXES[kind])} file")
    if kind == "jsonl":
        each(size_of, files)  # query all sizes concurrently; they are cached
        column = options.column or usual_field(files[0])
        return JsonLines(path=path, files=tuple(files), column=column, tokenizer=tokenizer, mask_column=mask_column)
    return columnar(path, each(open_shard, files), options.column, tokenizer, mask_column=mask_column)


def _chat(path: Path, options: SourceOptions, named: Sequence[Path]) -> ChatData:
    if options.tokenizer == "bytes":
        raise UsageError(
            "chat data is rendered by a checkpoint's chat template; give the checkpoint's folder with --tokenizer "
            "FOLDER, or name a field of texts or tokens with --kind and --column"
        )
    files = list(named) or _record_files(path)
    folder = local_checkpoint(options.tokenizer).absolute()
    folder = folder.parent if folder.is_file() else folder
    return ChatData(path=path, files=tuple(files), encoder=ChatEncoder(folder, options.train_on))


def _media(path: Path, options: SourceOptions, named: Sequence[Path]) -> MediaSizes | PictureData:
    model = options.processor or (options.tokenizer if Path(options.tokenizer).is_dir() else None)
    if model is None:
        raise UsageError(
            "--kind media needs --processor: qwen3-vl, qwen2.5-vl, internvl, gemma3, gemma4 or the folder of a "
            "checkpoint"
        )
    processor = open_processor(model)
    files = _picture_files(path, named) if any((Path(model) / name).is_file() for name in _TOKENIZER_FILES) else []
    if files:
        folder = Path(model).absolute()
        encoder = ChatEncoder(folder, options.train_on, processor)
        return PictureData(path=path, files=tuple(files), encoder=encoder, skips_bad=options.skips_bad)
    sizes = tuple(named or media_files(path))
    if options.tokenizer == "bytes":
        return MediaSizes(path=path, files=sizes, processor=processor, count_text=words_of, counted_by="rule")
    tokenizer = FileTokenizer(local_checkpoint(options.tokenizer))
    return MediaSizes(
        path=path, files=sizes, processor=processor, count_text=tokenizer.count_inside, counted_by=tokenizer.name
    )


def _record_files(path: Path) -> list[Path]:
    """Return the file itself, or the record files of a folder."""
    kind = next((kind for kind in ("parquet", "arrow", "jsonl") if path.is_dir() and _shard_paths(path, kind)), None)
    return [path] if kind is None else _shard_paths(path, kind)


def _picture_files(path: Path, named: Sequence[Path]) -> list[Path]:
    """Return the files with pictures or their names; [] if the source holds sizes only."""
    if not named and (path.suffix == ".tar" or (path.is_dir() and _shard_paths(path, "media"))):
        return media_files(path)
    files = list(named) or _record_files(path)
    if files[0].suffix == ".tar":
        return files
    if files[0].is_dir() or files[0].suffix in (".csv", ".tsv"):
        return []
    record = next((found.record for found in records_of(files[0])), {})
    images = record.get("images")
    has_sizes = isinstance(images, list) and any(isinstance(image, dict) and "height" in image for image in images)
    return [] if has_sizes or any(name in record for name in ("text_tokens", "width")) else files


def _shard_paths(folder: Path, kind: str) -> list[Path]:
    suffixes = [suffix for suffix in _SUFFIXES[kind] if suffix != ".json"]  # in folders, .json has many uses
    suffix_of = inner_suffix if kind == "jsonl" else attrgetter("suffix")
    files = sorted(file for file in folder.iterdir() if suffix_of(file) in suffixes and not file.name.startswith("."))
    if kind == "jsonl" and not files:
        tars = _shard_paths(folder, "media")
        files = tars if tars and holds_lines(tars[0]) else []
    return [file for file in files if kind != "parquet" or not _made_by_fcp(file)]


def _made_by_fcp(file: Path) -> bool:
    """Return whether fcp wrote the file: manifests and plans in a data folder are not data."""
    with suppress(ManifestError), readable(file):
        return bool(read_header(open_footer(file)))
    return False  # errors are reported when the file is opened
