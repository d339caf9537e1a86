"""A small tokenizer with a chat template, saved as a checkpoint's folder holds it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(folder: Path, template: str = CHATML, *, merges: Sequence[tuple[str, str]] = ()) -> Path:
    """A byte-level tokenizer whose pieces are the bytes and their merges, with ChatML's marks and a template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    family: Any = PreTrainedTokenizerFast
    fast = family(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
    fast.save_pretrained(folder)
    return folder
