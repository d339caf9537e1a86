"""Number types of model descriptions, with upper limits.

Limits are well above published models, and low enough that per-layer lists and products of sizes stay small.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from fcp_cli.options import MOST_PIXELS

MOST_LAYERS: Final = 10_000  # lists have an entry per layer; the deepest published model has 126
_MOST_WIDTH: Final = 1 << 20  # of a vector per token; the widest MLP of Llama 3.1 405B has 53,248
_MOST_HEADS: Final = 1 << 16  # DeepSeek-V3 has 128 of attention, state spaces have some hundreds
_MOST_EXPERTS: Final = 1 << 16  # of a layer; Kimi K2 has 384
_MOST_WORDS: Final = 1 << 24  # Gemma has 262,144
_MOST_TOKENS: Final = (1 << 31) - 1  # a plan holds lengths in 32 bits
_MOST_TAPS: Final = 1 << 10  # of a short convolution; published ones have 4

_COUNT: Final = "a whole number of at least 1"
LayerCount = Annotated[int, Meta(ge=1, le=MOST_LAYERS, description=_COUNT)]
LayerIndex = Annotated[int, Meta(ge=0, le=MOST_LAYERS, description="a whole number of at least 0")]
Width = Annotated[int, Meta(ge=1, le=_MOST_WIDTH, description=_COUNT)]
OptionalWidth = Annotated[int, Meta(ge=0, le=_MOST_WIDTH, description="a whole number of at least 0")]
HeadCount = Annotated[int, Meta(ge=1, le=_MOST_HEADS, description=_COUNT)]
ExpertCount = Annotated[int, Meta(ge=1, le=_MOST_EXPERTS, description=_COUNT)]
VocabularySize = Annotated[int, Meta(ge=1, le=_MOST_WORDS, description=_COUNT)]
TokenCount = Annotated[int, Meta(ge=1, le=_MOST_TOKENS, description=_COUNT)]
KernelSize = Annotated[int, Meta(ge=1, le=_MOST_TAPS, description=_COUNT)]
PixelCount = Annotated[int, Meta(ge=1, le=MOST_PIXELS, description=_COUNT)]
