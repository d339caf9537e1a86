"""The example of torchtune on the ranks of a plan: `-m tests.runtime.workers.torchtune_worker SCRIPT FOLDER`.

Rank 0 then trains torchtune's model alone on the same global batches. Leaves `planned.pickle` and `alone.pickle`.
"""

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
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torchtune.models.llama3 import llama3

from fcp_cli.plan.file.reader import PlanReader
from fcp_cli.runtime.loss.token_loss import next_token_labels, token_loss_sum
from tests.patience import PATIENCE_SECONDS
from tests.runtime.loops.cases import Trained, flat
from tests.runtime.workers.leave import leave_job


def planned(script: str) -> tuple[Trained, Callable[[int], Tensor]]:
    norms: list[float] = []

    def note_norm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        held = optimizer.param_groups[0]["params"]
        norms.append(float(nn.utils.get_total_norm([p.grad for p in held])))

    handle = register_optimizer_step_pre_hook(note_norm)
    sys.argv = [script]
    ended = runpy.run_path(script)
    handle.remove()
    return Trained(losses=ended["losses"], norms=norms, weights=flat(ended["model"])), ended["tokens_of"]


def alone(plan: Path, tokens_of: Callable[[int], Tensor]) -> Trained:
    torch.manual_seed(0)
    model = llama3(
        vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=64
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in PlanReader(plan).steps():
        tokens, total = int((step.lengths - 1).sum()), 0.0
        for row, length in zip(step.sequences.tolist(), step.lengths.tolist(), strict=True):
            ids = tokens_of(row)[:length]
            loss = token_loss_sum(model(ids[None]), next_token_labels(ids)[None]) / tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses=losses, norms=norms, weights=flat(model))


def main(script: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    found, tokens_of = planned(script)
    if os.environ["RANK"] == "0":
        (folder / "planned.pickle").write_bytes(pickle.dumps(found))
        (folder / "alone.pickle").write_bytes(pickle.dumps(alone(Path(os.environ["FCP_PLAN"]), tokens_of)))
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
