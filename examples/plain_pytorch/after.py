"""Trains a tiny language model. before.py runs it in one process, after.py on the ranks of a plan."""
# mypy: disable-error-code="no-untyped-call, no-any-return"

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fcp_cli import runtime as fcp

VOCABULARY = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = fcp.attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(512, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(input_ids) + self.positions(position_ids)))


class Sequence(NamedTuple):
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor


def tokens_of(row: int) -> Tensor:
    """One sequence of the data set, 4 to 260 tokens long."""
    length = 4 + (row * row * 37) % 257
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))


def global_batches() -> Iterator[tuple[int, list[Sequence]]]:
    """Three global batches of 8 sequences, each with the number of its tokens that have a next token to predict."""
    for first in range(0, 24, 8):
        tokens = [tokens_of(row) for row in range(first, first + 8)]
        labels = [torch.cat((t[1:], torch.tensor([-100]))) for t in tokens]
        sequences = [
            Sequence(t[None], torch.arange(len(t))[None], y[None]) for t, y in zip(tokens, labels, strict=True)
        ]
        yield sum(len(t) - 1 for t in tokens), sequences


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in fcp.steps(fetch=tokens_of, model=model):
    for batch in step:
        logits = model(batch.input_ids, batch.position_ids)
        loss = batch.loss(logits)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
