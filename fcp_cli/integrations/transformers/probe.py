"""Probes on a few tokens, before training, whether a transformers model can run on shards of a sequence.

A rank holds some tokens of a sequence, and only attention may read the others. So during the probe, attention computes
each token's output from its own query, key and value only, and linear attention that can run on rings treats each token
as a sequence. The rest of the model must then produce equal outputs for a token in the whole sequence and in a shard.
Layers that mix tokens (state spaces, convolutions, token shifts) do not, nor do models that count positions themselves
instead of using `position_ids`.

The verdict depends on outputs, not on the names of models or layers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from fcp_cli.errors import FcpError, RunError
from fcp_cli.integrations.transformers.linear import linear_layers, tokens_apart
from fcp_cli.models.ring_exactness import growing_rotation

_NAME = "fcp-probe"
_PROBE_TOKENS = 16
# Every other token without the last, so that the shard's largest position is smaller than the sequence's.
_SHARD = tuple(range(1, _PROBE_TOKENS - 1, 2))
_BY_HAND = 1 << 17  # shift of positions counted inside attention, large enough to change any position-dependent scale
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.05
_ONLY = "; a plan can only be followed by models in which attention alone mixes tokens"
_MIXES = (
    "the {name} model mixes tokens outside its attention (by a state space, a convolution, linear attention or a token "
    "shift), of which a rank holds a part of the sequence" + _ONLY
)
_POSITIONS = (
    "the {name} model does not rotate or embed a token by its position alone: it counts positions itself, or changes "
    "them with the longest that it sees{remedy}"
)
_OWN_ATTENTION = (
    "the {name} model does not attend through transformers' attention interface, so no ring can attend in its place"
)
_NO_ATTENTION = (
    "the {name} model has no layer of attention, by whose calls a plan's steps are checked; a plan can only be "
    "followed by models with at least one"
)
_NO_POSITIONS = (
    "the {name} model takes no position_ids, so on a shard of a sequence it would count from 0; a plan can only be "
    "followed by models that take them"
)
_NO_ARGUMENTS = (
    "the {name} model does not hand keyword arguments down to its attention, which needs to know its ring there; "
    "prepare a model class that does"
)
_FAILED = "the {name} model cannot be run on a few tokens, to see whether a plan can split sequences for it: {remedy}"
_SCALES = (
    "the {name} model scales its queries by positions that it counts itself, which are wrong where a rank holds a part "
    "of a sequence{remedy}"
)


_weights_to_come: ContextVar[bool] = ContextVar("weights_to_come", default=False)


@contextmanager
def weights_to_come() -> Iterator[None]:
    """Make `probe` check models without running them, since their weights are not loaded yet."""
    token = _weights_to_come.set(True)
    try:
        yield
    finally:
        _weights_to_come.reset(token)


def probe(model: transformers.PreTrainedModel, config: Any, check: Callable[..., None]) -> None:
    """Raise RunError if a model's outputs show that a plan cannot split its sequences.

    A model without weights (on the meta device, `weights_to_come`) is judged by its modules, and by the outputs of a
    small twin if one can be built; a vision-language model without weights only by its modules.

    Args:
        model: unwrapped model; its attention implementation is restored.
        config: config of its decoder.
        check: raises RunError for an attention call that a ring cannot compute.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise RunError(_NO_POSITIONS.format(name=config.model_type))
    # By config: running the model may not show it if its original training length is short.
    growing = growing_rotation(getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None))
    if growing is not None:
        remedy = f"; its config asks for rope_type {growing}: choose another, such as yarn"
        raise RunError(_POSITIONS.format(name=config.model_type, remedy=remedy))
    if _weights_to_come.get() or any(
        parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()
    ):
        _require_no_mixing_modules(model, config)
        twin = twin_of(model) if config is model.config else None
        if twin is not None:
            with suppress(_NotRunError):
                _Probe(twin, twin.config, check).run()
        return
    _Probe(model, config, check).run()


class _NotRunError(RunError):
    """The model's own code failed on a few tokens."""


class _Probe:
    def __init__(self, model: Any, config: Any, check: Callable[..., None]) -> None:
        self._model, self._config, self._check = model, config, check
        self._modules: dict[nn.Module, None] = {}
        self._counting = _ShiftedCounts()
        embedding = model.get_input_embeddings()
        self._device = embedding.weight.device
        self._tolerance = _TOLERANCE.get(embedding.weight.dtype, _TOLERANCE_16_BIT)

    def run(self) -> None:
        shard = list(_SHARD)
        ids, positions = self._ids(), torch.arange(_PROBE_TOKENS, device="cpu") * self._stride()
        others = ids.roll(1)
        others[shard] = ids[shard]
        with self._probing():
            # The shard first: dynamic rotary frequencies do not shrink again after a longer input.
            of_shard = self._rows(ids[shard], positions[shard])
            of_whole = self._rows(ids, positions)[shard]
            mixes = self._differ(self._rows(others, positions)[shard], of_whole)
            if not self._modules:
                self._refuse(_OWN_ATTENTION if mixes else _NO_ATTENTION)
            if mixes:
                self._refuse(_MIXES)
            if self._differ(of_shard, of_whole):
                self._refuse(_POSITIONS)
            with self._counting:
                counted = self._rows(ids[shard], positions[shard])
        if self._differ(counted, of_shard):
            tuned = getattr(self._config, "attn_temperature_tuning", False)
            self._refuse(_SCALES, "; set attn_temperature_tuning to False in its config" if tuned else "")

    def _refuse(self, said: str, remedy: str = "") -> NoReturn:
        raise RunError(said.format(name=self._config.model_type, remedy=remedy))

    def _ropes(self) -> list[dict[str, Any]]:
        """Return the rotary embedding settings of the model, or of each layer type."""
        rope = getattr(self._config, "rope_parameters", None) or {}
        return [rope, *(value for value in rope.values() if isinstance(value, dict))]

    def _rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the model's outputs [tokens, width] for tokens at positions."""
        self._counting.count = len(ids)
        inputs = {"input_ids": ids[None].to(self._device), "position_ids": positions[None].to(self._device)}
        try:
            out = self._model(**inputs, use_cache=False, ring=None)
        except FcpError:
            raise
        except Exception as error:  # any error of a model's own code
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _NotRunError(_FAILED.format(name=self._config.model_type, remedy=said)) from None
        rows: Tensor = (out.logits if hasattr(out, "logits") else out.last_hidden_state)[0]
        return rows.float() if rows.dtype != torch.float64 else rows

    def _differ(self, found: Tensor, expected: Tensor) -> bool:
        """Return whether most rows differ; a few may, if rounding flips an expert router's choice."""
        apart = torch.linalg.vector_norm(found - expected, dim=1)
        size = torch.linalg.vector_norm(expected, dim=1)
        return bool((~(apart <= self._tolerance * size)).sum() * 2 > len(found))

    def _ids(self) -> Tensor:
        """Return token ids without special tokens."""
        configs = (self._config, self._model.config)
        special = {v for c in configs for name, v in vars(c).items() if "token" in name and isinstance(v, int)}
        free = [number for number in range(self._config.vocab_size) if number not in special]
        return torch.tensor([free[(7 * i + 3) % len(free)] for i in range(_PROBE_TOKENS)], device="cpu")

    def _stride(self) -> int:
        """Return the distance between probed positions.

        The shard ends within the original training length and the whole sequence beyond it, unless a position table
        is too short.
        """
        config = self._config
        most = getattr(config, "max_position_embeddings", None) or 2048
        name = "original_max_position_embeddings"
        given = [rope.get(name) for rope in self._ropes()] + [getattr(config, name, None)]
        first_trained = min((value for value in given if value), default=most)
        held = (*self._model.parameters(), *self._model.buffers())
        tables = [len(tensor) for tensor in held if tensor.dim() == 2]
        # Learned position tables may have a few extra rows, e.g. two in OPT.
        if any(most <= rows <= most + 8 for rows in tables):
            return max(1, (most - 1) // (_PROBE_TOKENS - 1))
        return max(1, first_trained // (_SHARD[-1] + 1))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return outputs [1, tokens, heads, n] that depend on each token's own value and rotated query and key only."""
        self._counting.is_on = False
        if "ring" not in kwargs:
            self._refuse(_NO_ARGUMENTS)
        self._check(module, mask, kwargs)
        self._modules[module] = None
        groups = query.shape[1] // key.shape[1]
        seen = torch.asinh(_seen(query) + _seen(key).repeat_interleave(groups, dim=1))
        out = value.repeat_interleave(groups, dim=1) * (1 + seen)
        return out.transpose(1, 2).contiguous()

    @contextmanager
    def _probing(self) -> Iterator[None]:
        model = self._model
        before = model.config._attn_implementation
        training = {module: module.training for module in model.modules()}
        transformers.AttentionInterface.register(_NAME, _attend)
        token = _current.set(self)
        model.eval()
        hooks = [module.register_forward_pre_hook(self._enter) for module in model.modules()]
        try:
            set_attention(model, self._config, _NAME)
            with torch.no_grad(), tokens_apart():
                yield
        finally:
            _current.reset(token)
            for hook in hooks:
                hook.remove()
            set_attention(model, self._config, before)
            for module, was in training.items():
                module.training = was

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module in self._modules:
            self._counting.is_on = True


_current: ContextVar[_Probe] = ContextVar("probe")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface for the current probe."""
    return _current.get().attend(module, query, key, value, attention_mask, kwargs), None


class _ShiftedCounts(TorchFunctionMode):
    """Shifts every `torch.arange` of the input's length that an attention layer creates before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + _BY_HAND if self.is_on and func is torch.arange and made.numel() == self.count else made


def _require_no_mixing_modules(model: nn.Module, config: Any) -> None:
    """Raise RunError if a model has modules that mix tokens, except those that encode images."""
    on_rings = {f"{name}.conv1d" for name in linear_layers(model)}
    for name, module in model.named_modules():
        if name in on_rings:
            continue
        mixes = isinstance(module, nn.RNNBase) or (isinstance(module, nn.Conv1d) and module.kernel_size != (1,))
        if mixes and not hasattr(config, "vision_config"):
            raise RunError(f"{_MIXES.format(name=config.model_type)}; its {name} is one")


def set_attention(model: transformers.PreTrainedModel, config: Any, name: str) -> None:
    """Set the attention implementation of a model's decoder, whose config is `config`."""
    model.set_attn_implementation(name if config is model.config else {"text_config": name})


def _seen(heads: Tensor) -> Tensor:
    """Return a number per head and token, [1, heads, tokens, 1], that depends on the rotation."""
    weights = torch.linspace(-1.0, 1.0, heads.shape[-1], dtype=heads.dtype, device=heads.device).cos()
    weights = weights * torch.arange(1, heads.shape[-1] + 1, dtype=heads.dtype, device=heads.device).sin()
    return (heads * weights).sum(dim=-1, keepdim=True)


# A small twin of a model whose weights are not loaded yet.

_LAYERS = 6  # maximum of a twin; layer types alternate within fewer layers
_HEADS = 4
_GROUPS = 2
_SIZES = {
    "vocab_size": 64,
    "intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
}
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def twin_of(model: transformers.PreTrainedModel) -> Any:
    """Return a small model of the same class on the CPU, or None if its class or config prevents it.

    It has the same layer types, experts, rotary embeddings and scales, but another width.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return None  # under FakeTensorMode the twin would also be fake
    try:
        config = _small(model.config)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            twin: Any = type(model)(config)
        is_whole = all(bool(torch.isfinite(parameter).all()) for parameter in twin.parameters())
        return twin.float() if is_whole else None  # in fp32 even if the script's default dtype has 16 bits
    except Exception:  # any error of a model's own code at untested sizes
        return None


def _small(config: Any) -> Any:
    """Return a copy of a decoder's config with small sizes but the same head size."""
    small = copy.deepcopy(config)
    layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            setattr(small, name, value[:_LAYERS])
        elif name in _SIZES and isinstance(value, int):
            setattr(small, name, min(value, _SIZES[name]))
        elif name in _SPECIAL_TOKENS and value is not None:
            setattr(small, name, _SPECIAL_TOKENS.index(name))
    small.num_hidden_layers = min(layers, _LAYERS)
    groups = getattr(config, "num_key_value_heads", None)
    small.num_attention_heads = _HEADS
    if groups is not None:
        small.num_key_value_heads = _HEADS if groups == config.num_attention_heads else _GROUPS
    small.hidden_size = _HEADS * head_dim
    return small
