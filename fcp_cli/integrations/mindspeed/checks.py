"""Checks that MindSpeed's version, settings and model can follow a plan; each raises a one-line RunError."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.integrations.megatron import checks as megatron

KNOWN_TO_WORK = ("2.3.0_core_r0.12.1", "26.1.0_core_r0.12.1", "core_r0.15.3", "core_r0.16.0", "core_r0.17.0")
_CONTEXT_PARALLEL = "mindspeed.core.context_parallel"
_RING = f"{_CONTEXT_PARALLEL}.ring_context_parallel"
_RING_ALGORITHM = "megatron_cp_algo"
# Algorithms with a ring; the static all-to-alls of the last two are replaced by the plan's.
_ON_RINGS = (_RING_ALGORITHM, "ulysses_cp_algo", "hybrid_cp_algo")


def name() -> str:
    """Return names and versions of MindSpeed and megatron-core, for messages."""
    try:
        version = metadata.version("mindspeed")
    except metadata.PackageNotFoundError:  # a source folder on PYTHONPATH
        version = "of a source folder"
    return f"MindSpeed {version} on megatron-core {megatron.megatron_version()}"


def _advice() -> str:
    return f"branches known to work: {', '.join(KNOWN_TO_WORK)}"


def check_schedules(schedules: ModuleType) -> None:
    """Check the signatures used in `megatron.core.pipeline_parallel.schedules`."""
    _require(schedules, "get_forward_backward_func", ())
    wanted = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")
    for function in ("forward_backward_no_pipelining", "forward_backward_pipelining_without_interleaving"):
        _require(schedules, function, wanted)


def check_targets() -> None:
    """Check the signatures hooked or used in Megatron and MindSpeed, except those of MindSpeed's ring."""
    from megatron.core import packed_seq_params, parallel_state
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import attention

    _require(gpt_model, "GPTModel.forward", ("input_ids", "packed_seq_params"))
    _require(attention, "Attention.forward", ("rotary_pos_emb", "packed_seq_params"))
    _require(attention, "Attention._checkpointed_attention_forward", ("packed_seq_params",))
    _require(packed_seq_params, "PackedSeqParams", ("qkv_format", "max_seqlen_q", "cu_seqlens_q", "cu_seqlens_kv"))
    _require(rotary_pos_embedding, "RotaryEmbedding.forward", ("max_seq_len", "packed_seq"))
    _require(rotary_pos_embedding, "RotaryEmbedding.get_rotary_seq_len", ("packed_seq_params",))
    _require(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", ())
    for asked in ("group", "global_ranks", "world_size", "rank"):
        _require(parallel_state, f"get_context_parallel_{asked}", ())
    _require(parallel_state, "get_data_parallel_group", ("with_context_parallel",))
    _require(_module("mindspeed.args_utils"), "get_full_args", ())


def why_own_ring(config: Any) -> str:
    """Return a clause that explains why fcp's ring replaces MindSpeed's; "" if it does not.

    MindSpeed's other algorithms, windows and overlapped sends fix groups or masks before the first step.
    """
    if not _has_ring():
        return ", as MindSpeed has none"
    algorithm = getattr(config, "context_parallel_algo", _RING_ALGORITHM)
    window = getattr(config, "cp_window_size", 1)
    asked = [
        f"--context-parallel-algo {algorithm}" * (algorithm not in _ON_RINGS),
        f"--cp-window-size {window}" * (window != 1),
        "--use-cp-send-recv-overlap" * bool(getattr(config, "use_cp_send_recv_overlap", False)),
    ]
    flags = " and ".join(filter(None, asked))
    return f" in place of {flags}" if flags else ""


def _has_ring() -> bool:
    try:
        return find_spec(f"{_RING}.ring_context_parallel") is not None
    except ModuleNotFoundError:
        return False


def check_ring() -> None:
    """Check the signatures used in MindSpeed's ring attention."""
    ring = ("q", "k", "v", "n", "cp_para", "softmax_scale", "attn_mask", "dropout_p", "packed_seq_params")
    _require(_module(f"{_RING}.ring_context_parallel"), "ringattn_context_parallel", ring)
    policy = ("layer_number", "cache_policy_init", "cache_interval")
    _require(_module(f"{_RING}.context_parallel_kv_cache"), "get_cache_policy", policy)
    utils = _module(f"{_CONTEXT_PARALLEL}.utils")
    _require(utils, "RingP2P", ("ring_global_ranks", "group"))
    _require(utils, "unflatten_softmax", ("x", "sub_seq_len"))


def _module(path: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise RunError(
            f"{name()} has no {path}; start with --context-parallel-size 1, where fcp's own ring attends, or use "
            f"another branch ({_advice()})"
        ) from None


def _require(module: ModuleType, path: str, parameters: tuple[str, ...]) -> None:
    megatron.require(module, path, parameters, found=name(), advice=_advice())


def check_config(config: Any) -> None:
    """Check the transformer config, into which MindSpeed copies its own settings."""
    for is_refused, reason in _refusals(config):
        if is_refused:
            raise RunError(reason)
    if getattr(config, "multi_latent_attention", False):
        raise RunError("multi-latent attention (MLA) cannot follow a plan")
    if megatron.predicts_several(config):
        raise RunError("multi-token prediction (MTP) moves tokens by MindSpeed's own groups and cannot follow a plan")
    for is_refused, reason in megatron.loss_refusals(config) if getattr(config, "num_moe_experts", None) else ():
        if is_refused:
            raise RunError(reason)
    megatron.check_settings(config)


def _refusals(config: Any) -> Iterable[tuple[bool, str]]:
    def setting(key: str, default: Any = None) -> Any:
        return getattr(config, key, default)

    mask = setting("attention_mask_type", "causal")
    yield mask != "causal", f"--attention-mask-type {mask} cannot follow a plan, which is for causal attention"
    yield (
        bool(setting("reset_attention_mask")),
        "--reset-attention-mask cuts samples into documents that the plan does not know of; leave it off, and make "
        "each document a row of the manifest, which the plan packs",
    )
    yield (
        (setting("virtual_pipeline_model_parallel_size") or 1) > 1,
        "virtual pipeline stages have not been made to follow a plan under MindSpeed; drop "
        "--num-layers-per-virtual-pipeline-stage",
    )
    yield bool(setting("tp_2d")), "2D tensor parallelism (--tp-2d) cannot follow a plan"
    yield setting("alibi_fusion_attn_type") is not None, "ALiBi (--alibi-fusion-attn-type) cannot follow a plan"


def check_layers(model: Any) -> None:
    """Check that the core attention of a GPTModel is Megatron's or MindSpeed's."""
    for layer in megatron.attention_layers(model):
        core = type(layer.core_attention)
        if core.__module__.split(".")[0] not in ("megatron", "mindspeed"):
            raise RunError(
                f"the model attends with a {core.__name__}, with no core attention of Megatron or MindSpeed; a plan "
                "cannot follow it"
            )
