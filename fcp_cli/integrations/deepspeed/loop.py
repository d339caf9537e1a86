"""Follows a plan in a loop around a DeepSpeed engine: `engine(**batch)`, `engine.backward(loss)`, `engine.step()`.

The loader used while the engine trains yields the plan's micro-batches: that of
`deepspeed.initialize(training_data=...)`, or a torch DataLoader. The engine's step counter is the plan's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations.hugging_face.job_facts import ZeroStage
from fcp_cli.integrations.hugging_face.loops import PlannedModel, WrittenLoop


class EngineLoop(WrittenLoop):
    """Training loop around one engine that follows the plan. Created on every rank at the first batch."""

    NAME = "a loop around DeepSpeed's engine"
    BACKWARD = "engine.backward"

    def __init__(self, engines: Sequence[Any]) -> None:
        if len(engines) > 1:
            raise RunError(
                f"the script trains {len(engines)} engines of DeepSpeed, and the plan sums the gradients of one; train "
                "them in a loop of your own (docs/how-to/training-loop.md)"
            )
        self.engine = engines[0]
        super().__init__(self.engine.device)
        self.model = self.engine
        self.planned = PlannedModel(self.engine.module)
        self._next_step = int(self.engine.global_steps)  # restored from a checkpoint, if one was loaded
        self._backward = self.engine.backward
        self.engine.backward = self._run_backward

    @property
    def accumulates(self) -> int:
        return int(self.engine.gradient_accumulation_steps())

    def rows_per_pass(self, loader: Any) -> int:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if not size:
            raise RunError(
                "the loader of the training data has no batch_size, but a plan needs to know how many rows are a "
                "batch: give torch's DataLoader a batch_size, or deepspeed.initialize the training_data"
            )
        return int(size)

    def precision_and_sharding(self) -> tuple[bool, ZeroStage]:
        stage: Any = str(int(self.engine.zero_optimization_stage()))
        return False, stage  # 16-bit weights are visible in the model

    def _run_backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self.engine.module.training:
            self.require_microbatch()
        found = self._backward(loss, *args, **kwargs)
        self.after_backward()
        return found
