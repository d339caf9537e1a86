"""The one door from the core to integrations: functions by name, imported on first use.

Nothing in the core imports `fcp_cli.integrations` (`tests/app/test_structure.py`); it asks here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol, cast

from fcp_cli.recipe import Recompute

_INTEGRATIONS = "fcp_cli.integrations"

HOOKS: Mapping[str, str] = {
    "megatron.core.pipeline_parallel.schedules": f"{_INTEGRATIONS}.megatron_schedule:hook_schedules",
    "megatron.core.utils": f"{_INTEGRATIONS}.megatron.batches:hook_batches",
    "megatron.training.utils": f"{_INTEGRATIONS}.megatron.batches:hook_batches",
    "transformers.trainer": f"{_INTEGRATIONS}.hugging_face.trainer_hooks:hook_trainer",
    "accelerate.accelerator": f"{_INTEGRATIONS}.hugging_face.accelerate.hooks:hook_accelerator",
    "lightning.pytorch.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "pytorch_lightning.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "torchtitan.trainer": f"{_INTEGRATIONS}.own_loops:refuse_torchtitan",
    "torchtune.config._parse": f"{_INTEGRATIONS}.own_loops:refuse_torchtune",
    "mindspeed_mm.fsdp.distributed.torch_parallelize": f"{_INTEGRATIONS}.mindspeed_mm.engine:hook_sharding",
    "mindspeed_mm.fsdp.train.train_engine": f"{_INTEGRATIONS}.mindspeed_mm.engine:hook_engine",
}
"""Module of a framework -> the function that is called with it right after its import."""


class ModelPreparation(Protocol):
    """Models of a library on the rings of a plan."""

    def prepare(self, model: Any) -> None:
        """Run the model's attention on the ring of the current micro-batch."""

    def recompute_layers(self, model: Any, how: Recompute) -> None:
        """Recompute the activations of each layer in backward."""

    def weights_to_come(self) -> AbstractContextManager[None]:
        """Return the context in which models are prepared before their weights are read."""


def transformers_models() -> ModelPreparation:
    """Return the integration of transformers, whose models the bundled trainer trains and `fcp profile` times."""
    return cast(ModelPreparation, import_module(f"{_INTEGRATIONS}.transformers"))


def resolve(target: str) -> Any:
    """Import and return the object that `module:attribute` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
