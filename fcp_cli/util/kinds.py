"""Recognizes fcp's file formats, for the message of a command that got the wrong kind of file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, Literal, NamedTuple

from fcp_cli.util.files import as_word

Kind = Literal["manifest", "manifest part", "plan", "cost profile", "metrics", "samples"]


class _Known(NamedTuple):
    kind: str
    noun: str
    use: str


_BY_FORMAT: Final = {
    "fcp-manifest": _Known("manifest", "a length manifest", "'fcp plan {}' plans it"),
    "fcp-manifest-part": _Known(
        "manifest part", "a part of a length manifest", "'fcp manifest merge' makes one of all parts"
    ),
    "fcp-plan": _Known("plan", "a plan", "'fcp inspect {}' shows it"),
    "fcp-cost-profile": _Known("cost profile", "a cost profile", "'fcp profile show {}' shows it"),
    "fcp-metrics": _Known("metrics", "the metrics of a run", "'fcp report PLAN --metrics {}' draws them"),
    "fcp-samples": _Known("samples", "the samples of a measurement", "'fcp profile --from-samples {}' fits them"),
    "fcp-launch": _Known("launch", "the record of a launch", "name the run's folder"),
    "fcp-owner": _Known("owner", "the owner of a run folder", "name the run's folder"),
}
_MADE_BY: Final[dict[Kind, str]] = {
    "manifest": "'fcp manifest build {}' makes one of a data set",
    "manifest part": "'fcp manifest build SOURCE --shard I/N -o {}' makes one",
    "plan": "make one with 'fcp plan MANIFEST'",
    "cost profile": "make one with 'fcp profile'",
    "metrics": "name the folder that 'fcp launch' printed",
    "samples": "'fcp profile' writes them",
}
_FORMAT: Final = re.compile(rb"\bformat\W{1,5}(fcp-[a-z-]+)/\d")  # in JSON and YAML
_HEAD_BYTES: Final = 4096  # all our writers put the format first
_PARQUET_MAGIC: Final = b"PAR1"


def another_kind(path: Path, wanted: Kind, *, may_be_text: bool = False) -> str | None:
    """Describe a file of another kind than `wanted`, and its use, or return None.

    Args:
        path: the file.
        wanted: the expected kind.
        may_be_text: whether plain text lengths or records are accepted, too.

    Returns:
        One line without a full stop; None if the file has the wanted kind, is not recognized, or cannot be read,
        which the reader will report.
    """
    if not path.is_file():  # reading from a pipe would consume it
        return None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    is_parquet = head.startswith(_PARQUET_MAGIC)
    found = _FORMAT.search(head)
    name = _format_in_footer(path) if is_parquet else found and found[1].decode()
    known = _BY_FORMAT.get(name or "")
    if known is not None and known.kind == wanted:
        return None
    if known is not None:
        return f"{path} is {known.noun}, not {_noun(wanted)}; {known.use.format(as_word(path))}"
    if is_parquet == (wanted in ("manifest", "plan")) or (may_be_text and not is_parquet):
        return None
    if not is_parquet and (not head.isascii() or not head.strip() or b"\0" in head):
        return None
    form = "a Parquet file" if is_parquet else "text"
    return f"{path} is {form}, not {_noun(wanted)}; {_MADE_BY[wanted].format(as_word(path))}"


def _noun(kind: Kind) -> str:
    return next(known.noun for known in _BY_FORMAT.values() if known.kind == kind)


def _format_in_footer(path: Path) -> str | None:
    """Return the format in a Parquet footer under the key `fcp`, or None."""
    from fcp_cli.util.parquet import FAILURES, footer_document, open_footer

    try:
        header = footer_document(open_footer(path).metadata)
    except FAILURES:
        return None
    return str(header.get("format"))[:80].partition("/")[0] if isinstance(header, dict) else None
