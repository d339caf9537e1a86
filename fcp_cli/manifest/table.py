"""Planner input from a manifest: lengths and work factors as flat arrays (contract `fcp-manifest/1`)."""

from __future__ import annotations

import hashlib
import mmap
import os
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fcp_cli.errors import ManifestError
from fcp_cli.util.arrays import FloatArray, IntArray
from fcp_cli.util.files import as_word, near_file
from fcp_cli.util.kinds import another_kind
from fcp_cli.util.masks import MaskRows
from fcp_cli.util.parquet import FAILURES, FOOTER_KEY, footer_document, open_footer, reason_of
from fcp_cli.util.remote import StoreError
from fcp_cli.util.validation import shown
from fcp_cli.util.words import counted, has_control_characters

_COLUMNS: Final = ("length_tokens", "eta", "vision_patches", "vision_patch_pairs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthTable:
    """The sequences of a manifest, one entry per row, in row order.

    Attributes:
        name: file name, for messages and plan metadata.
        length_tokens: [rows] int64, > 0.
        eta: [rows] mask factor of the papers (0 causal, 1 full), or None if all are 0.
        vision_patches: [rows] patches the vision encoder runs, or None.
        vision_patch_pairs: [rows] sum over frames or tiles of patches squared, or None.
        column: the column that the lengths were read from.
        masks: the masks of all rows; None if the manifest was built without.
    """

    name: str
    length_tokens: IntArray
    eta: FloatArray | None = None
    vision_patches: IntArray | None = None
    vision_patch_pairs: IntArray | None = None
    column: str = "length"
    masks: MaskRows | None = None

    def __len__(self) -> int:
        return len(self.length_tokens)

    @property
    def argument(self) -> str:
        """Command-line argument that names this table's file; `-` if it was piped."""
        return "-" if self.name == "stdin" else self.name

    def take(self, rows: IntArray) -> LengthTable:
        """Return the given rows, in the given order."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        taken: dict[str, Any] = {name: None if values is None else values[rows] for name, values in columns.items()}
        return LengthTable(name=self.name, column=self.column, **taken)

    def gather(self, rows: IntArray) -> LengthTable:
        """Return the given rows in the given order, with one sequential pass over each column."""
        order = np.argsort(rows)
        wanted = rows[order]
        found: dict[str, Any] = {}
        for name in _COLUMNS:
            column = getattr(self, name)
            found[name] = None if column is None else np.empty(len(rows), column.dtype)
            for first, part in () if column is None else chunked(column):
                here = slice(*np.searchsorted(wanted, (first, first + len(part))))
                found[name][order[here]] = part[wanted[here] - first]
        return LengthTable(name=self.name, column=self.column, **found)

    def content_hash(self) -> str:
        """SHA-256 of the columns that planning reads; independent of file layout and writer."""
        digest = hashlib.sha256(b"fcp-manifest/1")
        for column in (getattr(self, name) for name in _COLUMNS):
            if column is None:
                digest.update(b"absent")
                continue
            for _, part in chunked(column):
                digest.update(np.ascontiguousarray(part, dtype=column.dtype.newbyteorder("<")).data)
        return digest.hexdigest()


# Columns of manifests of any size: in memory, or in a temporary file above `ROWS_IN_MEMORY` rows.

ROWS_IN_MEMORY: Final = 1 << 25
"""Limit of rows in memory; it also decides how a seed permutes rows, so changing it changes plans."""
_CHUNK_ROWS: Final = 1 << 22


def new_column(rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a zero-filled column; above `ROWS_IN_MEMORY` rows, map it from a temporary file in `TMPDIR`."""
    if rows <= ROWS_IN_MEMORY:
        return np.zeros(rows, dtype)
    try:
        with tempfile.TemporaryFile(prefix="fcp-column-") as file:  # unnamed: it vanishes when unmapped
            os.posix_fallocate(file.fileno(), 0, rows * np.dtype(dtype).itemsize)  # detect a full disk now
            return np.memmap(file, dtype=dtype, mode="w+", shape=(rows,))
    except OSError as error:
        gigabytes = rows * np.dtype(dtype).itemsize / 1e9
        raise ManifestError(
            f"a column of {rows} rows needs {gigabytes:.1f} GB in {tempfile.gettempdir()}: {error.strerror or error}; "
            "name a folder with room in TMPDIR"
        ) from error


def chunked(column: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield (first row, piece) of a column; pages of a mapped file are released after each piece."""
    for first in range(0, max(len(column), 1), _CHUNK_ROWS):
        yield first, column[first : first + _CHUNK_ROWS]
        release(column)


def release(column: npt.NDArray[Any]) -> None:
    """Release the resident pages of a mapped column; reading loads them again."""
    mapped = getattr(column, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)


# Validation of manifest rows from any source.

NULL: Final = int(np.iinfo(np.int64).min)  # stands for a null length until validation reports its row
LONGEST_TOKENS: Final = 2**31 - 1  # a plan holds lengths as int32
FACTORS: Final = ("eta", "vision_patches", "vision_patch_pairs")
USUAL_LENGTHS: Final = (
    *("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "seq_length"),
    *("input_ids", "tokens", "token_ids"),
)
"""Common names of columns with lengths or token ids, in order of preference."""


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of the list types."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def length_column_of(wanted: str, usable: Collection[str]) -> str:
    """Return the length column: `wanted`, or if that is the default and missing, a common name.

    Args:
        wanted: requested column; `length` is the default.
        usable: columns that hold whole numbers or lists.
    """
    if wanted != USUAL_LENGTHS[0]:
        return wanted
    return next((name for name in USUAL_LENGTHS if name in usable), wanted)


def empty_factors(rows: int, names: Collection[str] = FACTORS) -> dict[str, FloatArray | IntArray]:
    """Return a zero-filled column for each named factor."""
    return {name: new_column(rows, np.float64 if name == "eta" else np.int64) for name in names}


def checked_table(
    name: str, length_column: str, lengths: IntArray, factors: Mapping[str, FloatArray | IntArray]
) -> LengthTable:
    """Validate all values and return the table, without factors that are zero in all rows."""
    bad = np.concatenate(
        [first + np.flatnonzero((part <= 0) | (part > LONGEST_TOKENS)) for first, part in chunked(lengths)]
    )
    if len(bad):
        raise ManifestError(_bad_length(name, length_column, lengths, bad))
    for column, values in factors.items():
        _check_factor(name, column, values, *((-1, ">") if column == "eta" else (0, ">=")))
    # Dropping all-zero factors makes the content hash, and with it the plan, independent of whether they were given.
    kept: dict[str, Any] = {
        column: values if any(part.any() for _, part in chunked(values)) else None for column, values in factors.items()
    }
    return LengthTable(name=name, length_tokens=lengths, column=length_column, **kept)


def _check_factor(name: str, column: str, values: FloatArray | IntArray, least: int, relation: str) -> None:
    compare = np.greater if relation == ">" else np.greater_equal
    broken = np.concatenate(
        [first + np.flatnonzero(~(compare(part, least) & np.isfinite(part))) for first, part in chunked(values)]
    )
    if len(broken):
        row = int(broken[0])
        raise ManifestError(
            f"{name}: row {row} of column {column!r} is {values[row]}; it must be a finite number {relation} {least} "
            f"({_rows(len(broken))} in all)"
        )


def _bad_length(name: str, length_column: str, lengths: IntArray, bad: IntArray) -> str:
    row, value = int(bad[0]), int(lengths[bad[0]])
    shown = "null" if value == NULL else str(value)
    allowed = "lengths must be > 0 tokens" if value <= 0 else f"lengths must be at most {LONGEST_TOKENS} tokens"
    every = "all rows" if len(bad) == len(lengths) else f"{_rows(len(bad))} in all"
    return (
        f"{name}: row {row} of column {length_column!r} is {shown}; {allowed} ({every}); "
        "drop such rows or name another column with --length-column"
    )


def _rows(count: int) -> str:
    return counted(count, "such row")


# The manifest header, JSON under the schema metadata key `fcp`, and the files of a manifest.

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
    """Return the file itself, the files that a glob matches, or a folder's `.parquet`, else `.arrow` files, by name."""
    if path.is_dir():
        files = sorted(path.glob("*.parquet")) or sorted(path.glob("*.arrow"))
        if not files:
            raise ManifestError(_what_folder(path))
        return files
    if path.exists():
        return [path]
    if matched := sorted(glob(str(path), recursive=True)):  # noqa: PTH207  the glob may be absolute
        return [Path(name) for name in matched]
    made = path.with_suffix(".parquet")
    output = "MANIFEST" if made.exists() or "*" in path.name else made
    mend = near_file(path) or f"; `fcp manifest build SOURCE -o {as_word(output)}` makes a manifest"
    raise ManifestError(f"{path} does not exist{mend}")


def _what_folder(path: Path) -> str:
    """Describe a folder without a manifest, and suggest a command that builds one."""
    if any(path.glob("*/*.arrow")):  # DatasetDict.save_to_disk: a folder per split
        splits = sorted(file.parent.name for file in path.glob("*/*.arrow"))
        one = as_word(path / splits[0])
        return (
            f"{path} holds the splits {', '.join(dict.fromkeys(splits))}; name the folder of one: `fcp plan {one}` "
            f"(texts and conversations: `fcp manifest build {one}` with --tokenizer)"
        )
    return f"{path} is a folder without .parquet files; `fcp manifest build {as_word(path)}` reads text"


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
    if path not in files or path.suffix in NOT_PARQUET:
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
