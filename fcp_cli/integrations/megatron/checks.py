"""Checks that Megatron's version, configuration and model can follow a plan; each raises a one-line RunError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations import base

KNOWN_TO_WORK = ("0.16.1", "0.19.2")
_OLDEST = (0, 16, 1)
_MEGATRON_FSDP = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
# Layers of hybrid models that carry a state from token to token.
_WITH_STATE = ("MambaMixer", "GatedDeltaNet")


def check_schedules(schedules: ModuleType) -> None:
    """Check Megatron's version, and the signatures used in `megatron.core.pipeline_parallel.schedules`."""
    found = megatron_version()
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdecimal())
    if numbers < _OLDEST:
        raise RunError(f"megatron-core {found} cannot follow a plan; {_advice()}")
    require(schedules, "get_forward_backward_func", ())
    wanted = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")
    for name in SCHEDULES:
        require(schedules, name, wanted)


def check_model_classes() -> None:
    """Check the signatures of the classes and methods that are hooked in models."""
    from megatron.core import packed_seq_params, parallel_state
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import attention, multi_latent_attention

    require(gpt_model, "GPTModel.forward", ("input_ids", "packed_seq_params"))
    require(attention, "Attention.forward", ("rotary_pos_emb", "packed_seq_params"))
    made = ("hidden_states", "key_value_states", "position_ids", "packed_seq_params")
    require(multi_latent_attention, "MLASelfAttention.get_query_key_value_tensors", made)
    require(
        packed_seq_params,
        "PackedSeqParams",
        ("qkv_format", "max_seqlen_q", "cu_seqlens_q", "cp_group", "local_cp_size"),
    )
    require(rotary_pos_embedding, "RotaryEmbedding.get_rotary_seq_len", ("packed_seq_params",))
    require(parallel_state, "get_data_parallel_group", ("with_context_parallel",))


def require(
    module: ModuleType, path: str, parameters: Sequence[str], *, found: str | None = None, advice: str | None = None
) -> None:
    """Raise RunError unless `path` (a name, or Class.method) is in the module and takes these parameters.

    Args:
        found: package of the module, with its version; megatron-core by default.
        advice: versions known to work.
    """
    known = found or f"megatron-core {megatron_version()}"
    base.require(module, path, parameters, found=known, advice=advice or _advice())


def megatron_version() -> str:
    """Return the version of the megatron-core that is imported."""
    from megatron.core import package_info

    return str(package_info.__version__)


def _advice() -> str:
    return f"versions known to work: {', '.join(KNOWN_TO_WORK)}; pip install megatron-core=={KNOWN_TO_WORK[-1]}"


def check_chunks(model: Any) -> list[Any]:
    """Return the model chunks passed to the schedule, one per virtual stage; raise RunError for foreign FSDP."""
    chunks = list(model) if isinstance(model, list) else [model]
    sharding = next(filter(None, (None if is_sharded(chunk) else _fsdp_class(chunk) for chunk in chunks)), None)
    if sharding is not None:
        raise RunError(
            f"the model is sharded with FSDP ({sharding}), which has not been made to work under Megatron; use "
            "Megatron-FSDP (--use-megatron-fsdp), or DistributedDataParallel with the distributed optimizer"
        )
    return chunks


def check_interleaving(config: Any, chunks: int, planned: int, *, stages: int, is_sharded: bool = False) -> None:
    """Check virtual stages: their number as planned, no untried feature, and a supported schedule.

    Args:
        config: configuration of the first model chunk, which the schedule reads.
        chunks: virtual stages of the job.
        planned: virtual stages of the plan.
        stages: pipeline stages.
        is_sharded: whether the model is sharded with Megatron-FSDP.
    """
    if chunks != planned:
        raise RunError(
            f"the model has {chunks} virtual pipeline {'stage' if chunks == 1 else 'stages'}, but the plan was made "
            f"for {planned}; plan with --virtual-stages {chunks}, or build the model with the plan's"
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
        if is_asked:
            raise RunError(
                f"{feature} virtual stages has not been made to follow a plan; drop {option} or the virtual stages"
            )
    together = config.microbatch_group_size_per_vp_stage
    if together != stages:
        raise RunError(
            f"{together} micro-batches pass a virtual stage together, but a plan is made for as many as there are "
            f"stages ({stages}); drop --microbatch-group-size-per-virtual-pipeline-stage"
        )
    if not config.overlap_p2p_comm:
        raise RunError(
            "stages of virtual stages that exchange both directions in one batch wait for each other's lengths in a "
            "circle in short steps; set overlap_p2p_comm and unset batch_p2p_comm (drop "
            "--no-overlap-p2p-communication)"
        )


def is_sharded(chunk: Any) -> bool:
    """Return whether a model is sharded with Megatron-FSDP."""
    return any(kind.__module__ == _MEGATRON_FSDP for kind in type(chunk).__mro__)


def _fsdp_class(chunk: Any) -> str | None:
    """Return the name of a model's FSDP class (wrapper or module mixin, PyTorch's or Megatron's), or None."""
    kinds = (kind.__name__ for module in chunk.modules() for kind in type(module).__mro__)
    return next((name for name in kinds if "fsdp" in name.lower() or "FullyShardedDataParallel" in name), None)


def check_config(config: Any) -> None:
    """Check the transformer's configuration."""
    hybrid = bool(getattr(config, "hybrid_context_parallel", False))
    if config.context_parallel_size != 1 or hybrid:
        raise RunError(
            f"the job has context parallel {config.context_parallel_size}{' (hybrid)' if hybrid else ''}; a plan makes "
            "the groups itself: start with --context-parallel-size 1, all other ranks as data parallel"
        )
    check_settings(config)


def check_settings(config: Any) -> None:
    """Check the configuration except for context parallelism, which differs under MindSpeed."""
    for is_refused, reason in _refusals(config):
        if is_refused:
            raise RunError(reason)


def _refusals(config: Any) -> Iterable[tuple[bool, str]]:
    """Yield (is refused, message) for each setting; settings missing in a version count as off."""

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
        yield from _moe_refusals(setting)
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


def _moe_refusals(setting: Callable[[str], Any]) -> Iterable[tuple[bool, str]]:
    """Yield (is refused, message) for MoE settings with which a token's experts or loss depend on the packing."""
    losses = _balancing_losses(setting)
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


def loss_refusals(config: Any) -> Iterable[tuple[bool, str]]:
    """Yield (is refused, message) for each router loss, for stacks whose routers are not hooked."""
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

    def setting(name: str) -> Any:
        return getattr(config, name, None)

    return bool(setting("num_moe_experts") and (_balancing_losses(setting) or setting("moe_z_loss_coeff")))


def _balancing_losses(setting: Callable[[str], Any]) -> list[str]:
    """Return the names of the balancing losses whose coefficient is not 0."""
    names, coefficients = setting("moe_router_load_balancing_type"), setting("moe_aux_loss_coeff")
    if not isinstance(names, list):
        names, coefficients = [names], [coefficients]
    return [str(name) for name, coefficient in zip(names, coefficients, strict=True) if coefficient]


def check_routers() -> None:
    """Check the signatures of the methods that are hooked in routers with losses."""
    from megatron.core.transformer.moe import router

    counted = ("probs", "scores_for_aux_loss", "routing_map")
    for name in ("_apply_aux_loss", "_apply_seq_aux_loss"):
        require(router, f"TopKRouter.{name}", counted)
    require(router, "TopKRouter.apply_z_loss", ("logits",))
    require(router, "MoEAuxLossAutoScaler.apply", ())


def check_layers(model: Any) -> None:
    """Check that the attention layers of a language model have a supported core attention."""
    for layer in attention_layers(model):
        core = type(layer.core_attention).__name__
        if core not in ("DotProductAttention", "TEDotProductAttention"):
            raise RunError(f"the model attends with {core}, not DotProductAttention or TEDotProductAttention")


def attention_layers(model: Any) -> list[Any]:
    """Return the attention layers of a language model or pipeline stage; raise RunError for unsupported ones."""
    from megatron.core.transformer.attention import Attention, SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    for module in model.modules():
        if type(module).__name__ in _WITH_STATE:
            raise RunError(
                f"the model has a {type(module).__name__}, whose state would have to pass along the ring; a plan "
                "cannot follow it"
            )
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    stages = getattr(getattr(model, "config", None), "pipeline_model_parallel_size", 1)
    if not layers and stages == 1:
        raise RunError("the model has no attention layer that a plan can drive")
    for layer in layers:
        if type(layer).forward not in (SelfAttention.forward, MultiLatentAttention.forward):
            raise RunError(f"the model has a {type(layer).__name__}, whose forward is its own; a plan cannot follow it")
        if layer.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise RunError(f"the model attends with a {layer.attn_mask_type.name} mask; a plan is for causal attention")
    return layers


def check_waves(
    pipeline_parallel: int, expert_parallel: int, sync: str, *, times_pipelines: bool = False, sharded: bool = False
) -> None:
    """Raise RunError if ranks must run equally many micro-batches, but the plan's sync is not `microbatch`.

    Args:
        pipeline_parallel, expert_parallel: parallel sizes of the job.
        sync: sync of the plan.
        times_pipelines: whether the plan prices pipeline stages, in which case pipelines need no equal counts.
        sharded: whether all ranks gather parameters in every layer.
    """
    if sharded and sync != "microbatch":
        raise RunError(
            "the model is sharded with Megatron-FSDP, whose ranks must run equally many micro-batches, but the plan "
            f"has sync {sync}; plan with 'fcp plan --sync microbatch'"
        )
    for kind, size in (("pipeline", 1 if times_pipelines else pipeline_parallel), ("expert", expert_parallel)):
        if size > 1 and sync != "microbatch":
            raise RunError(
                f"the job has {kind} parallel {size}, whose ranks must run equally many micro-batches, but the plan "
                f"has sync {sync}; plan with 'fcp plan --sync microbatch'"
            )
