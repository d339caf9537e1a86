"""Opens Parquet files that anybody may have written, and reads what their footers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fcp_cli.reading.documents import decode_json
from fcp_cli.words import first_sentence

FOOTER_KEY: Final = b"fcp"
FAILURES: Final = (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError)
"""What reading a damaged file may raise; an FcpError is none of them."""
_MOST_VALUES: Final = 100_000


def open_parquet(path: Path, footer: Any = None) -> Any:
    """Open a Parquet file; its names are known to be readable.

    Raises:
        Exception: one of `FAILURES`.
    """
    file = pq.ParquetFile(path, metadata=footer)
    require_names(file.schema_arrow)
    return file


def open_footer(path: Path) -> Any:
    """Read the footer of a Parquet file; its names are known to be readable.

    Raises:
        Exception: one of `FAILURES`.
    """
    footer = pq.read_metadata(path)
    require_names(footer.schema.to_arrow_schema())
    return footer


def footer_document(pairs: Mapping[bytes, bytes] | None) -> Any:
    """Return the JSON that fcp wrote among the key-value pairs of a footer; None where there is none.

    Raises:
        DamagedError: it is not JSON, or larger than fcp writes it.
    """
    text = (pairs or {}).get(FOOTER_KEY)
    return None if text is None else decode_json(text, most_values=_MOST_VALUES)


def reason_of(failure: BaseException) -> str:
    """Return why a file could not be read, in a few words."""
    if isinstance(failure, UnicodeError):
        return "a name in it, or its own, is not UTF-8"
    return "it states more than fits into memory" if isinstance(failure, MemoryError) else first_sentence(failure)


def require_names(schema: Any) -> None:
    """Check the columns' names, which pyarrow decodes only when asked, and of which files may hold one twice.

    Raises:
        ValueError: one is not UTF-8, or there twice.
    """
    name = next((name for name, count in Counter(schema.names).items() if count > 1), None)
    if name is not None:
        raise ValueError(f"it has two columns named {name!r}")
