"""Trains torchtitan's debug model under a plan, with torchtitan's own model and sharding.

fcp launch --plan plan.parquet -- examples/torchtitan/train.py [CHECKPOINTS]

What fcp needs is `PlannedAttention` and the loop. torchtitan switches FSDP2's division of gradients off, which the loss
accounts for. Weights that are gathered again for every micro-batch ("always") need a plan with --sync microbatch.
"""
# mypy: disable-error-code="misc, no-untyped-call"

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.module import Module

from fcp_cli import runtime as fcp


class PlannedAttention(Module):
    """In place of torchtitan's inner attention; q, k and v are [1, tokens, heads, head_dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **_: Any) -> Tensor:
        out = fcp.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale)
        return out.transpose(1, 2)


def tokens_of(row: int) -> Tensor:
    return torch.randint(2048, (64,), generator=torch.Generator().manual_seed(row))


session = fcp.start(fetch=tokens_of)
spec = model_registry("debugmodel", attn_backend="varlen")
for layer in spec.model.layers:
    layer.attention.inner_attention = PlannedAttention.Config()
torch.manual_seed(0)
model = spec.model.build().to(session.device)
with torch.no_grad():
    model.init_weights(buffer_device=session.device)
apply_fsdp_to_decoder(
    model,
    init_device_mesh(session.device.type, (dist.get_world_size(),)),
    param_dtype=torch.float32,
    reduce_dtype=torch.float32,
    pp_enabled=False,
    reshard_after_forward_policy="never" if session.metadata.sync == "iteration" else "always",
)
for module in model.modules():
    if isinstance(module, FSDPModule) and session.device.type == "cpu":  # gloo cannot multiply before it sums
        module.set_force_sum_reduction_for_comms(True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

checkpoints = Path(sys.argv[1]) if len(sys.argv) > 1 else None
saved = sorted(checkpoints.glob(f"*-rank{session.rank}.pt")) if checkpoints else []
if saved:
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    session.load_state_dict(state["session"])  # the step to go on with

losses = []
for step in session.steps(model):
    for batch in step:
        batch.loss(model(batch.input_ids, positions=batch.position_ids)).backward()
    losses.append(step.reduced_loss())
    if session.rank == 0:
        print(f"step {step.index}: loss {losses[-1]:.4f}")
    optimizer.step()
    optimizer.zero_grad()
    if checkpoints:
        checkpoints.mkdir(exist_ok=True)
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
        torch.save(parts, checkpoints / f"{step.index:06}-rank{session.rank}.pt")
