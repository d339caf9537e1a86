"""The manifest header, JSON under the schema metadata key `fcp`, and the files of a manifest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fcp_cli.errors import ManifestError
from fcp_cli.kinds import another_kind
from fcp_cli.reading.parquet import FAILURES, FOOTER_KEY, footer_document, open_footer, reason_of
from fcp_cli.reading.remote import StoreError
from fcp_cli.validation import shown
from fcp_cli.words import has_control_characters

METADATA_KEY: Final = FOOTER_KEY
MANIFEST_FORMAT: Final = "fcp-manifest/1"
LEARNED_COLUMN: Final = "learned_tokens"
"""Column of chat data: number of trained tokens of a sequence."""
LINE_SUFFIXES: Final = (".jsonl", ".ndjson", ".txt")
TABLE_SUFFIXES: Final = (".csv", ".tsv")
NOT_PARQUET: Final = (*LINE_SUFFIXES, *TABLE_SUFFIXES, ".arrow", ".feather", ".ipc")


@contextmanager
def readable(path: Path, *, kind: str = "Parquet") -> Iterator[None]:
    """Context manager that turns any failure to read a data file into a one-line ManifestError."""
    try:
        yield
    except StoreError as error:
        raise ManifestError(str(error)) from error
    except FAILURES as error:
        reason = reason_of(error)
        raise ManifestError(
            f"{path} cannot be read as {kind} ({reason}): truncated, damaged or another format; copy or make it again"
        ) from error


def manifest_files(path: Path) -> list[Path]:
    """Return the file itself, or the `.parquet` files of a folder, else its `.arrow` files, in name order."""
    if path.is_dir():
        files = sorted(path.glob("*.parquet")) or sorted(path.glob("*.arrow"))
        if not files:
            raise ManifestError(_what_folder(path))
        return files
    if not path.exists():
        made = path.with_suffix(".parquet")
        raise ManifestError(f"{path} does not exist; `fcp manifest build SOURCE -o {made}` makes a manifest")
    return [path]


def _what_folder(path: Path) -> str:
    """Describe a folder without a manifest, and suggest a command that builds one."""
    if any(path.glob("*/*.arrow")):  # DatasetDict.save_to_disk: a folder per split
        splits = sorted(file.parent.name for file in path.glob("*/*.arrow"))
        return (
            f"{path} holds the splits {', '.join(dict.fromkeys(splits))}; name the folder of one: `fcp plan "
            f"{path / splits[0]}` (texts and conversations: `fcp manifest build {path / splits[0]}` with --tokenizer)"
        )
    return f"{path} is a folder without .parquet files; `fcp manifest build {path}` reads text"


def read_footer(file: Path) -> Any:
    """Read the Parquet footer of a manifest file."""
    if mistaken := another_kind(file, "manifest"):
        raise ManifestError(mistaken)
    with readable(file):
        footer = open_footer(file)
    format_name = str(read_header(footer).get("format", MANIFEST_FORMAT))
    if format_name != MANIFEST_FORMAT:
        raise ManifestError(f"{file} has the format {format_name!r}; this version of fcp reads {MANIFEST_FORMAT!r}")
    return footer


def read_header(footer: Any) -> dict[str, Any]:
    """Return the header that fcp wrote into a footer; {} for a foreign file."""
    try:
        header = footer_document(footer.metadata)
    except ValueError:
        return {}
    return header if isinstance(header, dict) else {}


def manifest_source(path: str | Path) -> dict[str, Any] | None:
    """Return the recorded source of a built manifest, or None for data planned directly."""
    path = Path(path)
    files = manifest_files(path)
    if path.is_dir() or path.suffix in NOT_PARQUET:
        return None
    source = read_header(read_footer(files[0])).get("source")
    return _checked_source(source, path) if isinstance(source, dict) else None


_TEXTS: Final = ("path", "kind", "tokenizer", "column", "train_on", "content", "mask")
_LISTS: Final = ("include", "exclude", "files")
_NEEDED: Final = {"chat": ("tokenizer", "train_on"), "text": ("tokenizer",), "jsonl": ("column",)}


def _checked_source(source: dict[str, Any], path: Path) -> dict[str, Any]:
    """Validate the types of a recorded source, and return it."""
    kind = source.get("kind")
    needed = ("path", "kind", *(_NEEDED.get(kind, ()) if isinstance(kind, str) else ()))
    if source.get("content") == "pixels":
        needed += ("processor", "tokenizer", "train_on")
    wrong = [name for name in needed if source.get(name) is None]
    wrong += [name for name in _TEXTS if source.get(name) is not None and not _are_texts([source[name]])]
    wrong += [name for name in _LISTS if not _are_texts(source.get(name, []))]
    size, processor = source.get("vocab_size"), source.get("processor")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 63):
        wrong.append("vocab_size")
    if processor is not None and not (isinstance(processor, dict) and isinstance(processor.get("name"), str)):
        wrong.append("processor")
    if wrong:
        value = shown(source.get(wrong[0]))
        raise ManifestError(f"{path}: its source is damaged: {wrong[0]} is {value}; build it again")
    return source


def _are_texts(value: Any) -> bool:
    # These values appear in messages and commands, where a terminal would obey control characters.
    return isinstance(value, list) and all(isinstance(item, str) and not has_control_characters(item) for item in value)


def build_command(source: Mapping[str, Any], manifest: Path) -> str:
    """Return the `fcp manifest build` line that makes `manifest` again from a recorded source."""
    return shlex.join(["fcp", "manifest", "build", source["path"], *_build_options(source), "-o", str(manifest)])


def _build_options(source: Mapping[str, Any]) -> list[str]:
    """Return the options of `fcp manifest build` that a recorded source was read with."""
    words = ["--kind", source["kind"]]
    for pattern in source.get("include", []):
        words += ["--include", pattern]
    for pattern in source.get("exclude", []):
        words += ["--exclude", pattern]
    if source.get("column"):
        words += ["--column", str(source["column"])]
    if source.get("processor"):
        words += ["--processor", str(source["processor"]["name"])]
    if source.get("tokenizer") not in (None, "bytes") and source.get("content") != "pixels":
        words += ["--tokenizer", str(source["tokenizer"])]
    if source.get("train_on"):
        words += ["--train-on", str(source["train_on"])]
    if source.get("mask"):
        words += ["--mask", str(source["mask"])]
    return words
