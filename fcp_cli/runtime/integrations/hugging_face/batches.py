"""Read what a script's collator makes of one row: tokens and labels without padding, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.joined import JoinedSequences

# What collators add that says again what the tokens and the plan say.
_REDUNDANT = frozenset({"attention_mask", "position_ids", "token_type_ids", "completion_mask", "seq_idx", "length"})
_REDUNDANT_PREFIXES = ("cu_seq_lens", "max_length", "num_items")


def one_sequence(batch: Any, row: int) -> tuple[Tensor, Tensor]:
    """Return the tokens [n] and labels [n] of the one sequence in a batch of one item, without its padding.

    Raises:
        RunError: it holds none, several, or more than tokens and labels.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise RunError(f"the data collator makes of row {row} no dictionary with input_ids, which a plan follows")
    foreign = [name for name in batch if name not in ("input_ids", "labels") and not _is_redundant(name, batch[name])]
    if foreign:
        raise RunError(
            f"the data collator gives {', '.join(sorted(map(str, foreign)))} beside the tokens of row {row}, which "
            "would be lost under a plan; leave it out, or write the loop as in docs/how-to/training-loop.md"
        )
    if batch.get("labels") is None:
        raise RunError(
            f"the data collator gives no labels for row {row}; for language models, use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    tokens, labels = (torch.as_tensor(batch[name]) for name in ("input_ids", "labels"))
    if tokens.dim() != 2 or len(tokens) != 1 or labels.shape != tokens.shape:
        raise RunError(
            f"the data collator makes of row {row} input_ids of shape {tuple(tokens.shape)} and labels of "
            f"{tuple(labels.shape)}; a row must be one sequence, [1, tokens] each"
        )
    kept = _unpadded(batch, tokens, row)
    return tokens[0][kept], labels[0][kept]


def one_pair(batch: Any, row: int) -> JoinedSequences:
    """Return the preferred and the rejected sequence in a batch of one pair, as TRL's collator makes it.

    Raises:
        RunError: it is none.
    """
    names = ("input_ids", "attention_mask", "completion_mask")
    if not isinstance(batch, Mapping) or any(name not in batch for name in names):
        raise RunError(f"the data collator makes of row {row} no pair with {', '.join(names)}, which a plan follows")
    tokens, mask, completion = (torch.as_tensor(batch[name]) for name in names)
    if tokens.dim() != 2 or len(tokens) != 2:
        raise RunError(f"the data collator makes of row {row} input_ids of shape {tuple(tokens.shape)}, not of a pair")
    kept = [own.nonzero().flatten() for own in mask]
    ids = [own[at] for own, at in zip(tokens, kept, strict=True)]
    labels = [
        own[at].masked_fill(learned[at] == 0, -100) for own, at, learned in zip(tokens, kept, completion, strict=True)
    ]
    return JoinedSequences(tokens=torch.cat(ids), labels=torch.cat(labels), lengths=(len(ids[0]), len(ids[1])))


def _is_redundant(name: Any, value: Any) -> bool:
    if name == "token_type_ids":
        return not torch.as_tensor(value).any()
    return name in _REDUNDANT or str(name).startswith(_REDUNDANT_PREFIXES) or value is None


def _unpadded(batch: Mapping[Any, Any], tokens: Tensor, row: int) -> slice:
    """Return where the sequence lies between its padding."""
    mask = batch.get("attention_mask")
    start, stop = 0, tokens.shape[1]
    if mask is not None:
        kept = torch.as_tensor(mask)[0].nonzero().flatten()
        if not len(kept) or int(kept[-1] - kept[0]) + 1 != len(kept):
            raise RunError(f"the attention mask of row {row} has gaps, which a plan cannot follow")
        start, stop = int(kept[0]), int(kept[-1]) + 1
    positions = batch.get("position_ids")
    if positions is not None:
        own = torch.as_tensor(positions)[..., start:stop].flatten()
        if not torch.equal(own, torch.arange(stop - start, dtype=own.dtype)):
            raise RunError(
                f"row {row} of the training data holds several sequences (its position_ids start again); leave packing "
                "off: the plan packs"
            )
    return slice(start, stop)
