"""Trains a model of torchtune under a plan: the loop that stands in place of that in a recipe's `train`.

fcp launch --plan plan.parquet -- examples/torchtune/train.py

What fcp needs is `planned_attention` and the loop. A model that torchtune's `shard_model` has sharded is given to
`steps` as this one is.
"""
# mypy: disable-error-code="no-untyped-call"

import torch
from torch import Tensor
from torchtune.models.llama3 import llama3
from torchtune.modules import MultiHeadAttention

from fcp_cli import runtime as fcp


def planned_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """In place of torchtune's own; all are [1, heads, tokens, head_dim]."""
    assert mask is None and not dropout_p and is_causal, "a plan is for causal attention without masks and dropout"
    return fcp.attention(q, k, v)


def tokens_of(row: int) -> Tensor:
    return torch.randint(1, 61, (64,), generator=torch.Generator().manual_seed(row))


torch.manual_seed(0)
model = llama3(
    vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=64
)
for module in model.modules():
    if isinstance(module, MultiHeadAttention):
        module._attention_call = planned_attention
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

losses = []
session = fcp.start(fetch=tokens_of)
for step in session.steps(model):
    for batch in step:
        batch.loss(model(batch.input_ids, input_pos=batch.position_ids)).backward()
    losses.append(step.reduced_loss())
    if session.rank == 0:
        print(f"step {step.index}: loss {losses[-1]:.4f}")
    optimizer.step()
    optimizer.zero_grad()
