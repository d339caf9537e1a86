"""Reactions to a NaN or infinite loss or gradient. Without torch, since the command line's options import it."""

from __future__ import annotations

from typing import Literal, TypeAlias

OnNan: TypeAlias = Literal["stop", "skip-step", "go-on"]
"""Stop the job; change no weight on any rank in the step; or do not check."""
