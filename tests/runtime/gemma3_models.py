"""A small Gemma 3 on sequences with images and in windows, with its norms in fp64, and what one process computes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3RMSNorm,
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from fcp_cli.runtime.loss import next_token_labels, token_loss_sum
from fcp_cli.util.masks import Mask, MaskRows, prefix, segments
from fcp_cli.verification.emulation import take_gradient
from tests.masks import Masked, seen
from tests.runtime.cache_argument import CACHE
from tests.runtime.families import FAMILIES
from tests.runtime.plans import Row

LENGTHS = (41, 12, 30)
TYPES = [[0] * 3 + [1] * 17 + [0] + [1] * 9 + [0] * 11, [0] * 12, [1] * 10 + [0] * 20]
MASKS = [segments([(3, 20), (21, 30)]), segments([]), prefix(10)]
ROWS = (Row([0, 1, 2], LENGTHS[:2]), Row([1], LENGTHS[2:]))


@contextmanager
def norms_in_fp64() -> Iterator[None]:
    """Gemma's own compute in fp32, whatever the model's type is."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)  # type: ignore[no-any-return]

    with patch.object(Gemma3RMSNorm, "forward", forward):
        yield


def kept(masks: list[Mask] = MASKS) -> MaskRows:
    sizes = [len(mask.numbers) for mask in masks]
    return MaskRows("segments", np.cumsum([0, *sizes]), np.array([n for mask in masks for n in mask.numbers]))


def tokens_of(row: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(row).integers(3, 61, LENGTHS[row]))


def masks_of_transformers(config: Any, row: int) -> dict[str, Tensor]:
    """What Gemma 3 makes of token types, of both kinds of its layers: [1, 1, tokens, tokens]."""
    types = torch.tensor([TYPES[row]])
    embeddings = torch.zeros(1, LENGTHS[row], 1, dtype=torch.float64)
    blocks = get_block_sequence_ids_for_mask(types)
    given = {"attention_mask": None, CACHE: None, "position_ids": None, "block_sequence_ids": blocks}
    return dict(create_masks_for_vision_model(config=config, inputs_embeds=embeddings, **given))  # type: ignore[arg-type]


def collate(how: str, config: Any, row: int) -> Mapping[str, Any]:
    ids = tokens_of(row)[None]
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if how == "matrix":
        batch["attention_mask"] = torch.from_numpy(seen(Masked(MASKS[row], LENGTHS[row])))[None, None]
    elif how == "matrix of each kind of layers":
        batch["attention_mask"] = masks_of_transformers(config, row)
    elif how == "token types":
        batch["token_type_ids"] = torch.tensor([TYPES[row]])
    return batch


def gemma3() -> Any:
    return FAMILIES["gemma3_text, windows"].build()


def expected() -> tuple[np.ndarray, float]:
    """Of all rows in one process of the unmodified model, with the masks that transformers makes."""
    model = gemma3()
    model.set_attn_implementation("sdpa")
    total = torch.zeros((), dtype=torch.float64)
    for row in range(3):
        logits = model(input_ids=tokens_of(row)[None], attention_mask=masks_of_transformers(model.config, row)).logits
        total = total + token_loss_sum(logits, next_token_labels(tokens_of(row))[None])
    loss = total / (sum(LENGTHS) - 3)
    torch.autograd.backward(loss)
    return take_gradient(model), float(loss.detach())
