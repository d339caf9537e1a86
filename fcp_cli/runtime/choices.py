"""Choices and constants of a job that options and rank code share. Imports nothing: `fcp --help` loads it."""

from __future__ import annotations

from typing import Literal, TypeAlias

OnNan: TypeAlias = Literal["stop", "skip-step", "go-on"]
"""Reaction to a NaN or infinite loss or gradient: stop the job; change no weight on any rank in the step; or do not
check."""

GradRingDtype: TypeAlias = Literal["fp32", "bf16"]
"""How gradients of 16-bit keys and values travel: summed in fp32, or rounded to the type of the keys at every hop,
which is half the bytes. Gradients of fp32 and fp64 keys travel in their own type either way."""

IGNORED = -100  # label of a token without loss, such as a prompt's; the default `ignore_index` of PyTorch
