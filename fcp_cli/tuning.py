"""The trained part of a model: everything, low-rank adapters, or all weights except those matching patterns.

Imports nothing heavy, since it validates options of `fcp launch`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from fcp_cli.errors import UsageError
from fcp_cli.words import nearest_words

ALL_LINEAR: Final = "all-linear"
_DEFAULT_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TABLES: Final = ("lm_head", "embed_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters (Hu et al., "LoRA"): trains B A, scaled by alpha / rank, added to a frozen W [out, in].

    Attributes:
        rank: rows of A [rank, in] and columns of B [out, rank].
        alpha: scale, as in peft.
        targets: last name parts of linear layers with adapters, or only `ALL_LINEAR`: all but the head.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = _DEFAULT_TARGETS

    def __str__(self) -> str:
        return f"r={self.rank},alpha={self.alpha:g},target={'+'.join(self.targets)}"


def parse_lora(text: str) -> Lora:
    """Parse "r=16,alpha=32,target=q_proj+v_proj"; omitted fields have `Lora`'s defaults, alpha twice the rank."""
    found: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = word.partition("=")
        if key not in ("r", "alpha", "target") or not value:
            raise UsageError(f"--lora is {text!r}, where {word!r} is unknown; write r=16,alpha=32,target=q_proj+v_proj")
        found[key] = value
    rank = _positive(found.get("r", "16"), "r", text)
    if rank != int(rank):
        raise UsageError(f"--lora is {text!r}; r must be a whole number")
    targets = tuple(found["target"].split("+")) if "target" in found else _DEFAULT_TARGETS
    for target in targets:
        if not target or target in _TABLES:
            raise UsageError(
                f"--lora is {text!r}, where {target!r} cannot have an adapter; name linear layers, as q_proj+v_proj, "
                f"or {ALL_LINEAR}"
            )
    alpha = _positive(found["alpha"], "alpha", text) if "alpha" in found else 2 * rank
    return Lora(rank=int(rank), alpha=alpha, targets=targets)


def _positive(value: str, key: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"--lora is {text!r}; {key} must be a number above 0")
    return number


def patterns_of(freeze: str) -> tuple[str, ...]:
    """Return the comma-separated patterns of --freeze."""
    return tuple(filter(None, (part.strip() for part in freeze.split(","))))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a parameter's full name or its tail after a dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def frozen_names(names: Iterable[str], freeze: str) -> set[str]:
    """Return the names of the parameters that --freeze freezes."""
    names = list(names)
    frozen: set[str] = set()
    for pattern in patterns_of(freeze):
        found = {name for name in names if matches(name, pattern)}
        if not found:
            similar = ", ".join(_similar(pattern, names))
            raise UsageError(
                f"--freeze: {pattern!r} is the name of no weight{f'; similar are {similar}' * bool(similar)}"
            )
        frozen |= found
    if len(frozen) == len(names):
        raise UsageError(f"--freeze {freeze} leaves nothing to train; remove some of its patterns")
    return frozen


def _similar(pattern: str, names: list[str]) -> list[str]:
    """Return patterns built from name parts, most similar first."""
    parts = {part: None for name in names for part in name.split(".")[:-1] if not part.isdecimal()}
    wanted = next((part for part in pattern.split(".") if part.strip("*")), pattern)
    near = nearest_words(wanted.strip("*"), parts, most=3, cutoff=0.4)
    return [f"'{part}.*'" for part in near or list(parts)[:3]]


def check_tuning(lora: str | None, freeze: str | None) -> None:
    """Raise UsageError if adapters or patterns are invalid or combined."""
    if lora is not None:
        parse_lora(lora)
    if freeze is not None and not patterns_of(freeze):
        raise UsageError("--freeze is empty; give patterns of names, as 'visual.*'")
    if lora is not None and freeze is not None:
        raise UsageError(
            "--freeze and --lora exclude each other: with adapters every other weight is frozen; say with target= "
            "where adapters go"
        )
