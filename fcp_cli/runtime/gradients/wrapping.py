"""Find the wrapper that reduces a model's gradients, which may be nested in further wrappers.

Frameworks put shells around it (torch.compile, Lightning's Fabric, a module of the script's own). The trained
parameters still belong to the wrapper, so a plan must control the wrapper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fcp_cli.errors import RunError

_FSDP1 = "FullyShardedDataParallel"
_WITHOUT_IT = "give steps() the model that it wraps, or wrap it in DistributedDataParallel or with fully_shard"


def reducing_module(model: nn.Module) -> nn.Module:
    """Return the module that reduces all trained parameters' gradients, or the model itself if none does."""
    found = [(name, part) for name, part in _outermost(model) if any(p.requires_grad for p in part.parameters())]
    if not found:
        _check_is_whole(model)
        return model
    for name, part in found:
        refused = _why_not(part)
        if refused:
            raise RunError(f"{_named(name)} {refused}")
    name, part = found[0]
    inside = {id(parameter) for parameter in part.parameters()}
    outside = [other for other, p in model.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside and isinstance(part, FSDPModule):
        raise RunError("only parts of the model are sharded with FSDP2; call fully_shard on the whole model too")
    if outside:
        raise RunError(
            f"{_named(name)} is a {type(part).__name__}, which does not hold the parameter {outside[0]}"
            f"{f' and {len(outside) - 1} more' if len(outside) > 1 else ''}; wrap the whole model, or freeze them"
        )
    return part


def is_deepspeed_engine(module: nn.Module) -> bool:
    """Return whether a module is a DeepSpeed engine, without importing DeepSpeed."""
    return _has_base(module, "deepspeed", "DeepSpeedEngine")


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that reduce gradients, each once."""
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop(0)
        if module in seen:
            continue
        seen.add(module)
        if _reduces(module):
            seen.update(module.modules())  # Fabric's shell has both the wrapper and the wrapped module as children
            yield name, module
        else:
            waiting.extend((f"{name}.{child}".lstrip("."), part) for child, part in module.named_children())


def _reduces(module: nn.Module) -> bool:
    """Return whether a module reduces gradients in its own backward, judged by its switches to disable that."""
    switches = (getattr(type(module), name, None) for name in ("no_sync", "set_requires_gradient_sync"))
    return isinstance(module, DataParallel) or type(module).__name__ == _FSDP1 or any(map(callable, switches))


def _why_not(part: nn.Module) -> str:
    """Return the reason why a gradient-reducing module cannot follow a plan, or ""."""
    own = f"is a {type(part).__name__} of {type(part).__module__.partition('.')[0]}"
    if type(part).__name__ == _FSDP1:
        return f"is a {_FSDP1} (FSDP1), which cannot follow a plan; shard the model with fully_shard (FSDP2)"
    if _has_base(part, "deepspeed", "PipelineEngine"):
        return f"{own}, which runs micro-batches of its own; plans with pipeline parallelism are for Megatron"
    if isinstance(part, (FSDPModule, DistributedDataParallel)) or is_deepspeed_engine(part):
        nested = next((inner for inner in part.modules() if inner is not part and _reduces(inner)), None)
        if nested is None or (isinstance(part, FSDPModule) and isinstance(nested, FSDPModule)):
            return ""
        return f"{own} around a {type(nested).__name__}: both reduce gradients; keep one of them"
    return f"{own}, which reduces gradients by itself, and fcp does not know when; {_WITHOUT_IT}"


def _check_is_whole(model: nn.Module) -> None:
    """Raise RunError if a plain model's parameters are shards or belong to a DeepSpeed engine."""
    for name, parameter in model.named_parameters():
        own: Any = parameter
        if hasattr(own, "ds_id") or hasattr(own, "_hp_mapping") or hasattr(own, "param_idx_in_group"):
            raise RunError(f"the parameter {name} belongs to a DeepSpeed engine; give steps() the engine")
        if hasattr(own, "device_mesh"):
            raise RunError(
                f"the parameter {name} is a DTensor over {own.device_mesh.size()} ranks that fully_shard did not make; "
                "a plan's loop has no tensor parallelism: shard the model with fully_shard alone"
            )


def _has_base(module: nn.Module, package: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] == package for base in type(module).__mro__)


def _named(name: str) -> str:
    return f"the model's part {name}" if name else "the model"
