"""Actions on a step whose loss or gradient is NaN or infinite. Imports no torch: the options import it."""

from __future__ import annotations

from typing import Literal, TypeAlias

OnNan: TypeAlias = Literal["stop", "skip-step", "go-on"]
"""Stop the job; change no weight on any rank in the step; or do not check."""
