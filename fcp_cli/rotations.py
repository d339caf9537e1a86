"""Rotary positions that change with the longest sequence, of which a rank sees a part: no plan can follow them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def growing_rotation(*settings: Any) -> str | None:
    """Return the first rotary type that changes frequencies with the longest position, or None.

    Args:
        settings: values of `rope_parameters` and `rope_scaling` in a configuration: mappings, mappings by kind of
            layer, or whatever else a file holds there.
    """
    blocks = [block for block in settings if isinstance(block, Mapping)]
    for rope in (*blocks, *(inner for block in blocks for inner in block.values() if isinstance(inner, Mapping))):
        kind = str(rope.get("rope_type", rope.get("type")))
        if "dynamic" in kind:  # transformers searches for the word, too
            return kind
        # "su" is the first name of longrope; MiniCPM3 publishes equal factors, which change nothing.
        if kind in ("longrope", "su") and rope.get("short_factor") != rope.get("long_factor"):
            return kind
    return None
