"""What users of Megatron-LM make of `pretrain_gpt.py` for data of their own: another data set, and nothing else.

`--data-path` names a manifest; sequence *n* has as many tokens as its row *n* says.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

sys.path.insert(0, os.environ["FCP_MEGATRON_LM_SOURCE"])

import pretrain_gpt  # type: ignore[import-not-found]  # isort: skip
import pyarrow.parquet as pq  # isort: skip
import torch  # isort: skip
from megatron.core.enums import ModelType  # isort: skip
from megatron.training import get_args, pretrain  # isort: skip
from torch import Tensor  # isort: skip

VOCABULARY = 61


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Walks with random steps, some tokens without loss."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(at)
        length = self._lengths[at]
        text = torch.randint(8, (length + 1,), generator=draw).cumsum(0) % VOCABULARY
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": (torch.rand(length, generator=draw) < 0.7).to(torch.float32),
            "position_ids": torch.arange(length),
        }


def datasets_provider(sizes: Any, vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    (manifest,) = get_args().data_path
    dataset = Sequences(pq.read_table(manifest).column("length").to_pylist())
    return dataset, dataset, None


def first_arguments(datasets_provider: Any) -> tuple[Any, ...]:
    """What `pretrain` is given first, by version: from 0.19 on the configuration of all, before that a model's builder."""
    if hasattr(pretrain_gpt, "parse_and_validate_args"):
        args = pretrain_gpt.parse_and_validate_args()
        settings = pretrain_gpt.gpt_config_from_args(args)
        return pretrain_gpt.pretrain_cfg_container_from_args(args, settings), datasets_provider
    from gpt_builders import gpt_builder  # type: ignore[import-not-found]
    from model_provider import model_provider  # type: ignore[import-not-found]

    return datasets_provider, partial(model_provider, gpt_builder)


def train(datasets_provider: Any) -> None:
    pretrain(
        *first_arguments(datasets_provider),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
    )


if __name__ == "__main__":
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    train(datasets_provider)
