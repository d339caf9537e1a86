"""Commands as text: quoted so that every word arrives unchanged, some with variables that only the node knows."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

# No argument of a process can hold it, so it never occurs in a real word.
_MARK = "\0"


def variable(name: str) -> str:
    """Return a stretch of a word that is the value of a variable on the machine that runs the command."""
    return f"{_MARK}{name}{_MARK}"


def quote(word: str) -> str:
    """Quote a word as shlex.quote does; variables are put in double quotes, as in --node-rank="$SLURM_NODEID"."""
    if not word:
        return "''"
    pieces = enumerate(word.split(_MARK))
    return "".join(f'"${piece}"' if index % 2 else (shlex.quote(piece) if piece else "") for index, piece in pieces)


def join(words: Iterable[str]) -> str:
    """Return a command line for a POSIX shell."""
    return " ".join(map(quote, words))


def kubernetes_word(word: str) -> str:
    """Write a word as a container's command takes it: no shell, but $(NAME) is replaced and $$ is a dollar sign."""
    pieces = enumerate(word.split(_MARK))
    return "".join(f"$({piece})" if index % 2 else piece.replace("$", "$$") for index, piece in pieces)
