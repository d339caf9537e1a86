"""Holds the figures of models against transformers' own classes on the meta device: parameters, operations, bytes.

python -m benchmarks.model_figures [MODEL ...]

Nothing is allocated: the classes run whole, all layers, on tensors without memory. Counted are parameters; operations
of one forward, by `FlopCounterMode`, those of attention from the pairs of tokens that transformers' own masks let
through; and the bytes of all storages that autograd still holds when a forward has ended, in bfloat16, as the
difference between two lengths. Attention keeps what flash kernels keep, linear attention what those of `fla` do, and
state spaces what those of `mamba_ssm` do.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import masking_utils

from fcp_cli.cost.model import windowed_pairs
from fcp_cli.cost.recipe import Recipe
from fcp_cli.integrations.transformers.linear import hook_linear_layers
from fcp_cli.memory.activations import final_norm_bytes, input_bytes, layer_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.models.layers import LINEAR_CHUNK
from fcp_cli.models.model import ModelSpec, load_model, shipped_names
from fcp_cli.models.model import forward_operations as operations_of
from fcp_cli.models.transformers_config import text_config
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring

_NAME = "fcp-figures"
_TOKENS = 8192  # of the sequence whose operations are counted: several windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What a model's own class has, computes in a forward over one sequence, and keeps for its backward."""

    parameters: int
    operations: float
    bytes_per_token: float


def counted(spec: ModelSpec, *, tokens: int) -> Counted:
    """Count a language model's figures; an encoder's are left out.

    Args:
        spec: the model.
        tokens: of the sequence whose operations are counted.
    """
    model = build(spec, experts="batched_mm")
    return Counted(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        operations=forward_operations(model, tokens),
        bytes_per_token=kept_bytes_per_token(build(spec, experts="grouped_mm")),
    )


def build(spec: ModelSpec, *, experts: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Build a model's own class on the meta device, with attention that counts instead of attending."""
    transformers.AttentionInterface.register(_NAME, _attend)
    model_type, figures = text_config(spec)
    config = transformers.AutoConfig.for_model(model_type, **figures)
    given = {"experts_implementation": experts} if spec.experts else {}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=_NAME, **given
        )


def forward_operations(model: Any, tokens: int) -> float:
    """Count the operations of one forward, its output layer among them."""
    _Attend.operations = 0.0
    solve = torch.linalg.solve_triangular
    # Kernels multiply with the inverse, which the counter would count, too.
    torch.linalg.solve_triangular = lambda system, right, **_: system @ right
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            _run(model, tokens)
    finally:
        torch.linalg.solve_triangular = solve
    return float(counter.get_total_flops()) + _Attend.operations


def kept_bytes_per_token(model: Any, *, tokens: int = 1024) -> float:
    """Count the bytes that autograd holds for each token when the decoder's forward has ended, its head left out."""
    kept = []
    with _kernels_of_states(model):
        for count in (tokens, 2 * tokens):
            held = _Held(model)
            with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda one: one.tensor):
                out = _run(model.model, count, ring=Ring(shard_layout((count,), 1)))
            kept.append(held.num_bytes)
            del out
    return (kept[1] - kept[0]) / tokens


def _run(model: Any, tokens: int, **more: Any) -> Any:
    with torch.device("meta"):
        ids, positions = torch.zeros(1, tokens, dtype=torch.int64), torch.arange(tokens)[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False, **more)


class _Saved:
    """A tensor that autograd holds: gone with the last of the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class _Held:
    """The distinct storages that autograd still holds, those of the model's parameters left out."""

    def __init__(self, model: Any) -> None:
        self._own = {_storage(parameter) for parameter in model.parameters()}
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def keep(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    @property
    def num_bytes(self) -> int:
        storages = {_storage(saved.tensor): saved.tensor.untyped_storage().nbytes() for saved in self._saved}
        return sum(size for storage, size in storages.items() if storage not in self._own)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Attend(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and counts what it would compute."""

    operations = 0.0

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        _, heads, tokens, size = query.shape
        pairs = pairs_of(tokens, window)
        _Attend.operations += 2.0 * heads * (size + value.shape[-1]) * pairs
        out = query.new_empty(1, tokens, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(heads, tokens, dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise NotImplementedError


_pairs: dict[tuple[int, int | None], int] = {}


def pairs_of(tokens: int, window: int | None) -> int:
    """Count the pairs of tokens that transformers' own causal mask lets through, in a window or without one."""
    if (tokens, window) not in _pairs:
        whole: Any = masking_utils.causal_mask_function
        mask: Any = whole if window is None else masking_utils.sliding_window_causal_mask_function(window)
        place = torch.arange(tokens)
        _pairs[tokens, window] = int(mask(0, 0, place[:, None], place[None, :]).sum())
    return _pairs[tokens, window]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    return _Attend.apply(query, key, value, given.get("sliding_window")), None  # type: ignore[no-untyped-call]


class _Update(torch.autograd.Function):
    """Keeps what `fla`'s kernel of the gated delta rule keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        heads, key_heads, tokens = value.shape[2], key.shape[2], key.shape[1]
        scales = [query.new_empty(tokens, key_heads, dtype=torch.float32) for _ in "qk"]
        system = query.new_empty(tokens, heads, LINEAR_CHUNK)
        sums = decay.new_empty(decay.shape, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, sums, beta, system, *scales)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise NotImplementedError


class _Scan(torch.autograd.Function):
    """Keeps what `mamba_ssm`'s kernel of a scan keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out, sums = torch.empty_like(x), step.new_empty(step.shape, dtype=torch.float32)
        ctx.save_for_backward(out, x, step, sums, b, c)
        return out, x.new_empty(x.shape[0], *x.shape[2:], b.shape[-1], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        raise NotImplementedError


def _update(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    left = value.new_empty(len(value), value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float32)
    return _Update.apply(query, key, value, g, beta), left  # type: ignore[no-untyped-call]


def _scan(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _Scan.apply(x, step, b, c)  # type: ignore[no-untyped-call]
    return found


_KERNELS = {"torch_chunk_gated_delta_rule": _update, "mamba2_chunk_scan": _scan}


@contextmanager
def _kernels_of_states(model: Any) -> Iterator[None]:
    """Replace what updates states in PyTorch, which keeps each step of its arithmetic, on the ring of one rank."""
    module: Any = sys.modules[type(model).__module__]
    found = {name: getattr(module, name) for name in _KERNELS if hasattr(module, name)}
    for name in found:
        setattr(module, name, _KERNELS[name])
    hook_linear_layers(model)
    try:
        yield
    finally:
        for name, whole in found.items():
            setattr(module, name, whole)


def main(names: list[str]) -> None:
    """Print a table of models: what they have and how far descriptions are off."""
    print("| model | parameters | active | layers | error of parameters, operations, bytes |")
    print("|---|---:|---:|---|---|")
    for name in names or [name for name in shipped_names("model") if not name.endswith("-tiny")]:
        spec = load_model(name)
        found, precision = counted(spec, tokens=_TOKENS), precision_of(Recipe())
        kept = sum(count * layer_bytes(spec, kind, precision) for kind, count in spec.kinds.items())
        kept += input_bytes(spec, precision) - 2 * 8  # without positions and labels
        kept += final_norm_bytes(spec, precision) - precision.activation * spec.hidden_size  # which the head would read
        errors = [
            f"{spec.text_parameters - found.parameters}",
            f"{abs(causal_operations(spec, _TOKENS) / found.operations - 1):.3%}",
            f"{abs(kept / found.bytes_per_token - 1):.3%}",
        ]
        sizes = f"{spec.text_parameters / 1e9:.2f} B | {spec.active_parameters / 1e9:.2f} B"
        print(f"| `{name}` | {sizes} | {_layers(spec)} | {', '.join(errors)} |")


def causal_operations(spec: ModelSpec, tokens: int) -> float:
    """Return the operations of a forward over one causal sequence, as the description says them."""
    forward, length = operations_of(spec), np.array([float(tokens)])
    within = float(windowed_pairs(length, spec.window_tokens or 0)[0])
    pairs = forward.attention_per_token2 * tokens**2 + forward.window_per_token2 * within
    return forward.linear_per_token * tokens + pairs


def _layers(spec: ModelSpec) -> str:
    kinds = {kind: ", ".join(part for part in (kind.attention, kind.mlp) if part != "none") for kind in spec.kinds}
    return "; ".join(f"{count} {kinds[kind]}" for kind, count in spec.kinds.items())


if __name__ == "__main__":
    main(sys.argv[1:])
