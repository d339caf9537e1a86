"""Requirements of a plan on Megatron: signatures of hooked functions, and refused settings, models and schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from fcp_cli.errors import RunError
from fcp_cli.integrations import base
from fcp_cli.integrations.base import Refusals, Signatures

KNOWN_TO_WORK = ("0.16.1", "0.19.2")
_OLDEST = (0, 16, 1)
_MEGATRON_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
# Layers of hybrid models that carry a state from token to token.
_WITH_STATE = ("MambaMixer", "GatedDeltaNet")
_SCHEDULE = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")
_COUNTED = ("probs", "scores_for_aux_loss", "routing_map")

SCHEDULES: Final[Signatures] = {
    "get_forward_backward_func": (),
    "forward_backward_no_pipelining": _SCHEDULE,
    "forward_backward_pipelining_without_interleaving": _SCHEDULE,
    "forward_backward_pipelining_with_interleaving": _SCHEDULE,
}
"""Functions of `megatron.core.pipeline_parallel.schedules`."""
MODELS: Final[Mapping[str, Signatures]] = {
    "megatron.core.models.gpt.gpt_model": {"GPTModel.forward": ("input_ids", "packed_seq_params")},
    "megatron.core.transformer.attention": {"Attention.forward": ("rotary_pos_emb", "packed_seq_params")},
    "megatron.core.transformer.multi_latent_attention": {
        "MLASelfAttention.get_query_key_value_tensors": (
            "hidden_states",
            "key_value_states",
            "position_ids",
            "packed_seq_params",
        )
    },
    "megatron.core.packed_seq_params": {
        "PackedSeqParams": ("qkv_format", "max_seqlen_q", "cu_seqlens_q", "cp_group", "local_cp_size")
    },
    "megatron.core.models.common.embeddings.rotary_pos_embedding": {
        "RotaryEmbedding.get_rotary_seq_len": ("packed_seq_params",)
    },
    "megatron.core.parallel_state": {"get_data_parallel_group": ("with_context_parallel",)},
}
"""Classes and functions that are hooked or called in every model, by module."""
ROUTERS: Final[Mapping[str, Signatures]] = {
    "megatron.core.transformer.moe.router": {
        "TopKRouter._apply_aux_loss": _COUNTED,
        "TopKRouter._apply_seq_aux_loss": _COUNTED,
        "TopKRouter.apply_z_loss": ("logits",),
        "MoEAuxLossAutoScaler.apply": (),
    }
}
"""Those of routers with a loss."""


def check_schedules(schedules: ModuleType) -> None:
    """Check Megatron's version and `SCHEDULES`."""
    found = megatron_version()
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdecimal())
    if numbers < _OLDEST:
        raise RunError(f"megatron-core {found} cannot follow a plan; {_advice()}")
    base.require(schedules, SCHEDULES, found=f"megatron-core {found}", advice=_advice())


def require(wanted: Mapping[str, Signatures]) -> None:
    """Check signatures by module, such as `MODELS`."""
    for module, signatures in wanted.items():
        base.require(import_module(module), signatures, found=f"megatron-core {megatron_version()}", advice=_advice())


def megatron_version() -> str:
    """Return the version of the megatron-core that is imported."""
    from megatron.core import package_info

    return str(package_info.__version__)


def _advice() -> str:
    return base.advice("megatron-core", KNOWN_TO_WORK)


def config_refusals(config: Any) -> Refusals:
    """Yield the refusals of a transformer's configuration."""
    hybrid = bool(getattr(config, "hybrid_context_parallel", False))
    yield (
        config.context_parallel_size != 1 or hybrid,
        f"the job has context parallel {config.context_parallel_size}{' (hybrid)' if hybrid else ''}; a plan makes "
        "the groups itself: start with --context-parallel-size 1, all other ranks as data parallel",
    )
    yield from settings_refusals(config)


def settings_refusals(config: Any) -> Refusals:
    """Yield those except for context parallelism, which differs under MindSpeed; missing settings count as off."""

    def setting(name: str) -> Any:
        return getattr(config, name, None)

    yield (
        not config.calculate_per_token_loss,
        "the loss is averaged per micro-batch, which weighs tokens by how the plan packs them; add "
        "--calculate-per-token-loss (TransformerConfig.calculate_per_token_loss)",
    )
    yield (
        bool(config.attention_dropout),
        f"attention dropout is {config.attention_dropout}, which a ring cannot repeat; add --attention-dropout 0",
    )
    yield (
        bool(setting("multi_latent_attention") and setting("apply_rope_fusion")),
        "multi-latent attention (MLA) with fused rotary embeddings rotates by its own idea of who holds which tokens; "
        "add --no-rope-fusion (TransformerConfig.apply_rope_fusion)",
    )
    if setting("num_moe_experts"):
        yield from _expert_refusals(config, setting)
    variant = setting("experimental_attention_variant")
    yield variant is not None, f"the attention variant {variant} cannot follow a plan"
    yield (
        setting("cuda_graph_impl") not in (None, "none") or bool(setting("enable_cuda_graph")),
        "CUDA graphs need the same shapes in every micro-batch, which a plan does not have; leave them off",
    )
    window = setting("window_size")
    yield window is not None, f"sliding-window attention ({window}) cannot follow a plan"
    softmax = setting("softmax_type")
    yield softmax not in (None, "vanilla"), f"the softmax type {softmax} cannot follow a plan; only vanilla can"
    yield bool(setting("qk_clip")), "QK clipping needs the scores of an attention that a plan replaces; leave it off"
    yield bool(setting("fp8") or setting("fp4")), "FP8 and FP4 have not been tried under a plan; train in bf16"


def _expert_refusals(config: Any, setting: Callable[[str], Any]) -> Refusals:
    """Yield the refusals of MoE settings with which a token's experts or loss depend on the packing."""
    losses = _balancing_losses(config)
    yield (
        "global_aux_loss" in losses,
        "the router's global auxiliary loss weighs experts by the mean of the step's micro-batches up to its own, on "
        "all ranks, and so by the plan's order; set --moe-router-load-balancing-type seq_aux_loss or aux_loss",
    )
    has_loss = bool(losses or setting("moe_z_loss_coeff"))
    yield (
        has_loss and setting("recompute_granularity") == "selective" and "moe" in (setting("recompute_modules") or ()),
        "a router with a loss is computed again without the rest of its layer, where its micro-batch is not known; "
        "drop moe from --recompute-modules",
    )
    yield (
        has_loss and bool(setting("mtp_use_repeated_layer")),
        "a layer of multi-token prediction (MTP) that is repeated counts its router's loss once per repetition, which "
        "has not been tried under a plan; drop --mtp-use-repeated-layer",
    )
    yield (
        setting("moe_expert_capacity_factor") is not None,
        "experts of limited capacity drop tokens by the rest of the micro-batch, which the plan chooses; drop "
        "--moe-expert-capacity-factor",
    )
    yield (
        setting("moe_router_load_balancing_type") == "sinkhorn",
        "sinkhorn routing depends on the rest of the micro-batch, which the plan chooses; set "
        "--moe-router-load-balancing-type none",
    )
    is_random = setting("moe_input_jitter_eps") is not None or bool(setting("moe_router_force_load_balancing"))
    yield (
        is_random,
        "experts are routed to at random, which no plan repeats; drop input jitter and forced balancing",
    )
    yield (
        bool(setting("moe_enable_routing_replay")),
        "routing replay gives each token the experts of the one that lay at its place, and a plan lays tokens "
        "otherwise; drop --moe-enable-routing-replay",
    )
    yield (
        bool(setting("overlap_moe_expert_parallel_comm")),
        "overlapped expert communication runs forwards and backwards by another schedule, which is not hooked; drop "
        "--overlap-moe-expert-parallel-comm",
    )
    dispatcher = setting("moe_token_dispatcher_type")
    yield (
        dispatcher == "flex",
        "the token dispatcher flex, which needs DeepEP or HybridEP, has not been tried under a plan; set "
        "--moe-token-dispatcher-type alltoall",
    )
    yield (
        (setting("expert_model_parallel_size") or 1) > 1 and dispatcher == "allgather",
        "expert parallel with the token dispatcher allgather needs equally many tokens on all ranks; set "
        "--moe-token-dispatcher-type alltoall",
    )


def router_loss_refusals(config: Any) -> Refusals:
    """Yield the refusals of router losses, for stacks whose routers are not hooked."""
    coefficients, of_logits = (getattr(config, name, None) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))
    yield (
        any(coefficients) if isinstance(coefficients, list) else bool(coefficients),
        f"the router's auxiliary loss (coefficient {coefficients}) is made of one rank's tokens of a micro-batch, "
        "which the plan chooses; set --moe-aux-loss-coeff 0 and balance with --moe-router-enable-expert-bias",
    )
    yield (
        bool(of_logits),
        f"the router's z-loss (coefficient {of_logits}) counts padding, too; drop --moe-z-loss-coeff",
    )


def predicts_several(config: Any) -> bool:
    """Return whether the model predicts more than the next token (MTP)."""
    return bool(getattr(config, "mtp_num_layers", None))


def balances_experts(config: Any) -> bool:
    """Return whether routers have a balancing loss or a z-loss."""
    has_experts = bool(getattr(config, "num_moe_experts", None))
    return has_experts and bool(_balancing_losses(config) or getattr(config, "moe_z_loss_coeff", None))


def _balancing_losses(config: Any) -> list[str]:
    """Return the names of the balancing losses whose coefficient is not 0."""
    names: Any = getattr(config, "moe_router_load_balancing_type", None)
    coefficients: Any = getattr(config, "moe_aux_loss_coeff", None)
    if not isinstance(names, list):
        names, coefficients = [names], [coefficients]
    return [str(name) for name, coefficient in zip(names, coefficients, strict=True) if coefficient]


def layer_refusals(model: Any) -> Refusals:
    """Yield the refusals of a language model or pipeline stage, except for those of its core attention."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    for module in model.modules():
        name = type(module).__name__
        yield (
            name in _WITH_STATE,
            f"the model has a {name}, whose state would have to pass along the ring; a plan cannot follow it",
        )
    layers = attention_layers(model)
    stages = getattr(getattr(model, "config", None), "pipeline_model_parallel_size", 1)
    yield not layers and stages == 1, "the model has no attention layer that a plan can drive"
    for layer in layers:
        yield (
            type(layer).forward not in (SelfAttention.forward, MultiLatentAttention.forward),
            f"the model has a {type(layer).__name__}, whose forward is its own; a plan cannot follow it",
        )
        yield (
            layer.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal),
            f"the model attends with a {layer.attn_mask_type.name} mask; a plan is for causal attention",
        )


def core_refusals(model: Any) -> Refusals:
    """Yield the refusals of a language model's core attention."""
    for layer in attention_layers(model):
        core = type(layer.core_attention).__name__
        yield (
            core not in ("DotProductAttention", "TEDotProductAttention"),
            f"the model attends with {core}, not DotProductAttention or TEDotProductAttention",
        )


def attention_layers(model: Any) -> list[Any]:
    """Return the attention layers of a language model or pipeline stage."""
    from megatron.core.transformer.attention import Attention

    return [module for module in model.modules() if isinstance(module, Attention)]


def is_sharded(chunk: Any) -> bool:
    """Return whether a model is sharded with Megatron-FSDP."""
    return any(kind.__module__ == _MEGATRON_FSDP for kind in type(chunk).__mro__)


def sharding_refusals(chunks: list[Any]) -> Refusals:
    """Yield the refusals of model chunks sharded with another FSDP: a wrapper or a mixin of modules."""
    for chunk in chunks:
        kinds = (kind.__name__ for module in chunk.modules() for kind in type(module).__mro__)
        sharding = next((name for name in kinds if "fsdp" in name.lower() or "FullyShardedDataParallel" in name), None)
        yield (
            sharding is not None and not is_sharded(chunk),
            f"the model is sharded with FSDP ({sharding}), which has not been made to work under Megatron; use "
            "Megatron-FSDP (--use-megatron-fsdp), or DistributedDataParallel with the distributed optimizer",
        )


def interleaving_refusals(config: Any, chunks: int, planned: int, *, stages: int, is_sharded: bool = False) -> Refusals:
    """Yield the refusals of virtual stages: another number than planned, untried features, unsupported schedules.

    Args:
        config: configuration of the first model chunk, which the schedule reads.
        chunks: virtual stages of the job.
        planned: virtual stages of the plan.
        stages: pipeline stages.
        is_sharded: whether the model is sharded with Megatron-FSDP.
    """
    yield (
        chunks != planned,
        f"the model has {chunks} virtual pipeline {'stage' if chunks == 1 else 'stages'}, but the plan was made "
        f"for {planned}; plan with --virtual-stages {chunks}, or build the model with the plan's",
    )
    if chunks == 1:
        return
    untried = (
        (predicts_several(config), "multi-token prediction in", "--mtp-num-layers"),
        (is_sharded, "Megatron-FSDP with", "--use-megatron-fsdp"),
        (balances_experts(config), "a router with a loss in", "--moe-aux-loss-coeff, --moe-z-loss-coeff"),
        (config.expert_model_parallel_size > 1, "expert parallelism in", "--expert-model-parallel-size"),
    )
    for is_asked, feature, option in untried:
        yield (
            is_asked,
            f"{feature} virtual stages has not been made to follow a plan; drop {option} or the virtual stages",
        )
    together = config.microbatch_group_size_per_vp_stage
    yield (
        together != stages,
        f"{together} micro-batches pass a virtual stage together, but a plan is made for as many as there are "
        f"stages ({stages}); drop --microbatch-group-size-per-virtual-pipeline-stage",
    )
    yield (
        not config.overlap_p2p_comm,
        "stages of virtual stages that exchange both directions in one batch wait for each other's lengths in a "
        "circle in short steps; set overlap_p2p_comm and unset batch_p2p_comm (drop "
        "--no-overlap-p2p-communication)",
    )


def wave_refusals(
    pipeline_parallel: int, expert_parallel: int, sync: str, *, times_pipelines: bool = False, sharded: bool = False
) -> Refusals:
    """Yield the refusals of jobs whose ranks must run equally many micro-batches, unless the plan's sync says so.

    Args:
        pipeline_parallel, expert_parallel: parallel sizes of the job.
        sync: sync of the plan.
        times_pipelines: whether the plan prices pipeline stages, in which case pipelines need no equal counts.
        sharded: whether all ranks gather parameters in every layer.
    """
    kinds = (
        (sharded, "the model is sharded with Megatron-FSDP"),
        (pipeline_parallel > 1 and not times_pipelines, f"the job has pipeline parallel {pipeline_parallel}"),
        (expert_parallel > 1, f"the job has expert parallel {expert_parallel}"),
    )
    for needs_waves, job in kinds:
        yield (
            needs_waves and sync != "microbatch",
            f"{job}, whose ranks must run equally many micro-batches, but the plan has sync {sync}; plan with 'fcp "
            "plan --sync microbatch'",
        )
