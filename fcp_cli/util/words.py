"""Formats numbers and messages for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: "1 step", "1,200 steps"."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending}"


def one_line(text: str, *, most: int = 1200) -> str:
    """Return a message as one line without control characters; shorten a long one in the middle, before its remedy."""
    line = _CONTROL.sub(" ", text.strip("\n").encode(errors="backslashreplace").decode()).rstrip()
    return line if len(line) <= most else f"{line[: most * 2 // 3]} [...] {line[-(most // 3) :]}"


def has_control_characters(text: str) -> bool:
    """Return whether a text has control characters, such as line ends, that a terminal or job file would interpret."""
    return _OBEYED.search(text) is not None


_OBEYED = re.compile(r"[\x00-\x1f\x7f]")
_MOST_CHARACTERS = 1000  # some libraries list everything they know
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def first_line(error: BaseException) -> str:
    """Return the first line of an error, shortened if long; its type if it has no message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error without its full stop; further sentences are guesses."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error).partition(". ")[0].rstrip(".")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to a misspelt one, or None."""
    return next(iter(nearest_words(word, known)), None)


def nearest_words(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return known words with a similarity of at least `cutoff` (0 to 1), most similar first."""
    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a hint for an unknown word: "; did you mean 'plan'?", or ""."""
    near = nearest(str(word), known)
    return f"; did you mean {near!r}?" if near else ""


def duration(seconds: float) -> str:
    """Format seconds with three digits: "1.23 ms", "45.6 ms", "2.68 s", "128 s", "21.3 min", "3.5 h"."""
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600.0:
        return f"{seconds:.3g} s"
    return f"{seconds / 60.0:.3g} min" if seconds < 36_000.0 else f"{seconds / 3600.0:.3g} h"


def short_count(number: float) -> str:
    """Format a number with a unit: 1234567 as 1.23M."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def short_seconds(seconds: float) -> str:
    """Format seconds in at most five characters up to a day: 0.012, 1.23, 12.34, 1234."""
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def clock(seconds: float) -> str:
    """Format 3725 seconds as 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending integers as ranges: 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
