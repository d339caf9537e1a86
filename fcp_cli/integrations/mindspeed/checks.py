"""Requirements of a plan on MindSpeed: signatures of hooked functions, and refused settings and models."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from fcp_cli.errors import RunError
from fcp_cli.integrations import base
from fcp_cli.integrations.base import Refusals, Signatures
from fcp_cli.integrations.megatron import checks as megatron

KNOWN_TO_WORK = ("2.3.0_core_r0.12.1", "26.1.0_core_r0.12.1", "core_r0.15.3", "core_r0.16.0", "core_r0.17.0")
_ADVICE = f"branches known to work: {', '.join(KNOWN_TO_WORK)}"
_CONTEXT_PARALLEL = "mindspeed.core.context_parallel"
_RING = f"{_CONTEXT_PARALLEL}.ring_context_parallel"
_RING_ALGORITHM = "megatron_cp_algo"
# Algorithms with a ring; the static all-to-alls of the last two are replaced by the plan's.
_ON_RINGS = (_RING_ALGORITHM, "ulysses_cp_algo", "hybrid_cp_algo")

MODELS: Final[Mapping[str, Signatures]] = {
    "megatron.core.models.gpt.gpt_model": {"GPTModel.forward": ("input_ids", "packed_seq_params")},
    "megatron.core.transformer.attention": {
        "Attention.forward": ("rotary_pos_emb", "packed_seq_params"),
        "Attention._checkpointed_attention_forward": ("packed_seq_params",),
    },
    "megatron.core.packed_seq_params": {
        "PackedSeqParams": ("qkv_format", "max_seqlen_q", "cu_seqlens_q", "cu_seqlens_kv")
    },
    "megatron.core.models.common.embeddings.rotary_pos_embedding": {
        "RotaryEmbedding.forward": ("max_seq_len", "packed_seq"),
        "RotaryEmbedding.get_rotary_seq_len": ("packed_seq_params",),
        "get_pos_emb_on_this_cp_rank": (),
    },
    "megatron.core.parallel_state": {
        **{f"get_context_parallel_{asked}": () for asked in ("group", "global_ranks", "world_size", "rank")},
        "get_data_parallel_group": ("with_context_parallel",),
    },
    "mindspeed.args_utils": {"get_full_args": ()},
}
"""Classes and functions of Megatron and MindSpeed that are hooked or called in every model, by module."""
RING: Final[Mapping[str, Signatures]] = {
    f"{_RING}.ring_context_parallel": {
        "ringattn_context_parallel": (
            "q",
            "k",
            "v",
            "n",
            "cp_para",
            "softmax_scale",
            "attn_mask",
            "dropout_p",
            "packed_seq_params",
        )
    },
    f"{_RING}.context_parallel_kv_cache": {"get_cache_policy": ("layer_number", "cache_policy_init", "cache_interval")},
    f"{_CONTEXT_PARALLEL}.utils": {
        "RingP2P": ("ring_global_ranks", "group"),
        "unflatten_softmax": ("x", "sub_seq_len"),
    },
}
"""Those of MindSpeed's ring attention."""


def check_schedules(schedules: ModuleType) -> None:
    """Check the functions of `megatron.core.pipeline_parallel.schedules`; virtual stages are refused."""
    wanted = {name: found for name, found in megatron.SCHEDULES.items() if not name.endswith("_with_interleaving")}
    base.require(schedules, wanted, found=stack_name(), advice=_ADVICE)


def require(wanted: Mapping[str, Signatures]) -> None:
    """Check signatures by module, such as `MODELS`."""
    for module, signatures in wanted.items():
        base.require(_module(module), signatures, found=stack_name(), advice=_ADVICE)


def _module(path: str) -> ModuleType:
    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise RunError(
            f"{stack_name()} has no {path}; start with --context-parallel-size 1, where fcp's own ring attends, or use "
            f"another branch ({_ADVICE})"
        ) from None


def stack_name() -> str:
    """Return names and versions of MindSpeed and megatron-core, for messages."""
    try:
        version = metadata.version("mindspeed")
    except metadata.PackageNotFoundError:  # a source folder on PYTHONPATH
        version = "of a source folder"
    return f"MindSpeed {version} on megatron-core {megatron.megatron_version()}"


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


def config_refusals(config: Any) -> Refusals:
    """Yield the refusals of the transformer config, into which MindSpeed copies its own settings."""

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
    yield bool(setting("multi_latent_attention")), "multi-latent attention (MLA) cannot follow a plan"
    yield (
        megatron.predicts_several(config),
        "multi-token prediction (MTP) moves tokens by MindSpeed's own groups and cannot follow a plan",
    )
    if setting("num_moe_experts"):
        yield from megatron.router_loss_refusals(config)
    yield from megatron.settings_refusals(config)


def core_refusals(model: Any) -> Refusals:
    """Yield the refusals of a core attention that is neither Megatron's nor MindSpeed's."""
    for layer in megatron.attention_layers(model):
        core = type(layer.core_attention)
        yield (
            core.__module__.split(".")[0] not in ("megatron", "mindspeed"),
            f"the model attends with a {core.__name__}, with no core attention of Megatron or MindSpeed; a plan "
            "cannot follow it",
        )
