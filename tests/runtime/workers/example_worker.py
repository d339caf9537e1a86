"""The example of torchtune or torchtitan on the ranks of a plan: `-m tests.runtime.workers.example_worker SCRIPT FOLDER`.

Rank 0 then trains the framework's model alone on the same global batches. Leaves `planned.pickle` and `alone.pickle`; the
example of torchtitan trains once more from the checkpoint after its first step, and leaves `resumed.pickle`.
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

from tests.patience import PATIENCE_SECONDS
from tests.runtime.loops.cases import NUM_RANKS, Sequence, Trained, flat, global_batches, norm_of, train_alone
from tests.runtime.workers.leave import leave_job


def planned(script: str, *words: str) -> tuple[Trained, Callable[[int], Tensor]]:
    norms: list[float] = []

    def note_norm(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(norm_of(nn.ParameterList(optimizer.param_groups[0]["params"])))

    handle = register_optimizer_step_pre_hook(note_norm)
    sys.argv = [script, *words]
    ended = runpy.run_path(script)
    handle.remove()
    return Trained(losses=ended["losses"], norms=norms, weights=flat(ended["model"])), ended["tokens_of"]


def torchtune_alone() -> tuple[nn.Module, Callable[[Sequence], Tensor]]:
    from torchtune.models.llama3 import llama3

    torch.manual_seed(0)
    model = llama3(
        vocab_size=61, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, intermediate_dim=64, max_seq_len=64
    )
    return model, lambda sequence: model(sequence.input_ids)


def torchtitan_alone() -> tuple[nn.Module, Callable[[Sequence], Tensor]]:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model, lambda sequence: model(sequence.input_ids, positions=sequence.position_ids)


def resumed(script: str, checkpoints: Path) -> Trained:
    """Without the checkpoints after the first step's, which every rank saved a part of."""
    dist.barrier()
    if os.environ["RANK"] == "0":
        for later in sorted(checkpoints.iterdir())[NUM_RANKS:]:
            later.unlink()
    dist.barrier()
    return planned(script, str(checkpoints))[0]


def main(script: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    left, checkpoints = {}, folder / "checkpoints"
    if Path(script).parent.name == "torchtitan":
        left["planned"], tokens_of = planned(script, str(checkpoints))
        left["resumed"] = resumed(script, checkpoints)
        model, logits_of = torchtitan_alone()
    else:
        left["planned"], tokens_of = planned(script)
        model, logits_of = torchtune_alone()
    if os.environ["RANK"] == "0":
        left["alone"] = train_alone(model, global_batches(Path(os.environ["FCP_PLAN"]), tokens_of), logits_of)
        for name, found in left.items():
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
