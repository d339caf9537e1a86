"""What becomes of a step whose loss, or gradient, is NaN or infinite. Imports no torch: it is an option, too."""

from __future__ import annotations

from typing import Literal, TypeAlias

OnNan: TypeAlias = Literal["stop", "skip-step", "go-on"]
"""The job stops, the step changes no weight on any rank, or nothing is looked at."""
