"""`pretrain_gpt.py` on Megatron's own `SFTDataset`: conversations, several to an item, as `--sft` packs them.

`--data-path` names a manifest; item *n* holds as many tokens in conversations as its row *n* says. With `--sft` items
say where conversations end (`cu_seqlens`), which needs Transformer Engine without fcp. Without it they say the same by
an attention mask, which Megatron's own attention on the CPU knows. The tokenizer is made up: what `--sft` brings needs
one of Hugging Face, of a version before 5.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tests.runtime.megatron import own_data

import numpy as np  # isort: skip
import pyarrow.parquet as pq  # isort: skip
import torch  # isort: skip
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig  # isort: skip
from megatron.core.datasets.utils import Split  # isort: skip
from megatron.training import get_args  # isort: skip
from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset  # isort: skip
from torch import Tensor  # isort: skip

Message = dict[str, str]
MOST_CONVERSATIONS = 4


class Tokenizer:
    """A message of n tokens says so, and which."""

    eod, pad, vocab_size = 1, 2, own_data.VOCABULARY

    def __init__(self) -> None:
        self.unique_identifiers = OrderedDict(name="made up")

    def tokenize_conversation(self, messages: Sequence[Message], **_: Any) -> tuple[np.ndarray, np.ndarray]:
        seed, length = map(int, messages[0]["content"].split())
        tokens = 8 + np.random.default_rng(seed).integers(0, 8, length).cumsum() % (own_data.VOCABULARY - 8)
        tokens[-1] = self.eod
        targets = tokens.copy()
        targets[: length // 3] = IGNORE_INDEX  # what the user said
        return tokens, targets


class Conversations:
    """What `SFTDataset` reads: the messages of each item, a conversation from each that the system says."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, at: int) -> list[Message]:
        draw, length = np.random.default_rng(at), self._lengths[at]
        ends = sorted({*draw.integers(1, length, MOST_CONVERSATIONS - 1).tolist(), length}) if length > 1 else [length]
        lengths = np.diff([0, *ends]).tolist()
        return [{"role": "system", "content": f"{at * 10 + n} {tokens}"} for n, tokens in enumerate(lengths)]


class Masked(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same items with an attention mask in place of `cu_seqlens`."""

    def __init__(self, dataset: SFTDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        item = dict(self._dataset[at])
        ends, length = item.pop("cu_seqlens"), len(item["tokens"])
        del item["max_seqlen"]
        number = torch.searchsorted(ends[1:].contiguous(), torch.arange(length, dtype=ends.dtype), right=True)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        return {**item, "attention_mask": (later | (number[:, None] != number)).unsqueeze(0)}


def datasets_provider(sizes: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    args = get_args()
    (manifest,) = args.data_path
    lengths = pq.read_table(manifest).column("length").to_pylist()
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=args.seq_length,
        blend=([manifest], None),
        split="1,0,0",
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=1,
    )
    packed = SFTDataset(Conversations(lengths), manifest, np.arange(len(lengths)), len(lengths), Split.train, config)
    dataset = packed if args.sft else Masked(packed)
    return dataset, dataset, None


if __name__ == "__main__":
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    own_data.train(datasets_provider)
