"""The parts that a model is built with, which differ if others (MindSpeed) have replaced Megatron's own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from fcp_cli.integrations.megatron import checks
from fcp_cli.integrations.megatron.model import hook_model
from fcp_cli.integrations.megatron.multi_token import check_multi_token, hook_multi_token
from fcp_cli.integrations.megatron.router_losses import hook_losses
from fcp_cli.runtime.communication.transport import ProcessTransport


class Stack(Protocol):
    """One way to run a GPTModel under a plan.

    Attributes:
        even_chunks: whether sequences are padded until all chunks are equally long.
        engine_rings: whether Transformer Engine's rings run the plan's groups if the model attends with it.
        follows_masks: whether plans may be for sequences with masks.
        recomputes_as_needed: whether layers may recompute as a plan says.
    """

    even_chunks: bool
    engine_rings: bool
    follows_masks: bool
    recomputes_as_needed: bool

    @property
    def name(self) -> str:
        """Return the name, with its version, for messages."""
        ...

    def check(self, config: Any, model: Any) -> None:
        """Raise RunError if this configuration, or this model, cannot follow a plan."""
        ...

    def hook(self, model: Any, transport: ProcessTransport) -> int:
        """Make the model follow the micro-batch of each call; returns how many attention layers it has."""
        ...

    def around_step(self) -> AbstractContextManager[None]:
        """Return the context in which the schedule runs one step."""
        ...

    def around_script(self) -> AbstractContextManager[None]:
        """Return the context in which the script's forward step and its loss function run."""
        ...

    def without_ring(self, model: Any, layer: Any) -> AbstractContextManager[None]:
        """Return the context in which this layer attends to a whole sequence by itself, outside of micro-batches."""
        ...

    def totals(self, reports: Any) -> Any:
        """Return the schedule's result for the script from its loss function's reports per micro-batch."""
        ...


class MegatronStack:
    """Plain megatron-core, with a static context-parallel group of one rank, in which nothing needs switching."""

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
        return nullcontext()  # so it is made

    def totals(self, reports: Any) -> Any:
        return reports
