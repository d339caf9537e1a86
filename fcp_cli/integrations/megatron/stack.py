"""Interface to the software stack of a GPTModel: plain megatron-core here; MindSpeed patches it and has its own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from fcp_cli.integrations.megatron import checks
from fcp_cli.integrations.megatron.model import hook_model
from fcp_cli.integrations.megatron.multi_token import check_multi_token, hook_multi_token
from fcp_cli.integrations.megatron.router_losses import hook_losses
from fcp_cli.runtime.communication.transport import ProcessTransport


class Stack(Protocol):
    """Stack that runs a GPTModel under a plan.

    Attributes:
        even_chunks: whether sequences are padded to equal chunks.
        engine_rings: whether Transformer Engine's rings are used if the model has them.
        follows_masks: whether it supports plans with attention masks.
        recomputes_as_needed: whether it supports as-needed recomputation.
    """

    even_chunks: bool
    engine_rings: bool
    follows_masks: bool
    recomputes_as_needed: bool

    @property
    def name(self) -> str:
        """Name and version, for messages."""
        ...

    def check(self, config: Any, model: Any) -> None:
        """Raise RunError if this configuration, or this model, cannot follow a plan."""
        ...

    def hook(self, model: Any, transport: ProcessTransport) -> int:
        """Hook the model to follow the micro-batch of each call; return its attention calls per forward."""
        ...

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context in which the schedule runs one step."""
        ...

    def around_script(self) -> AbstractContextManager[None]:
        """Return the context in which the script's forward step and its loss function run."""
        ...

    def without_ring(self, model: Any, layer: Any) -> AbstractContextManager[None]:
        """Return a context in which this layer computes attention over whole sequences without a ring."""
        ...

    def totals(self, reports: Any) -> Any:
        """Convert the loss reports per micro-batch to the schedule's result for the script."""
        ...


class MegatronStack:
    """Plain megatron-core with context-parallel size 1, so that no static group must be hidden."""

    even_chunks = False
    engine_rings = True
    follows_masks = True
    recomputes_as_needed = True

    @property
    def name(self) -> str:
        return f"megatron-core {checks.megatron_version()}"

    def check(self, config: Any, model: Any) -> None:
        checks.check_model_classes()
        checks.check_config(config)
        if checks.balances_experts(config):
            checks.check_routers()
        if checks.predicts_several(config):
            check_multi_token()
        checks.check_layers(model)

    def hook(self, model: Any, transport: ProcessTransport) -> int:
        if checks.balances_experts(model.config):
            hook_losses(model)
        repeated = hook_multi_token(model) if checks.predicts_several(model.config) else 0
        return hook_model(model) + repeated

    def around_step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def around_script(self) -> AbstractContextManager[None]:
        return nullcontext()

    def without_ring(self, model: Any, layer: Any) -> AbstractContextManager[None]:
        return nullcontext()  # modules run without a ring unless a micro-batch is current

    def totals(self, reports: Any) -> Any:
        return reports
