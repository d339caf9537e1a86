"""A small GPTModel or HybridModel of real megatron-core, a data set of sequences of any length, and what a training script does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import tests.runtime.megatron.cpu_shim  # noqa: F401  before megatron
from fcp_cli.util.masks import CAUSAL, Mask, Spans
from tests.masks import Masked, random_mask, seen

import torch  # isort: skip
from megatron.core import parallel_state  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # isort: skip
from megatron.core.transformer.dot_product_attention import DotProductAttention as LocalAttention  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # isort: skip
from megatron.core.utils import get_model_config  # isort: skip
from torch import Tensor  # isort: skip
from torch.utils.data import DataLoader, Dataset  # isort: skip

VOCABULARY = 64
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
# Keys of 12, values of 6 per head.
LATENT = {
    "num_query_groups": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
    "rotary_base": 100,
    "normalization": "LayerNorm",
    "qk_layernorm": True,
}


class Sequences(Dataset[dict[str, Any]]):
    """Random sequences: some tokens carry no loss, the last of each never.

    Packed, each is several that do not see each other, as its `cu_seqlens` say. Masked, what tokens see of each other is
    drawn, too, and said by a mask of fcp's or by an attention mask.
    """

    def __init__(self, lengths: Sequence[int], *, axes: int = 1, packed: bool = False, masked: bool = False) -> None:
        self._lengths = lengths
        self._axes = axes
        self._packed = packed
        self.masked = masked

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, at: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(at)
        length = self._lengths[at]
        text = torch.randint(VOCABULARY, (length + 1,), generator=draw)
        loss_mask = (torch.rand(length, generator=draw) < 0.7).to(torch.float64)
        loss_mask[-1] = 0.0
        positions = torch.arange(length)
        if self._axes > 1:  # as of images: every axis counts in its own way
            positions = torch.stack([positions // (axis + 1) for axis in range(self._axes)])
        item: dict[str, Any] = {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": loss_mask,
            "position_ids": positions,
            "attention_mask": torch.ones(1, length, length, dtype=torch.bool).triu(1),
        }
        if self._packed:
            begins = (torch.rand(length, generator=draw) < 0.2).nonzero().flatten().tolist()
            item["cu_seqlens"] = torch.tensor([0, *begins, length], dtype=torch.int32)
        mask = self._mask(at)
        if mask != CAUSAL and at % 2 and isinstance(mask, Spans):
            item["attention_mask"] = ~torch.from_numpy(seen(Masked(mask, length))).unsqueeze(0)
        elif mask != CAUSAL:
            item["mask"] = mask
        return item

    def _mask(self, at: int) -> Mask:
        return random_mask(Random(at), self._lengths[at]) if self.masked else CAUSAL

    def alone(self, at: int) -> Iterator[dict[str, Tensor]]:
        """Yield the sequences of an item as batches of one."""
        item = self[at]
        if self.masked:
            item.pop("mask", None)
            mask = Masked(self._mask(at), self._lengths[at])
            item["attention_mask"] = ~torch.from_numpy(seen(mask)).unsqueeze(0)
            item["position_ids"] = torch.from_numpy(mask.mask.position_ids(mask.length))
        ends = item.pop("cu_seqlens", torch.tensor([0, self._lengths[at]])).tolist()
        for first, end in pairwise(sorted(set(ends))):
            sequence = {name: tensor[..., first:end].unsqueeze(0) for name, tensor in item.items()}
            sequence["attention_mask"] = sequence["attention_mask"][..., first:end, :]
            sequence["position_ids"] = sequence["position_ids"] - first if self._packed else sequence["position_ids"]
            yield sequence


class ConsumedSampler:
    """Megatron's sampler: each rank's samples of one micro-batch, going on after those that were consumed."""

    def __init__(self, total: int, consumed_samples: int, rank: int, ranks: int) -> None:
        self.total_samples = total
        self.consumed_samples = consumed_samples
        self._rank = rank
        self._ranks = ranks

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.consumed_samples, self.total_samples - self._ranks + 1, self._ranks):
            yield [first + self._rank]


def data_iterator(dataset: Sequences, *, consumed: int = 0) -> Iterator[dict[str, Tensor]]:
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    return iter(DataLoader(dataset, batch_sampler=ConsumedSampler(len(dataset), consumed, rank, ranks)))


def config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
        "perform_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        "calculate_per_token_loss": True,
        "pipeline_dtype": torch.float64,
        "deallocate_pipeline_outputs": False,
    }
    if changes.get("multi_latent_attention"):  # as Megatron's command line chooses
        return MLATransformerConfig(**{**settings, **LATENT, **changes})
    return TransformerConfig(**{**settings, **changes})


class DotProductAttention(LocalAttention):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's, for heads of values of their own size, which Transformer Engine's takes and the local one does not."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # which the layer's base class also makes, without sizes
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def build(
    settings: TransformerConfig, *, rope: str = "rope", core: Any = None, hybrid: bool = False, chunk: int | None = None
) -> Any:
    """Equal weights at every call, on every rank, and however a pipeline cuts a GPTModel.

    Args:
        core: another core attention than Megatron's local one.
        hybrid: a HybridModel instead of a GPTModel; a pipeline's stages of it need the caller's weights.
        chunk: which of a stage's virtual stages; None: it has none.
    """
    if settings.pipeline_model_parallel_size == 1:
        return _build(settings, rope=rope, core=core, hybrid=hybrid)
    ends = {"ignore_virtual": False, "vp_stage": chunk}
    first, last = parallel_state.is_pipeline_first_stage(**ends), parallel_state.is_pipeline_last_stage(**ends)
    stage = _build(settings, rope=rope, core=core, hybrid=hybrid, first=first, last=last, chunk=chunk)
    if hybrid:  # which is cut by the process groups, whatever the settings
        return stage
    uncut = copy(settings)
    uncut.pipeline_model_parallel_size = 1
    uncut.virtual_pipeline_model_parallel_size = uncut.pipeline_model_parallel_layout = None
    uncut.num_layers_in_first_pipeline_stage = None
    whole = dict(_build(uncut, rope=rope, core=core, hybrid=False).named_parameters())
    with torch.no_grad():
        for name, parameter in whole_names(stage).items():
            parameter.copy_(whole[name])
    return stage


def _build(
    settings: TransformerConfig,
    *,
    rope: str,
    core: Any,
    hybrid: bool,
    first: bool = True,
    last: bool = True,
    chunk: int | None = None,
) -> Any:
    latent = settings.multi_latent_attention
    spec = get_gpt_layer_local_spec(
        num_experts=settings.num_moe_experts, qk_layernorm=settings.qk_layernorm, multi_latent_attention=latent
    )
    if latent and core is None:
        core = DotProductAttention
    if core is not None:
        spec.submodules.self_attention.submodules.core_attention = core
    if rope == "yarn":
        for name, value in YARN.items():  # what Megatron's command line puts there
            setattr(settings, name, value)
    model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    model = (_hybrid(settings, spec) if hybrid else _gpt(settings, spec, last))(
        config=settings,
        vocab_size=VOCABULARY,
        max_sequence_length=128,
        pre_process=first,
        post_process=last,
        position_embedding_type=rope,
        rotary_base=100,
        share_embeddings_and_output_weights=False,
        **({} if chunk is None else {"vp_stage": chunk}),
    )
    return model.to(settings.params_dtype)  # norms are made in fp32


def _gpt(settings: TransformerConfig, spec: Any, last: bool) -> Any:
    """A GPTModel; its last stage predicts as many further tokens as the settings say."""
    several = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False) if settings.mtp_num_layers else None
    return partial(GPTModel, transformer_layer_spec=spec, mtp_block_spec=several if last else None)


def _hybrid(settings: TransformerConfig, spec: Any) -> Any:
    """A HybridModel whose layers hold what the layers of a GPTModel hold, attention and the rest one after the other."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    parts = vars(spec.submodules)

    def layer(*names: str) -> Any:
        return ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(**{name: parts[name] for name in names})
        )

    attention = layer("input_layernorm", "self_attention", "self_attn_bda")
    rest = layer("pre_mlp_layernorm", "mlp", "mlp_bda")
    stack = ModuleSpec(
        HybridStack, submodules=HybridStackSubmodules(attention_layer=attention, mlp_layer=rest, moe_layer=rest)
    )
    pattern = ("*E" if settings.num_moe_experts else "*-") * settings.num_layers
    return partial(HybridModel, hybrid_stack_spec=stack, hybrid_layer_pattern=pattern)


def whole_names(gpt: Any) -> dict[str, Any]:
    """Parameters of a pipeline stage, and of some of the experts, by their names in the whole model."""
    first = gpt.decoder.layers[0].layer_number - 1 if len(gpt.decoder.layers) else 0
    experts = gpt.config.num_moe_experts or 0
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts // gpt.config.expert_model_parallel_size
    found = {}
    for name, parameter in gpt.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        if "local_experts" in parts:
            place = parts.index("local_experts") + 1
            parts[place] = str(int(parts[place]) + first_expert)
        found[".".join(parts)] = parameter
    return found


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    """As in Megatron's own scripts: nothing in it knows of plans."""
    batch = next(data_iterator)
    positions = batch["position_ids"]
    if positions.dim() == 3:  # [batch, axes, tokens]; Megatron wants the axes first
        positions = positions.transpose(0, 1)
    predicts_several = bool(get_model_config(model).mtp_num_layers)
    mask = {"loss_mask": batch["loss_mask"]} if predicts_several else {}
    output = model(batch["tokens"], positions, batch["attention_mask"], labels=batch["labels"], **mask)
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    loss = (output.flatten() * loss_mask.flatten()).sum()
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}
