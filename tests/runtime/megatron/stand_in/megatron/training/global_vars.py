"""The arguments of Megatron-LM's training loop, which reads `exit_interval` after each step."""

from __future__ import annotations

from typing import Any

_GLOBAL_ARGS: Any = None


def set_args(args: Any) -> None:
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
