"""The example of torchtitan on the ranks of a plan: `-m tests.runtime.workers.torchtitan_worker SCRIPT FOLDER`.

It trains once, and once more from the checkpoint after its first step. Rank 0 then trains torchtitan's model alone on the same global batches. Leaves
`planned.pickle`, `resumed.pickle` and `alone.pickle`.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import faulthandler
import os
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.loss.token_loss import next_token_labels, token_loss_sum
from tests.patience import PATIENCE_SECONDS
from tests.runtime.loops.cases import NUM_RANKS, Trained, flat
from tests.runtime.workers.leave import leave_job


def norm_of(model: nn.Module) -> float:
    """In fp64: an fp32 norm of half a million numbers is 5e-5 off on the CPU."""
    whole: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    pieces = [(g.full_tensor() if hasattr(g, "full_tensor") else g).double().flatten() for g in whole]
    return float(torch.cat(pieces).norm())


def planned(script: str, checkpoints: Path) -> tuple[Trained, Callable[[int], Tensor]]:
    norms: list[float] = []

    def note_norm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        holder = nn.ParameterList(optimizer.param_groups[0]["params"])
        norms.append(norm_of(holder))

    handle = register_optimizer_step_pre_hook(note_norm)
    sys.argv = [script, str(checkpoints)]
    ended = runpy.run_path(script)
    handle.remove()
    return Trained(losses=ended["losses"], norms=norms, weights=flat(ended["model"])), ended["tokens_of"]


def alone(plan: Path, tokens_of: Callable[[int], Tensor]) -> Trained:
    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in PlanReader(plan).steps():
        tokens, total = int((step.lengths - 1).sum()), 0.0
        for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
            ids = tokens_of(row)[:length]
            logits = model(ids[None], positions=torch.arange(length)[None])
            loss = token_loss_sum(logits, next_token_labels(ids)[None]) / tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        norms.append(norm_of(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses=losses, norms=norms, weights=flat(model))


def main(script: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    checkpoints = folder / "checkpoints"
    found, tokens_of = planned(script, checkpoints)
    dist.barrier()
    if os.environ["RANK"] == "0":
        for later in sorted(checkpoints.iterdir())[NUM_RANKS:]:
            later.unlink()
    dist.barrier()
    resumed, _ = planned(script, checkpoints)
    if os.environ["RANK"] == "0":
        (folder / "resumed.pickle").write_bytes(pickle.dumps(resumed))
        (folder / "planned.pickle").write_bytes(pickle.dumps(found))
        (folder / "alone.pickle").write_bytes(pickle.dumps(alone(Path(os.environ["FCP_PLAN"]), tokens_of)))
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
