"""One rank of a MindSpore job that follows the plan in FCP_PLAN; rank 0 saves what came out of each step.

Run under msrun. The test computes the same losses and gradients by itself, in one process, with another framework and
without a line of fcp's.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from fcp_cli.errors import FcpError
from fcp_cli.integrations.mindspore import MindSporeMicroBatch, MindSporeSession, attention, start
from tests.runtime.mindspore_model import HEAD_DIM, HEADS, KV_HEADS, initial_weights, layers_of, tokens_of


class Decoder(nn.Cell):  # type: ignore[misc]  # mindspore has no types
    """Embeddings, and layers of attention with fewer key than query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.named = {name: Parameter(Tensor(values), name=name) for name, values in initial_weights().items()}

    def construct(self, microbatch: MindSporeMicroBatch) -> Tensor:
        named = self.named
        hidden = ops.gather(named["tokens"], microbatch.input_ids, 0)
        hidden = hidden + ops.gather(named["positions"], microbatch.position_ids, 0)
        for q, k, v, o in layers_of(named):
            heads = (_heads(hidden, weight, count) for weight, count in ((q, HEADS), (k, KV_HEADS), (v, KV_HEADS)))
            mixed = attention(*heads, ring=microbatch.ring)
            hidden = hidden + ops.tanh(ops.matmul(mixed.swapaxes(1, 2).reshape(1, -1, HEADS * HEAD_DIM), o))
        return microbatch.loss(ops.matmul(hidden, named["tokens"].swapaxes(0, 1)))


def _heads(hidden: Tensor, weight: Parameter, count: int) -> Tensor:
    return ops.matmul(hidden, weight).reshape(1, -1, count, HEAD_DIM).swapaxes(1, 2)


def follow(session: MindSporeSession) -> dict[str, Any]:
    """Loss and gradients of every step, by `STEP/NAME`."""
    model = Decoder()
    gradient = mindspore.value_and_grad(model, None, list(model.named.values()))
    found: dict[str, Any] = {}
    for step in session.steps():
        for microbatch in step:
            step.add(*gradient(microbatch))
        loss, grads = step.summed()
        found[f"{step.index}/loss"] = np.array(loss)
        found |= {f"{step.index}/{name}": grad.asnumpy() for name, grad in zip(model.named, grads, strict=True)}
    return found


def main(result: Path) -> int:
    # On few cores, handing every small operation to another thread takes ten times as long as the operation.
    mindspore.set_context(pynative_synchronize=True)
    if os.environ.get("MS_NODE_ID") == "2" and "PLAN_OF_RANK_2" in os.environ:
        os.environ["FCP_PLAN"] = os.environ["PLAN_OF_RANK_2"]
    try:
        session = start(fetch=tokens_of)
        found = follow(session)
    except FcpError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_status
    found["imported_torch"] = np.array("torch" in sys.modules)
    if session.rank == 0:
        np.savez(result, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
