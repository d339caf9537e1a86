"""Low-rank adapters with peft, injected into an unchanged transformers class; and freezing by pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from fcp_cli.errors import UsageError
from fcp_cli.recipe import Recipe
from fcp_cli.training.weights.weights import copy_companions, published_folder, whole_tensor
from fcp_cli.tuning import ALL_LINEAR, Lora, frozen_names, parse_lora
from fcp_cli.words import nearest_words, short_count

_BASE: Final = ".base_layer."
_ADAPTER: Final = ".lora_"
_PEFT_PREFIX: Final = "base_model.model."  # prefix of PeftModel's wrapped model
_OUTSIDE_LANGUAGE_MODEL: Final = r"^(?!.*\blanguage_model\.).*$"


def choose_trained(model: nn.Module, recipe: Recipe, *, seed: int) -> None:
    """Add adapters or freeze weights by pattern, as the recipe says; frozen weights stay frozen."""
    if recipe.lora is not None:
        _add_adapters(model, parse_lora(recipe.lora), seed=seed, only_language_model=recipe.freeze_vision)
    elif recipe.freeze is not None:
        everywhere = dict(model.named_parameters(remove_duplicate=False))
        for name in frozen_names(everywhere, recipe.freeze):
            everywhere[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("nothing is left to train; remove some patterns of --freeze")


def _add_adapters(model: nn.Module, lora: Lora, *, seed: int, only_language_model: bool) -> None:
    """Add adapters to linear layers, in their dtype; B is 0, so that outputs are unchanged."""
    from peft import LoraConfig, inject_adapter_in_model

    outside = _OUTSIDE_LANGUAGE_MODEL if only_language_model and hasattr(model.config, "vision_config") else None
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for target in lora.targets:
        if target not in linear and lora.targets != (ALL_LINEAR,):
            near = nearest_words(target, sorted(linear), most=3, cutoff=0.3) or sorted(linear)
            raise UsageError(f"--lora: {target!r} is not a linear layer of the model; it has {', '.join(near)}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft accepts floats
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        exclude_modules=outside,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)  # reseeded, so that adapters do not depend on earlier draws
    inject_adapter_in_model(config, model)


def describe_frozen(model: nn.Module, recipe: Recipe, name: str) -> str | None:
    """Describe the frozen part of a model; None if everything is trained."""
    parameters = list(model.parameters())
    if all(parameter.requires_grad for parameter in parameters):
        return None
    trained = short_count(sum(parameter.numel() for parameter in parameters if parameter.requires_grad))
    if recipe.lora is not None:
        return f"adapters of {trained} parameters are trained ({parse_lora(recipe.lora)}); {name} is frozen"
    if recipe.freeze is None:
        return f"the vision encoder of {name} is frozen"
    return f"{trained} parameters of {name} are trained, those of --freeze {recipe.freeze} are frozen"


def adapted_names(names: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """Map tensor names of the model with adapters to names in the checkpoint."""
    live = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return {name: names[plain] for name in live if (plain := name.replace(_BASE, ".")) in names}


def export_adapters(
    model: Any,
    folder: Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    dtype: torch.dtype,
    base: Path | None,
    source: Path | None,
) -> None:
    """Write adapters in peft's format, for `PeftModel.from_pretrained`. Collective.

    Args:
        model: the model with adapters, plain or sharded by rows.
        folder: output folder, replaced atomically.
        rank: rank of this process; rank 0 writes.
        barrier: waits for all ranks.
        dtype: dtype of the adapters in the file.
        base: checkpoint of the base model.
        source: folder whose tokenizer and processor are copied.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    with published_folder(folder, rank=rank, barrier=barrier) as partial:
        whole = {}
        for name, parameter in model.named_parameters():
            if _ADAPTER in name:
                tensor = whole_tensor(parameter)  # collective: every rank has rows of it
                if rank == 0:
                    whole[name] = tensor.detach().to("cpu", dtype).contiguous()
        if rank == 0:
            named = get_peft_model_state_dict(model, state_dict=whole)
            tensors = {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in named.items()}
            save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
            config = model.peft_config["default"]
            config.base_model_name_or_path = None if base is None else str(base)
            config.inference_mode = True
            config.save_pretrained(partial)
            copy_companions(source, partial)
