"""One rank of a job that trains decoders with linear attention, or a Gemma 3 with images and windows, in several ways.

Run by torchrun as `-m tests.runtime.workers.decoder_worker FOLDER linear|gemma3`. The folder holds the plans.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fcp_cli.integrations.transformers import prepare
from fcp_cli.runtime.session import start
from fcp_cli.verification.emulation import Replayed, gradients_on_rank, synthetic_tokens
from tests.runtime.gemma3_models import gemma3, norms_in_fp64, tokens_of
from tests.runtime.linear_models import InDouble, linear_model, loss_under_a_plan
from tests.runtime.models import Recomputation, Wrapping, recompute, wrap
from tests.runtime.workers.leave import join_job, leave_cases, leave_job

WAVES, ITERATION = "waves.parquet", "iteration.parquet"


@dataclass(frozen=True, slots=True)
class DecoderCase:
    """One way to run a plan; `kind`: of `linear_model`, or gemma3."""

    kind: str
    plan: str
    wrapping: Wrapping
    recompute: Recomputation = "off"


CASES: Mapping[str, Mapping[str, DecoderCase]] = {
    "linear": {
        "plain": DecoderCase("qwen3_next", ITERATION, "none"),
        "ddp": DecoderCase("qwen3_next", ITERATION, "ddp", "selective"),
        "fsdp": DecoderCase("qwen3_next", WAVES, "fsdp", "non-reentrant"),
        "plain-mamba": DecoderCase("bamba", ITERATION, "none"),
        "ddp-mamba": DecoderCase("nemotron_h", ITERATION, "ddp", "non-reentrant"),
        "fsdp-mamba": DecoderCase("bamba", WAVES, "fsdp", "selective"),
    },
    "gemma3": {
        "ddp": DecoderCase("gemma3", ITERATION, "ddp", "non-reentrant"),
        "fsdp": DecoderCase("gemma3", WAVES, "fsdp", "selective"),
    },
}


def trained(folder: Path, case: DecoderCase) -> Replayed:
    plan, is_gemma3 = folder / case.plan, case.kind == "gemma3"
    model = gemma3() if is_gemma3 else linear_model(case.kind)
    prepare(model)
    recompute(model, case.recompute)
    wrapped = wrap(model, case.wrapping, list(model.model.layers))
    fetch = tokens_of if is_gemma3 else synthetic_tokens(plan, 61)
    with start(plan, fetch) as session, norms_in_fp64() if is_gemma3 else InDouble():
        return gradients_on_rank(session, wrapped, loss_under_a_plan(wrapped))


def main(folder: Path, kind: str) -> None:
    join_job()
    leave_cases(folder, {name: partial(trained, folder, case) for name, case in CASES[kind].items()})
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
