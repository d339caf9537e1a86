"""The only access of the core to integrations: functions by name, imported on first use.

Nothing in the core imports `fcp_cli.integrations` (`tests/app/test_structure.py`). Other packages hook further modules
through entry points in the group `fcp.integrations`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol, cast

from fcp_cli.cost.recompute_levels import RecomputeLevel
from fcp_cli.errors import FcpError
from fcp_cli.plugins import Registry
from fcp_cli.recipe import Recompute

_INTEGRATIONS = "fcp_cli.integrations"

HOOKS: Mapping[str, str] = {
    "megatron.core.pipeline_parallel.schedules": f"{_INTEGRATIONS}.megatron_schedule:hook_schedules",
    "megatron.core.utils": f"{_INTEGRATIONS}.megatron.data.batches:hook_batches",
    "megatron.training.utils": f"{_INTEGRATIONS}.megatron.data.batches:hook_batches",
    "megatron.bridge.data.batch_utils": f"{_INTEGRATIONS}.megatron.data.bridge:hook_splitting",
    "megatron.bridge.data.finetuning": f"{_INTEGRATIONS}.megatron.data.bridge:hook_splitting",  # up to 0.5
    "megatron.bridge.data.loaders": f"{_INTEGRATIONS}.megatron.data.bridge:hook_cycling",
    "transformers.trainer": f"{_INTEGRATIONS}.hugging_face.trainer_hooks:hook_trainer",
    "accelerate.accelerator": f"{_INTEGRATIONS}.hugging_face.accelerate.hooks:hook_accelerator",
    "lightning.pytorch.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "pytorch_lightning.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "deepspeed": f"{_INTEGRATIONS}.deepspeed.hooks:hook_deepspeed",
    "llamafactory.hparams.parser": f"{_INTEGRATIONS}.framework_packing:unpack_llama_factory",
    "axolotl.utils.config": f"{_INTEGRATIONS}.framework_packing:unpack_axolotl",
    "swift.arguments.sft_args": f"{_INTEGRATIONS}.framework_packing:unpack_swift",
    "trl.trainer.sft_config": f"{_INTEGRATIONS}.framework_packing:unpack_trl",
    "mindspeed_mm.fsdp.distributed.torch_parallelize": f"{_INTEGRATIONS}.mindspeed_mm.engine:hook_sharding",
    "mindspeed_mm.fsdp.train.train_engine": f"{_INTEGRATIONS}.mindspeed_mm.engine:hook_engine",
}
"""Module of a framework -> the function that is called with it right after its import."""


REGISTRY = Registry("fcp.integrations", "integration", "module", tuple(HOOKS))


class Hook(Protocol):
    """Callable that makes a framework follow the plan."""

    def __call__(self, module: ModuleType, /) -> None:
        """Patch the module right after its code has run, before its importer gets it."""


def hooks() -> dict[str, Hook]:
    """Return the hook of each framework module; a hook is imported with its module."""
    return {name: partial(_hook, name) for name in REGISTRY.names()}


def _hook(name: str, module: ModuleType) -> None:
    if name in HOOKS:
        resolve(HOOKS[name])(module)
        return
    plugin = REGISTRY.plugin(name)
    hook = plugin.load()
    try:
        hook(module)
    except FcpError:
        raise
    except (Exception, SystemExit) as error:
        raise plugin.error(f"failed at {plugin.entry.value}", error) from error


class ModelPreparation(Protocol):
    """Integration of a model library with the rings of a plan."""

    def prepare(self, model: Any) -> None:
        """Run the model's attention on the ring of the current micro-batch."""

    def recompute_layers(self, model: Any, how: Recompute, levels: Sequence[RecomputeLevel] = ()) -> None:
        """Recompute the activations of each layer in backward."""

    def weights_to_come(self) -> AbstractContextManager[None]:
        """Return a context manager to prepare models in before their weights are loaded."""


def transformers_models() -> ModelPreparation:
    """Return the integration of transformers, for models of the bundled trainer and `fcp profile`."""
    return cast(ModelPreparation, import_module(f"{_INTEGRATIONS}.transformers"))


def resolve(target: str) -> Any:
    """Import and return the object named `module:attribute`."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
