"""Tokenizers for manifest builds and training: plain bytes, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fcp_cli.errors import ManifestError, refuse_missing_thread
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.plugins import pip_install
from fcp_cli.util.words import counted

# Slow tokenizers are faster than this; a regular expression with runaway backtracking is not.
_LEAST_BYTES_PER_SECOND = 20_000
_LEAST_SECONDS = 10.0
_PROBE = "a 1."
# Normalizers and templates of a tokenizer may multiply a text without end; NFKC and byte-level units, at most by 36.
_MOST_MEMORY_BYTES = 1 << 30
_MEMORY_BYTES_PER_BYTE = 1 << 12
_TOKENS_PER_CHARACTER = 64
_SPECIAL_TOKENS = 4096
_POLL_SECONDS = 0.02

Result = TypeVar("Result")


class Tokenizer(Protocol):
    """Counts and encodes texts, given as UTF-8 bytes."""

    @property
    def name(self) -> str:
        """Name for the manifest: `bytes`, or the path of the tokenizer file."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def count(self, texts: Any) -> IntArray:
        """Count the tokens of each text of an Arrow string or binary array; null counts as 0."""

    def encode(self, text: bytes) -> IntArray:
        """Return the tokens of a text: [tokens] int64."""


class ByteTokenizer:
    """Uses each UTF-8 byte as a token: no file, no training, the same everywhere."""

    name = "bytes"
    vocab_size = 256

    def count(self, texts: Any) -> IntArray:
        counts: IntArray = pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return counts

    def encode(self, text: bytes) -> IntArray:
        return np.frombuffer(text, np.uint8).astype(np.int64)


class FileTokenizer:
    """A `tokenizer.json` without truncation or padding; its post-processor adds special tokens."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ManifestError(f"there is no tokenizer {file}; --tokenizer takes a tokenizer.json or 'bytes'")
        try:
            from tokenizers import Tokenizer as HuggingFaceTokenizer
        except ImportError as error:
            raise ManifestError(
                f"--tokenizer FILE needs the tokenizers library: {pip_install('hf', 'tokenizers')}"
            ) from error
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ManifestError(f"{file} is not a tokenizer.json: {str(error).splitlines()[0]}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = str(file.resolve())
        # Some damage makes the library panic only here; with several texts, several of its threads would then hang.
        with _quiet_panics():
            self._within([_PROBE], self._probe)

    def _probe(self) -> None:
        with suppress(Exception):  # the probe may be unknown; a panic is not an Exception
            self._tokenizer.encode_batch_fast([_PROBE])

    @cached_property
    def vocab_size(self) -> int:
        return max(self.vocabulary().values()) + 1

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def count(self, texts: Any) -> IntArray:
        read = [_text(text) for text in texts.cast(pa.large_binary()).to_pylist()]
        with _quiet_panics():
            encodings = self._encoded(read)
        counts = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        # An empty text has no tokens, even if the post-processor adds special ones.
        return np.where(ByteTokenizer().count(texts) == 0, 0, counts)

    def encode(self, text: bytes) -> IntArray:
        return np.asarray(self._encoded([_text(text)])[0].ids, np.int64)

    def count_inside(self, text: str) -> int:
        """Count the tokens of part of a text, without special tokens."""
        with _quiet_panics():
            return len(self._encoded([_text(utf8(text))], add_special_tokens=False)[0])

    def _encoded(self, texts: list[str], **options: bool) -> list[Any]:
        """Encode texts; raise ManifestError if a text has more tokens than any sound tokenizer makes of it."""
        # Only `encode_batch_fast` releases the GIL, without which no other thread could give up.
        encodings: list[Any] = self._within(texts, lambda: self._tokenizer.encode_batch_fast(texts, **options))
        for text, encoding in zip(texts, encodings, strict=True):
            if len(encoding) > _TOKENS_PER_CHARACTER * len(text) + _SPECIAL_TOKENS:
                raise self._cannot_encode(len(text), f"it makes {counted(len(encoding), 'token')} of it")
        return encodings

    def _within(self, texts: list[str], encode: Callable[[], Result]) -> Result:
        """Run `encode`, with limits on time and memory that no sound tokenizer reaches."""
        size = sum(map(len, texts))
        done: list[Result] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                done.append(encode())
            except BaseException as error:  # a panic of the library is not an Exception
                failed.append(error)

        seconds, memory = _LEAST_SECONDS + size / _LEAST_BYTES_PER_SECOND, _memory_bytes()
        end = time.monotonic() + seconds
        worker = threading.Thread(target=run, name="fcp-tokenizer", daemon=True)  # may get stuck
        why = f"it took more than {seconds:.1f} s"
        worker.start()
        worker.join(_POLL_SECONDS)
        while worker.is_alive() and time.monotonic() < end:
            if _memory_bytes() - memory > _MOST_MEMORY_BYTES + _MEMORY_BYTES_PER_BYTE * size:
                why = f"it took more than {_MOST_MEMORY_BYTES >> 30} GiB of memory"
                break
            worker.join(_POLL_SECONDS)
        if done:
            return done[0]
        if failed:
            refuse_missing_thread(failed[0])
            why = f"it gives up with {(str(failed[0]).splitlines() or [type(failed[0]).__name__])[0]!r}"
        raise self._cannot_encode(size, why)

    def _cannot_encode(self, size: int, why: str) -> ManifestError:
        text = f"a text of {counted(size, 'character')}"
        return ManifestError(f"{self.name} cannot encode {text}: {why}; is it damaged?")


def _memory_bytes() -> int:
    """Return the resident memory of this process, or 0 without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def _quiet_panics() -> Iterator[None]:
    """Hide what the library writes directly to file descriptor 2, if that is open."""
    with _hiding:
        try:
            kept = os.dup(2)
        except OSError:
            yield
            return
        try:
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


_hiding = threading.Lock()  # a thread would keep what another one has hidden, for good


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer that a manifest or `--tokenizer` names."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(local_checkpoint(name))


def utf8(text: str) -> bytes:
    """Encode a text that may hold lone surrogates, as JSON allows."""
    return text.encode("utf-8", "surrogatepass")


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


# Look up Hugging Face hub names in the local cache; nothing is downloaded while counting lengths.

_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_checkpoint(name: str) -> Path:
    """Return the path if it exists, else the cached snapshot of that hub name."""
    path = Path(name)
    if path.exists() or not _NAME.fullmatch(name) or path.suffix in (".json", ".model"):
        return path
    repository = _cache() / f"models--{name.replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        snapshot = next((found for found in sorted(repository.glob("snapshots/*"))), repository)
    if not any(snapshot.glob("tokenizer*")):
        raise ManifestError(
            f"there is no tokenizer {name}, neither here nor in the Hugging Face cache {_cache()}; download it with: "
            f"hf download {name} --include 'tokenizer*' '*.json' '*.jinja'"
        )
    return snapshot


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
