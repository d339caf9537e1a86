"""Models that rings cannot compute exactly: special layers, and rotary types that depend on the longest sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SELECTED: Final = (
    "attends to the tokens that an indexer selects among all earlier ones (sparse attention): a ring would also carry "
    "the indexer's keys and select over the scores of all ranks, and ring kernels take no selected tokens"
)
_CHANNEL_DECAY: Final = "has linear attention that decays per channel (KDA), and states on rings decay per head"
_LIGHTNING: Final = "has lightning attention, whose states fcp does not pass on between ranks"
_CONVOLUTION: Final = "has layers of short convolutions alone, whose halos fcp does not exchange"
_MISSING: Final[Mapping[str, str]] = {
    "deepseek_v32": _SELECTED,
    "deepseek_v4": _SELECTED,
    "glm_moe_dsa": _SELECTED,
    "glm5_next": _SELECTED,
    "minimax_m3_vl_text": _SELECTED,
    "kimi_linear": _CHANNEL_DECAY,
    "minimax": _LIGHTNING,
    "bailing_hybrid": _LIGHTNING,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "lfm3": _CONVOLUTION,
}


def missing_for_rings(model_type: str) -> str | None:
    """Return why rings cannot compute a model type, as the rest of a sentence; None if unknown."""
    return _MISSING.get(model_type)


def growing_rotation(*settings: Any) -> str | None:
    """Return the first rotary type whose frequencies depend on the longest position, or None.

    Args:
        settings: values of `rope_parameters` and `rope_scaling`: mappings, mappings by layer kind, or anything else
            found in a file.
    """
    blocks = [block for block in settings if isinstance(block, Mapping)]
    for rope in (*blocks, *(inner for block in blocks for inner in block.values() if isinstance(inner, Mapping))):
        kind = str(rope.get("rope_type", rope.get("type")))
        if "dynamic" in kind:  # transformers searches for the word, too
            return kind
        # "su" is an older name of longrope; MiniCPM3 has equal factors, which change nothing.
        if kind in ("longrope", "su") and rope.get("short_factor") != rope.get("long_factor"):
            return kind
    return None
