"""Every causal language model of the installed transformers under a plan: trained exactly, refused in a line, or wrong.

    python -m tests.every_family [MODEL_TYPE ...]

A tiny model of each type is made of the type's own config class, with random weights, in fp64, and prepared; the
gradients of two ranks (threads, with a ring, packs and rows of unequal length) are compared with those of one process.
Prints the table of docs/reference/models.md; exit status 1 if a type is wrong, or fails without a line that says why.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import re
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fcp_cli.errors import RunError
from tests.runtime.families import FAMILIES, HYBRIDS, LATENT_SIZES, SIZES, STATE_SPACES, Family
from tests.runtime.test_families import trained

_EXACT: Final = 1e-10
_IN_FP32: Final = 1e-6  # rotations, norms or routers that a class computes in fp32 whatever its weights are
_FURTHER_SIZES: Final[Mapping[str, Any]] = {
    "sliding_window": 7,  # shorter than most sequences
    "mamba_d_ssm": 64,  # of falcon_h1: heads times their size
    "num_layers": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "n_shared_experts": 1,
    "d_head": 8,
}
# Types whose config class wants sizes that depend on each other.
_BY_HAND: Final = ("codegen", "gemma4_text", "gpt_neo", "gptj", "longcat_flash", "mamba2")
_MOST_PARAMETERS: Final = 30_000_000
_SECONDS: Final = 120

Verdict = Literal["exact", "exact but for parts in fp32", "wrong", "fails", "refused", "not tried"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a type: `says` is its error relative to the largest gradient, or the line that was said."""

    verdict: Verdict
    says: str = ""


def tiny(kind: str) -> Family:
    """Return the type with the sizes that its config takes.

    Raises:
        ValueError: it is still large, or cannot be made of a config alone.
    """
    takes = CONFIG_MAPPING[kind]
    names = {*inspect.signature(takes.__init__).parameters, *getattr(takes, "attribute_map", {})}
    if "text_config" in names:
        raise ValueError("a decoder with encoders")
    sizes: dict[str, Any] = {**SIZES, **_FURTHER_SIZES}
    if "kv_lora_rank" in names:
        sizes |= LATENT_SIZES
    settings = {name: value for name, value in sizes.items() if name in names}
    family = Family(kind=kind, settings=settings, without=tuple(SIZES.keys() - names))
    family = {**FAMILIES, **HYBRIDS, **STATE_SPACES}.get(kind, family) if kind in _BY_HAND else family
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in family.build().parameters())
    except Exception as error:
        raise ValueError("its config class refuses tiny sizes") from error
    if parameters > _MOST_PARAMETERS:
        raise ValueError("its config class has sizes that tiny ones do not reach")
    return family


def outcome(kind: str) -> Outcome:
    """Train a type on two ranks and in one process."""
    try:
        family = tiny(kind)
    except ValueError as error:
        return Outcome(verdict="not tried", says=str(error))
    try:
        with TemporaryDirectory(prefix="fcp-family-") as folder:
            ranks, alone = trained(family, Path(folder))
    except RunError as error:
        return Outcome(verdict="fails" if "\n" in str(error) else "refused", says=str(error))
    except Exception as error:
        return Outcome(verdict="fails", says=f"{type(error).__name__}: {error}")
    largest = float(np.abs(alone.gradients).max())
    worst = max(float(np.abs(rank.gradients - alone.gradients).max()) for rank in ranks)
    relative = worst / largest if largest else np.inf
    trains: Verdict = "exact" if relative <= _EXACT else "exact but for parts in fp32"
    return Outcome(verdict=trains if relative <= _IN_FP32 else "wrong", says=f"{relative:.0e}")


def _in_process(kind: str, answers: Connection) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answers.send(outcome(kind))


def outcome_in_time(kind: str) -> Outcome:
    """Return what became of a type, in a process of its own: a class may end it, or not end."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_in_process, args=(kind, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(_SECONDS):
            return ours.recv()  # type: ignore[no-any-return]
        return Outcome(verdict="fails", says=f"no end within {_SECONDS} s")
    except EOFError:
        process.join()
        status = process.exitcode or 0
        said = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Outcome(verdict="fails", says=f"its process ended with {said}")
    finally:
        process.kill()
        process.join()


def table(outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    """Yield the lines of the table: types with one verdict for one reason share a row."""
    groups: defaultdict[tuple[int, str], list[str]] = defaultdict(list)
    order: tuple[Verdict, ...] = ("exact", "exact but for parts in fp32", "wrong", "fails", "refused", "not tried")
    for kind, found in outcomes.items():
        trains = found.verdict.startswith("exact")
        reason = "" if trains else _without_name(found.says, kind)
        groups[order.index(found.verdict), reason].append(kind)
    yield "| under a plan | types | model types |"
    yield "|---|---:|---|"
    for (place, reason), kinds in sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]), group[0][1])):
        worst = max((outcomes[kind].says for kind in kinds), key=_number)
        said = f"{order[place]}, error at most {worst}" if not reason else f"{order[place]}: {reason}"
        yield f"| {said} | {len(kinds)} | {', '.join(f'`{kind}`' for kind in sorted(kinds))} |"


def _number(says: str) -> float:
    try:
        return float(says)
    except ValueError:
        return 0.0


def _without_name(says: str, kind: str) -> str:
    """Return a sentence as it is for all types of which it is true: without the type's name, modules and numbers."""
    says = re.sub(rf"\b{re.escape(kind)}\b", "…", says.splitlines()[0] if says else "")
    says = re.sub(r"^\w+Attention asks", "its attention asks", says)
    says = says.removeprefix("the … model ").partition("; ")[0].partition(": ")[0]
    return re.sub(r"`|\|", "", says)


def main(words: list[str]) -> int:
    """Try the types named, or all; print a line for each on standard error, then the table; return the exit status."""
    kinds = words or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    outcomes = {}
    for kind in kinds:
        outcomes[kind] = outcome_in_time(kind)
        print(f"{kind}: {outcomes[kind].verdict}: {outcomes[kind].says}", file=sys.stderr, flush=True)
    print(f"transformers {transformers.__version__}, {len(kinds)} types\n")
    print("\n".join(table(outcomes)))
    return int(any(found.verdict in ("wrong", "fails") for found in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
