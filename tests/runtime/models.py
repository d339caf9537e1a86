"""Small models in the wrappings that a user may train under a plan, and what one process computes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fcp_cli.cost.levels import RecomputeLevel
from fcp_cli.cost.recipe import Loss, Recompute, Reduce
from fcp_cli.runtime.loader import Fetch
from fcp_cli.runtime.recompute import ActivationOffload
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.verification.emulation import Replayed, gradients_alone, synthetic_tokens
from fcp_cli.verification.tiny_model import TinyConfig, TinyLanguageModel, plain_attend, ring_attend

if TYPE_CHECKING:
    import transformers

Family = Literal["tiny", "qwen3", "llama"]
Wrapping = Literal[
    "none", "ddp", "ddp views", "ddp hook", "ddp static", "ddp ignoring",
    "ddp in a shell", "ddp beside a parameter", "composable ddp", "data parallel", "tensor parallel",
    "fsdp", "fsdp kept", "hsdp", "hsdp kept", "hsdp without names", "fsdp over half", "fsdp of a part",
    "fsdp undivided", "fsdp kept undivided", "fsdp divided twice", "fsdp1 of a part", "replicate",
]  # fmt: skip
Recomputation = Literal["off", "activation", "elementwise", "selective", "as-needed", "non-reentrant", "reentrant"]
# Under which the micro-batches of small steps mix all levels.
LEVELS = (
    RecomputeLevel(recompute="none", tokens=3),
    RecomputeLevel(recompute="activation", tokens=7, seconds_per_token=1e-6),
    RecomputeLevel(recompute="elementwise", tokens=13, seconds_per_token=4e-6),
    RecomputeLevel(recompute="selective", tokens=40, seconds_per_token=2e-5),
)
VOCAB_SIZE = TinyConfig().vocab_size
# Of decoders of transformers: fewer key/value heads than query heads.
SMALL_DECODER: Mapping[str, int] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to run a plan."""

    family: Family = "tiny"
    wrapping: Wrapping = "none"
    recompute: Recomputation = "off"
    dtype: torch.dtype = torch.float64
    labelled: bool = False
    reduce: Reduce = "wave"
    loss: Loss = "plain"
    tied: bool = False
    offloads: bool = False

    def fetch(self, plan: Path) -> Fetch:
        tokens = synthetic_tokens(plan, VOCAB_SIZE)
        return with_labels(tokens) if self.labelled else tokens


def with_labels(tokens: Fetch) -> Fetch:
    """Some tokens are not to be learned, in some sequences none."""

    def fetch(row: int) -> tuple[Tensor, Tensor]:
        ids = torch.as_tensor(tokens(row))
        masked = torch.rand(len(ids), generator=torch.Generator().manual_seed(row)) < (1.0 if row % 5 == 0 else 0.4)
        return ids, ids.masked_fill(masked, -100)

    return fetch


def build(case: Case) -> tuple[nn.Module, Callable[[LocalMicroBatch], Tensor]]:
    """The model of one rank, and the loss of a micro-batch; collective where the wrapping is."""
    if case.family == "tiny":
        config = TinyConfig(recompute=_TINY_RECOMPUTATION[case.recompute])
        model = TinyLanguageModel(config, ring_attend, dtype=case.dtype)
        if case.loss == "chunked":
            return model, lambda mb: mb.loss_of(model.hidden(mb.input_ids, mb.position_ids, mb.ring), model.output)
        wrapped = wrap(model, case.wrapping, list(model.blocks.children()))
        return wrapped, lambda mb: mb.loss(wrapped(mb.input_ids, mb.position_ids, mb.ring))
    from fcp_cli.integrations.transformers import prepare

    decoder = hugging_face(case.family, case.dtype, tied=case.tied)
    prepare(decoder)
    recompute(decoder, case.recompute)
    wrapped = wrap(decoder, case.wrapping, list(decoder.get_submodule("model.layers").children()))

    # Micro-batches of more tokens alone, so that a rank offloads some and keeps others.
    offload = ActivationOffload(torch.device("cpu"), above_tokens=8 if case.offloads else 1 << 40)

    def loss(mb: LocalMicroBatch) -> Tensor:
        inputs = {"input_ids": mb.input_ids, "position_ids": mb.position_ids}
        with offload.of(mb):
            if case.loss == "plain":
                return mb.loss(wrapped(**inputs).logits)
            return mb.normalised(wrapped(**inputs, labels=mb.labels).loss)

    return wrapped, loss


_TINY_RECOMPUTATION: Mapping[Recomputation, Recompute] = {
    "off": "none",
    "activation": "activation",
    "elementwise": "elementwise",
    "selective": "selective",
    "non-reentrant": "full",
}


def recompute(model: Any, how: Recomputation) -> None:
    """Switch a transformers model's recomputation on."""
    from fcp_cli.integrations.transformers import recompute_layers

    if how in ("activation", "elementwise", "selective", "as-needed"):
        recompute_layers(model.train(), how, LEVELS)
    elif how != "off":
        model.train()
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # 4.x
        enable({"use_reentrant": how == "reentrant"})


def hugging_face(family: Family, dtype: torch.dtype, *, tied: bool = False) -> transformers.PreTrainedModel:
    """A decoder of two layers with fewer key/value heads than query heads; equal weights at every call."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        **SMALL_DECODER,
        "head_dim": 8,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    model: Any
    if family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return cast("transformers.PreTrainedModel", model.to(dtype))


def wrap(model: nn.Module, wrapping: Wrapping, layers: list[nn.Module]) -> nn.Module:
    if wrapping.startswith("ddp"):
        return replicate(model, wrapping)
    if wrapping in OTHERS_WRAPPINGS:
        return OTHERS_WRAPPINGS[wrapping](model)
    if wrapping != "none":
        shard(model, wrapping, layers)
    return model


class Shell(nn.Module):
    """What frameworks put around a wrapped model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def replicate(model: nn.Module, wrapping: Wrapping) -> nn.Module:
    """In DDP with small buckets, so that it has several."""
    if wrapping in ("ddp in a shell", "ddp beside a parameter"):
        shell = Shell(replicate(model, "ddp"))
        if wrapping == "ddp beside a parameter":
            shell.head = nn.Linear(2, 2)
        return shell
    if wrapping == "ddp ignoring":
        set_ignored: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        set_ignored(model, ["norm.weight"])
    several: dict[str, Any] = {"bucket_cap_mb": 0.01}
    if wrapping == "ddp views":
        several |= {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    replica = DistributedDataParallel(model, static_graph=wrapping == "ddp static", **several)
    if wrapping == "ddp hook":
        replica.register_comm_hook(None, allreduce_hook)
    return replica


def shard(model: nn.Module, wrapping: Wrapping, layers: list[nn.Module]) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate as copies
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = torch.distributed.get_world_size()
    if wrapping in ("hsdp", "hsdp kept", "fsdp over half"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    elif wrapping == "hsdp without names":
        mesh = init_device_mesh("cpu", (2, size // 2))
    else:
        mesh = init_device_mesh("cpu", (size,))
    if wrapping == "fsdp over half":
        mesh = mesh["shard"]
    share: Any = copies if wrapping == "replicate" else fully_shard
    kept: dict[str, Any] = {"reshard_after_forward": False} if "kept" in wrapping else {}
    for layer in layers:
        share(layer, mesh=mesh, **kept)
    if wrapping != "fsdp of a part":
        share(model, mesh=mesh)
    divided: list[Any] = (
        [model] if wrapping == "fsdp divided twice" else [model, *layers] if "undivided" in wrapping else []
    )
    for module in divided:
        module.set_gradient_divide_factor(1.0)


def _composable(model: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate as replicate_inside

    replica: nn.Module = replicate_inside(model)
    return replica


def _tensor_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return parallelize_module(model, mesh, {"output": ColwiseParallel()})


def _fsdp1_of_a_part(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(model.get_submodule("output"), device_id=torch.device("cpu"))
    model.register_module("output", wrapped)
    return model


OTHERS_WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "composable ddp": _composable,
    "data parallel": nn.DataParallel,
    "tensor parallel": _tensor_parallel,
    "fsdp1 of a part": _fsdp1_of_a_part,
}


def expected(case: Case, plan: Path) -> Replayed:
    """Loss and gradient of every step in one process, in the case's precision, with PyTorch's own attention."""
    if case.family == "tiny":
        model: nn.Module = TinyLanguageModel(TinyConfig(), plain_attend, dtype=case.dtype)
        return gradients_alone(plan, case.fetch(plan), model, model)
    decoder = hugging_face(case.family, case.dtype, tied=case.tied)
    decoder.set_attn_implementation("sdpa")
    return gradients_alone(plan, case.fetch(plan), decoder, lambda ids, _: decoder(input_ids=ids).logits)


def assert_agrees(case: Case, found: Replayed, alone: Replayed) -> None:
    """fp64 within 1e-12 absolute, fp32 within 2e-6 relative (L2)."""
    if case.dtype == torch.float64:
        assert np.abs(found.gradients - alone.gradients).max() <= 1e-12
        assert np.abs(found.losses - alone.losses).max() <= 1e-12
        return
    for step, reference in zip(found.gradients, alone.gradients, strict=True):
        assert np.linalg.norm(step - reference) <= 2e-6 * np.linalg.norm(reference)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=2e-6)
