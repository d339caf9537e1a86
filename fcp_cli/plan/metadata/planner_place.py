"""Who plans while a job trains. Imports nothing: it is an option, too."""

from __future__ import annotations

from typing import Literal, TypeAlias

PlannerPlace: TypeAlias = Literal["rank0", "all"]
"""One process that plans for the whole job, or one on each node, which must all plan the same."""
