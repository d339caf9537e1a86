"""Text to tokens: bytes as they are, or a Hugging Face `tokenizer.json`. Building and reading use the same object."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError
from fcp_cli.extras import pip_install
from fcp_cli.manifest.hub import local_checkpoint


class Tokenizer(Protocol):
    """Counts and encodes texts, given as UTF-8 bytes."""

    @property
    def name(self) -> str:
        """The name that the manifest records: `bytes`, or the path of the tokenizer file."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""

    def count(self, texts: Any) -> IntArray:
        """Count the tokens of each text of an Arrow string or binary array; a null has none."""

    def encode(self, text: bytes) -> IntArray:
        """Return the tokens of a text: [tokens] int64."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is one token: no file, no training, the same everywhere."""

    name = "bytes"
    vocab_size = 256

    def count(self, texts: Any) -> IntArray:
        counts: IntArray = pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
        return counts

    def encode(self, text: bytes) -> IntArray:
        return np.frombuffer(text, np.uint8).astype(np.int64)


class FileTokenizer:
    """A `tokenizer.json`, with the special tokens that its own post-processor adds, without truncation or padding.

    Raises:
        ManifestError: the file is missing or no tokenizer, or the `tokenizers` library is not installed.
    """

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

    @cached_property
    def vocab_size(self) -> int:
        return max(self.vocabulary().values()) + 1

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def count(self, texts: Any) -> IntArray:
        encodings = self._tokenizer.encode_batch_fast(
            [_text(text) for text in texts.cast(pa.large_binary()).to_pylist()]
        )
        counts = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        # A special token alone is no sequence: an empty text has no tokens whatever the post-processor adds.
        return np.where(ByteTokenizer().count(texts) == 0, 0, counts)

    def encode(self, text: bytes) -> IntArray:
        return np.asarray(self._tokenizer.encode(_text(text)).ids, np.int64)

    def count_inside(self, text: str) -> int:
        """Count the tokens of a piece inside a longer text: the post-processor's special tokens are left out."""
        return len(self._tokenizer.encode(_text(utf8(text)), add_special_tokens=False))


def open_tokenizer(name: str) -> Tokenizer:
    """Open the tokenizer that a manifest or `--tokenizer` names.

    Raises:
        ManifestError: there is no such tokenizer.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(local_checkpoint(name))


def utf8(text: str) -> bytes:
    """Encode a text that may hold lone surrogates, as JSON allows."""
    return text.encode("utf-8", "surrogatepass")


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
