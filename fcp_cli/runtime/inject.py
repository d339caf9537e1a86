"""Prepare a process for a script under a plan: rank variables, hooks on frameworks, and a check on optimizers."""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Protocol, cast

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import Recompute
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.runtime.cursor import is_followed
from fcp_cli.runtime.launcher import record_error, torch_variables
from fcp_cli.util.plugins import Registry

PLAN_VARIABLE = "FCP_PLAN"


def install(environment: MutableMapping[str, str]) -> None:
    """Make this process a rank of a job under a plan. Call it before any framework is imported.

    Args:
        environment: environment of this process; torch's variables are added if msrun started it.
    """
    if not environment.get(PLAN_VARIABLE):
        raise UsageError(f"{PLAN_VARIABLE} names no plan; set it, or start the script with 'fcp launch --plan PLAN'")
    environment.update(torch_variables(environment))
    _write_whole_lines()
    sys.excepthook = _one_line_errors
    after_import(
        {
            "torch.distributed.distributed_c10d": _leave_at_exit,
            "torch.optim.optimizer": _watch_optimizers,
            **hooks(),
        }
    )


def install_beside_ranks() -> None:
    """Make this process raise if it trains: it belongs to a job under a plan but is not a rank."""
    after_import({"torch.optim.optimizer": _refuse_to_train})


def _refuse_to_train(optimizer: ModuleType) -> None:
    by_accelerate = any(name.startswith("ACCELERATE_") for name in os.environ)
    remedy = (
        "without accelerators 'accelerate launch' starts the plan's ranks by '--multi_gpu --num_processes N' alone"
        if by_accelerate
        else "have its launcher start the plan's ranks, as 'torchrun --nproc-per-node N' does"
    )

    def refuse(*_: Any) -> None:
        sys.excepthook = _one_line_errors
        raise RunError(
            f"{sys.argv[0]} trains in a process that is not a rank (RANK is not set), and would train without the plan "
            f"{os.environ.get(PLAN_VARIABLE)}; {remedy}"
        )

    optimizer.register_optimizer_step_pre_hook(refuse)


def _write_whole_lines() -> None:
    """Buffer output by lines, since ranks share a terminal.

    Launchers run `python -u`, with which `print` writes each argument separately.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _watch_optimizers(optimizer: ModuleType) -> None:
    """Verify before each optimizer step that gradients came from the plan.

    The hook is never removed: PyTorch iterates over its hooks while calling them, so none may remove itself.
    """
    optimizer.register_optimizer_step_pre_hook(lambda *_: require_followed())


def _leave_at_exit(distributed: ModuleType) -> None:
    """Destroy the process group at exit, since many scripts forget it; write the metrics before it is destroyed."""
    destroy = distributed.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None and (recorder := sys.modules.get("fcp_cli.runtime.metrics")) is not None:
            recorder.close_all()
        destroy(group)

    for module in (distributed, sys.modules.get("torch.distributed")):  # others may have imported names from it already
        if getattr(module, "destroy_process_group", None) is destroy:
            module.destroy_process_group = destroy_process_group  # type: ignore[union-attr]

    def leave() -> None:
        if not hasattr(sys.modules.get("torch"), "distributed"):
            return  # aborted during the import of torch, which cannot be imported again
        from fcp_cli.runtime.transport import leave_process_group

        leave_process_group()

    atexit.register(leave)


def require_followed() -> None:
    """Raise RunError if the script trains but does not follow the plan."""
    from fcp_cli.plan.metadata import PLANNED_BY_ITSELF, has_no_plan

    if not is_followed():
        if has_no_plan():
            raise RunError(
                f"{sys.argv[0]} trains without a plan, which fcp makes by itself for {PLANNED_BY_ITSELF} alone; make "
                "one with 'fcp plan MANIFEST', and follow it with --plan (docs/how-to/training-loop.md)"
            )
        raise RunError(
            f"{sys.argv[0]} trains, but nothing in it follows the plan {os.environ.get(PLAN_VARIABLE)}: it neither "
            "iterates over fcp_cli.runtime.steps nor trains through a framework that fcp hooks; "
            "see docs/how-to/training-loop.md, or start it without hooks by 'fcp launch --inject none'"
        )


def _one_line_errors(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print fcp's own errors as one line, since they name the fix, and others with their traceback."""
    record_error(error)
    if isinstance(error, KeyboardInterrupt):
        return  # the process that interrupted the job reports it
    if isinstance(error, FcpError):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


# Call a function right after a module is imported, by anyone at any time, without importing it.

ImportHook = Callable[[ModuleType], None]


def after_import(hooks: Mapping[str, ImportHook]) -> None:
    """Call each hook with its module once the module's code has run, before its importer gets it.

    `from module import name` therefore already returns the hook's value. Modules that are already imported are hooked
    immediately.
    """
    waiting = dict(hooks)
    for name in hooks:
        module = sys.modules.get(name)
        if module is not None:
            waiting.pop(name)(module)
    sys.meta_path.insert(0, _HookingFinder(waiting))


class _HookingFinder(MetaPathFinder):
    """Finder that delegates to the other finders and wraps the loader they return."""

    def __init__(self, waiting: dict[str, ImportHook]) -> None:
        self._waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if finder is not self and find else None
            if spec is not None:
                if spec.loader is not None:
                    # The hook stays registered: libraries search for optional modules, and import them later or
                    # never.
                    spec.loader = _HookingLoader(spec.loader, self._waiting[fullname])
                return spec
        return None


class _HookingLoader(Loader):
    """Loader that calls the hook after the wrapped loader; the module itself only sees the wrapped one."""

    def __init__(self, wrapped: Loader, hook: ImportHook) -> None:
        self._wrapped = wrapped
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        module.__loader__ = self._wrapped
        self._wrapped.exec_module(module)
        self._hook(module)


# The only access of the core to integrations: functions by name, imported on first use.
#
# Nothing in the core imports `fcp_cli.integrations` (`tests/app/test_structure.py`). Other packages hook further
# modules through entry points in the group `fcp.integrations`.

_INTEGRATIONS = "fcp_cli.integrations"

HOOKS: Mapping[str, str] = {
    "megatron.core.pipeline_parallel.schedules": f"{_INTEGRATIONS}.megatron_schedule:hook_schedules",
    "megatron.core.utils": f"{_INTEGRATIONS}.megatron.data:hook_batches",
    "megatron.training.utils": f"{_INTEGRATIONS}.megatron.data:hook_batches",
    "megatron.bridge.data.batch_utils": f"{_INTEGRATIONS}.megatron.data:hook_splitting",
    "megatron.bridge.data.finetuning": f"{_INTEGRATIONS}.megatron.data:hook_splitting",  # up to 0.5
    "megatron.bridge.data.loaders": f"{_INTEGRATIONS}.megatron.data:hook_cycling",
    "transformers.trainer": f"{_INTEGRATIONS}.hugging_face.hooks:hook_trainer",
    "accelerate.accelerator": f"{_INTEGRATIONS}.hugging_face.hooks:hook_accelerator",
    "lightning.pytorch.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "pytorch_lightning.loops.fit_loop": f"{_INTEGRATIONS}.lightning.hooks:hook_fit_loop",
    "deepspeed": f"{_INTEGRATIONS}.deepspeed.hooks:hook_deepspeed",
    "llamafactory.hparams.parser": f"{_INTEGRATIONS}.hugging_face.packing:unpack_llama_factory",
    "axolotl.utils.config": f"{_INTEGRATIONS}.hugging_face.packing:unpack_axolotl",
    "swift.arguments.sft_args": f"{_INTEGRATIONS}.hugging_face.packing:unpack_swift",
    "trl.trainer.sft_config": f"{_INTEGRATIONS}.hugging_face.packing:unpack_trl",
    "mindspeed_mm.fsdp.distributed.torch_parallelize": f"{_INTEGRATIONS}.mindspeed_mm:hook_sharding",
    "mindspeed_mm.fsdp.train.train_engine": f"{_INTEGRATIONS}.mindspeed_mm:hook_engine",
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
