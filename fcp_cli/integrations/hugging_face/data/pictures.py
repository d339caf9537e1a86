"""Reads the images and videos of a collated row, in the format of the model's processor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.data.batches import one_pair, one_sequence, unpadded_slice
from fcp_cli.masks import CAUSAL, Mask, MaskedSequence
from fcp_cli.runtime.data.joined_sequences import JoinedSequences
from fcp_cli.vision.families import FAMILIES
from fcp_cli.vision.parts import VisualSequence


class RowSize(NamedTuple):
    """Sizes of a row as counted in a manifest.

    Attributes:
        patches: vision-encoder patches.
        patch_pairs: sum of squared patch counts over frames or tiles.
    """

    tokens: int
    patches: int = 0
    patch_pairs: int = 0
    mask: Mask = CAUSAL


Collated: TypeAlias = tuple[Tensor, Tensor] | MaskedSequence | VisualSequence | JoinedSequences
_PIXELS = (
    "pixel_values",
    "pixel_values_videos",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_position_ids",
)
_MASKS_BY_TYPES = frozenset({"gemma3"})
"""Model families whose token types define the mask; in others they only repeat the placeholder positions."""


def one_row(batch: Any, row: int, *, pairs: bool = False, masked: bool = False, config: Any = None) -> Collated:
    """Return the only row of a collated batch.

    Args:
        batch: collated batch.
        row: index of the row in the data set.
        pairs: whether the row is a preference pair.
        masked: whether the plan uses masks.
        config: model config; only the model types in `FAMILIES` have images.
    """
    if pairs:
        return one_pair(batch, row)
    if has_pictures(config) and isinstance(batch, Mapping) and "input_ids" in batch:
        return _visual_row(batch, row, masked, config)
    return one_sequence(batch, row, masked=masked)


def has_pictures(config: Any) -> bool:
    """Return whether a model's images and videos can follow a plan."""
    return getattr(config, "model_type", None) in FAMILIES


def has_masks_of_types(config: Any) -> bool:
    """Return whether a model's token types define the mask: image tokens attend to each other bidirectionally."""
    return getattr(config, "model_type", None) in _MASKS_BY_TYPES


def size_of_row(batch: Any, row: int, *, pairs: bool = False, config: Any = None) -> RowSize:
    """Return the sizes of a row as counted in a manifest; for the arguments see `one_row`."""
    found = one_row(batch, row, pairs=pairs, masked=has_masks_of_types(config), config=config)
    if isinstance(found, tuple):
        return RowSize(len(found[0]))
    mask = found.mask if isinstance(found, (MaskedSequence, VisualSequence)) else CAUSAL
    parts = found.parts if isinstance(found, VisualSequence) else ()
    patches = [height * width for height, width in (part.grid for part in parts)]
    return RowSize(len(found.tokens), sum(patches), sum(one**2 for one in patches), mask)


def _visual_row(batch: Mapping[Any, Any], row: int, masked: bool, config: Any) -> Collated:
    has_masks = has_masks_of_types(config)
    types = None if has_masks else batch.get("mm_token_type_ids")
    span = unpadded_slice(batch, row)
    ids = torch.as_tensor(batch["input_ids"])[0][span].numpy()
    is_placeholder = np.isin(ids, [config.image_token_id, getattr(config, "video_token_id", config.image_token_id)])
    is_visual = bool(is_placeholder.any())
    family: Any = FAMILIES[config.model_type]
    pixels = [name for name in _PIXELS if name in inspect.signature(family.visual_sequence).parameters]
    # Image positions are the model's own 3-axis positions; text positions must be 0, 1, 2, ... Models ignore the
    # seconds per frame that they do not use; rope_deltas are only for generation.
    taken = {
        *pixels,
        "second_per_grid_ts",
        "rope_deltas",
        *(() if has_masks else ("mm_token_type_ids",)),
        *(("position_ids",) if is_visual else ()),
    }
    found = one_sequence({name: value for name, value in batch.items() if name not in taken}, row, masked=masked)
    if not is_visual:  # some collators add a blank image to the padding of text-only rows
        return found
    if types is not None and not np.array_equal(torch.as_tensor(types)[0][span].numpy() > 0, is_placeholder):
        raise RunError(
            f"the mm_token_type_ids of row {row} of the training data mark other tokens as images than its "
            "placeholders; let the collator return those of the processor"
        )
    tokens, labels = found if isinstance(found, tuple) else (found.tokens, found.labels)
    pictures = {name: batch[name] for name in pixels if batch.get(name) is not None}
    try:
        made: VisualSequence = family.visual_sequence(config, tokens, labels=labels, **pictures)
    except RunError as error:
        raise RunError(f"row {row} of the training data: {error}") from error
    _require_positions(batch.get("position_ids"), made, span, row)
    # Like transformers, apply no image mask in sliding windows unless the batch has token types.
    of_images = made.mask if made.mask.plans_as_causal and types is not None else CAUSAL
    return replace(made, mask=found.mask if isinstance(found, MaskedSequence) else of_images)


def _require_positions(given: Any, made: VisualSequence, span: slice, row: int) -> None:
    """Raise RunError if the collator's positions differ from those that the model computes, which a plan uses."""
    if given is None:
        return
    own = torch.as_tensor(given)[..., span].flatten(0, -2)[-3:].numpy()  # some collators put the text positions first
    counted = np.arange(own.shape[-1]) if made.position_ids is None else made.position_ids
    if own.shape[-2:] != np.broadcast_shapes(own.shape, counted.shape) or (own != counted).any():
        raise RunError(
            f"the position_ids of row {row} of the training data are not those that its model computes for its images; "
            "remove them from the collator's batch"
        )
