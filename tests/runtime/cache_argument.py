"""Name of the argument of transformers' functions that takes a cache of keys and values: another one since 5.24."""

from __future__ import annotations

import inspect
from typing import Final

from transformers.masking_utils import create_causal_mask

CACHE: Final = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
