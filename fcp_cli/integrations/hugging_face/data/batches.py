"""Reads a row from a collated batch: tokens, labels and mask, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fcp_cli.errors import MaskError, RunError
from fcp_cli.masks import CAUSAL, Mask, MaskedSequence, of_matrix, token_types
from fcp_cli.runtime.data.joined_sequences import JoinedSequences
from fcp_cli.runtime.loss.labels import IGNORED

# Collator columns that are redundant with the tokens or the plan.
_REDUNDANT = frozenset({"attention_mask", "position_ids", "completion_mask", "seq_idx", "length"})
_TYPES = ("token_type_ids", "mm_token_type_ids")
_REDUNDANT_PREFIXES = ("cu_seq_lens", "max_length", "num_items")


def one_sequence(batch: Any, row: int, *, masked: bool = False) -> tuple[Tensor, Tensor] | MaskedSequence:
    """Return the tokens [n] and labels [n] of the single sequence in a batch, without padding.

    Includes its attention mask if the batch has one: an `attention_mask` [1, 1, n, n] as accepted by transformers,
    possibly one per layer type, or `token_type_ids` as in Gemma 3.

    Args:
        batch: collated batch.
        row: index of the row in the data set.
        masked: whether the plan uses masks; if not, token types that define one are rejected.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise RunError(f"for row {row} the data collator returns no dictionary with input_ids; a plan needs one")
    known = ("input_ids", "labels", *(_TYPES if masked else ()))
    foreign = [name for name in batch if name not in known and not _is_redundant(name, batch[name])]
    if foreign:
        raise RunError(
            f"the data collator gives {', '.join(sorted(map(str, foreign)))} besides the tokens of row {row}, which "
            "would be lost under a plan; remove it, or write the loop as in docs/how-to/training-loop.md"
        )
    if batch.get("labels") is None:
        raise RunError(
            f"the data collator gives no labels for row {row}; for language models, use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    tokens, labels = (torch.as_tensor(batch[name]) for name in ("input_ids", "labels"))
    if tokens.dim() != 2 or len(tokens) != 1 or labels.shape != tokens.shape:
        raise RunError(
            f"for row {row} the data collator returns input_ids of shape {tuple(tokens.shape)} and labels of "
            f"{tuple(labels.shape)}; a row must be one sequence, [1, tokens] each"
        )
    span = unpadded_slice(batch, row)
    positions = batch.get("position_ids")
    if positions is not None:
        row_positions = torch.as_tensor(positions)[..., span]
        if not bool((row_positions == torch.arange(row_positions.shape[-1], dtype=row_positions.dtype)).all()):
            raise RunError(
                f"row {row} of the training data holds several sequences (its position_ids start again); leave packing "
                "off: the plan packs"
            )
    mask = _mask_of(batch, span, row) if masked or _is_explicit_mask(batch.get("attention_mask")) else None
    if mask is None:
        return tokens[0][span], labels[0][span]
    return MaskedSequence(tokens=tokens[0][span], labels=labels[0][span], mask=mask)


def one_pair(batch: Any, row: int) -> JoinedSequences:
    """Return the chosen and the rejected sequence in a batch of one pair, with TRL's `completion_mask` or labels."""
    answer_column = "labels" if isinstance(batch, Mapping) and "labels" in batch else "completion_mask"
    names = ("input_ids", "attention_mask", answer_column)
    if not isinstance(batch, Mapping) or any(name not in batch for name in names):
        raise RunError(f"for row {row} the data collator returns no pair with {', '.join(names)}; a plan needs one")
    tokens, mask, is_answer = (torch.as_tensor(batch[name]) for name in names)
    if answer_column == "labels":
        is_answer = is_answer != IGNORED
    if tokens.dim() != 2 or len(tokens) != 2:
        raise RunError(
            f"for row {row} the data collator returns input_ids of shape {tuple(tokens.shape)}, not of a pair"
        )
    kept_indices = [mask_row.nonzero().flatten() for mask_row in mask]
    ids = [token_row[kept] for token_row, kept in zip(tokens, kept_indices, strict=True)]
    labels = [
        token_row[kept].masked_fill(answer_row[kept] == 0, IGNORED)
        for token_row, kept, answer_row in zip(tokens, kept_indices, is_answer, strict=True)
    ]
    return JoinedSequences(tokens=torch.cat(ids), labels=torch.cat(labels), lengths=(len(ids[0]), len(ids[1])))


def _is_redundant(name: Any, value: Any) -> bool:
    if name in _TYPES:
        return not torch.as_tensor(value).any()
    return name in _REDUNDANT or str(name).startswith(_REDUNDANT_PREFIXES) or value is None


def _is_explicit_mask(mask: Any) -> bool:
    """Return whether an attention mask defines more than padding."""
    return isinstance(mask, Mapping) or (mask is not None and torch.as_tensor(mask).dim() == 4)


def _mask_of(batch: Mapping[Any, Any], span: slice, row: int) -> Mask | None:
    """Return the attention mask of a batch, or None if it has none."""
    given = batch.get("attention_mask")
    if not _is_explicit_mask(given):
        types = next((batch[name] for name in _TYPES if batch.get(name) is not None), None)
        return None if types is None else token_types(torch.as_tensor(types)[0][span].tolist())
    # If layer types have different masks, the full-attention layers define the mask.
    name = "full_attention"
    if isinstance(given, Mapping) and name not in given:
        raise RunError(f"the attention mask of row {row} is for layers of {', '.join(given)}, and none of {name}")
    given = given[name] if isinstance(given, Mapping) else given
    if given is None:  # None means causal in transformers
        return CAUSAL
    matrix = torch.as_tensor(given)
    tokens = torch.as_tensor(batch["input_ids"]).shape[1]
    if matrix.shape != (1, 1, tokens, tokens):
        raise RunError(
            f"the attention mask of row {row} has the shape {tuple(matrix.shape)}; a mask of {tokens} tokens has "
            f"{(1, 1, tokens, tokens)}"
        )
    seen = matrix[0, 0] if matrix.dtype == torch.bool else matrix[0, 0] == 0
    try:
        return of_matrix(seen[span, span].numpy())
    except MaskError as error:
        raise RunError(f"the attention mask of row {row} cannot be followed: {error}; give spans, or none") from error


def unpadded_slice(batch: Mapping[Any, Any], row: int) -> slice:
    """Return the slice of the sequence between its padding, in a batch of one."""
    mask = batch.get("attention_mask")
    if mask is None or _is_explicit_mask(mask):
        return slice(0, torch.as_tensor(batch["input_ids"]).shape[1])
    kept = torch.as_tensor(mask)[0].nonzero().flatten()
    if not len(kept) or int(kept[-1] - kept[0]) + 1 != len(kept):
        raise RunError(f"the attention mask of row {row} has gaps, which a plan cannot follow")
    return slice(int(kept[0]), int(kept[-1]) + 1)
