"""Disables sequence packing in frameworks around transformers' Trainer: under a plan, the plan packs sequences."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from fcp_cli.integrations.base import require
from fcp_cli.util.arrays import IntArray


def unpack_llama_factory(parser: ModuleType) -> None:
    """Disable `packing` (on by default in pretraining) and `neat_packing` in `llamafactory.hparams.parser`."""
    require(parser, {"get_train_args": ("args",)}, found="this LLaMA-Factory", advice="version known to work: 0.9.5")
    own = parser.get_train_args

    @wraps(own)
    def get_train_args(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        model, data = found[:2]
        _turn_off("LLaMA-Factory", data, ("neat_packing", "packing"), ("cutoff_len",))
        model.block_diag_attn = False
        return found

    parser.get_train_args = get_train_args  # type: ignore[attr-defined]


def unpack_swift(sft_args: ModuleType) -> None:
    """Disable `packing` in the arguments of `swift.arguments.sft_args`."""
    require(sft_args, {"SftArguments.__post_init__": ()}, found="this ms-swift", advice="version known to work: 4.6.0")
    _before_post_init(sft_args.SftArguments, "ms-swift", ("packing",), ("packing_length", "max_length"))


def unpack_trl(sft_config: ModuleType) -> None:
    """Disable `packing` in `trl.trainer.sft_config`."""
    require(sft_config, {"SFTConfig.__post_init__": ()}, found="this TRL", advice="version known to work: 1.16.0")
    _before_post_init(sft_config.SFTConfig, "TRL", ("packing",), ("max_length",))


def unpack_axolotl(config: ModuleType) -> None:
    """Disable `sample_packing` and metrics summed over ranks in `axolotl.utils.config.validate_config`."""
    require(config, {"validate_config": ("cfg",)}, found="this axolotl", advice="version known to work: 0.19.0")
    own = config.validate_config

    @wraps(own)
    def validate_config(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        _turn_off("axolotl", cfg, ("sample_packing",), ("sequence_len",))
        cfg.eval_sample_packing = cfg.include_tkps = False  # ranks have different numbers of micro-batches
        return own(cfg, *args, **kwargs)

    config.validate_config = validate_config  # type: ignore[attr-defined]


class ReplacedPacking(NamedTuple):
    """A disabled packing: its setting, tokens of a packed row (0: of the longest sequence), if a batch is one row."""

    setting: str
    tokens: int
    joins: bool = False

    def packed_rows(self, lengths: IntArray) -> float:
        """Return the number of packed rows of sequences with these lengths, best-fit decreasing."""
        drawn = np.random.default_rng(0).permutation(lengths)[:_PACKED_ROWS]
        free: list[int] = []
        capacity = self.tokens or int(lengths.max())
        for size in np.sort(np.minimum(drawn, capacity))[::-1].tolist():
            at = bisect_left(free, size)
            insort(free, (free.pop(at) if at < len(free) else capacity) - size)
        return len(free) * len(lengths) / len(drawn)


def replaced_packing() -> ReplacedPacking | None:
    """Return the packing disabled last, or None."""
    return _replaced[-1] if _replaced else None


_replaced: list[ReplacedPacking] = []
_PACKED_ROWS: Final = 8192


def _before_post_init(kind: Any, framework: str, names: Sequence[str], lengths: Sequence[str]) -> None:
    own: Callable[..., None] = kind.__post_init__

    @wraps(own)
    def __post_init__(self: Any) -> None:
        _turn_off(framework, self, names, lengths)
        own(self)

    kind.__post_init__ = __post_init__


def _turn_off(framework: str, settings: Any, names: Sequence[str], lengths: Sequence[str]) -> None:
    asked = [name for name in names if getattr(settings, name, False)]
    for name in asked:
        setattr(settings, name, False)
    if asked:
        tokens = next((int(given) for name in lengths if (given := getattr(settings, name, None))), 0)
        _replaced.append(ReplacedPacking(f"{framework}'s {asked[0]}", tokens, joins=framework == "TRL"))
    if asked and os.environ.get("RANK", "0") == "0":
        line = f"fcp: {framework}'s {asked[0]} is off: the plan packs, and batch sizes count sequences"
        print(line, file=sys.stderr, flush=True)
