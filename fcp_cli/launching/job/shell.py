"""Quotes commands for shells and Kubernetes; words may contain variables that are only known on the node."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

# Delimits variables; process arguments cannot contain NUL.
_MARK = "\0"


def variable(name: str) -> str:
    """Return a placeholder for a shell variable on the machine that runs the command."""
    return f"{_MARK}{name}{_MARK}"


def quote(word: str) -> str:
    """Quote a word like shlex.quote; variables are double-quoted, as in --node-rank="$SLURM_NODEID"."""
    if not word:
        return "''"
    pieces = enumerate(word.split(_MARK))
    return "".join(f'"${piece}"' if index % 2 else (shlex.quote(piece) if piece else "") for index, piece in pieces)


def join(words: Iterable[str]) -> str:
    """Return a command line for a POSIX shell."""
    return " ".join(map(quote, words))


def kubernetes_word(word: str) -> str:
    """Format a word for a container command, which has no shell: variables become $(NAME), and $ becomes $$."""
    pieces = enumerate(word.split(_MARK))
    return "".join(f"$({piece})" if index % 2 else piece.replace("$", "$$") for index, piece in pieces)
