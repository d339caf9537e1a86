"""Check that MindSpeed, its settings and its model can follow a plan; refuse, in one line, what cannot."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from types import ModuleType
from typing import Any

from fcp_cli.errors import RunError
from fcp_cli.runtime.integrations.megatron import checks as megatron

KNOWN_TO_WORK = ("2.3.0_core_r0.12.1", "26.1.0_core_r0.12.1")
_MEGATRON = "0.12."
_RING = "megatron_cp_algo"


def name() -> str:
    """Return MindSpeed's and Megatron's names with their versions."""
    try:
        version = metadata.version("mindspeed")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        version = "of a source folder"
    return f"MindSpeed {version} on megatron-core {megatron.megatron_version()}"


def _advice() -> str:
    return f"branches known to work: {', '.join(KNOWN_TO_WORK)}, on megatron-core 0.12.1"


def check_schedules(schedules: ModuleType) -> None:
    """Check the versions, and the functions that are called in `megatron.core.pipeline_parallel.schedules`.

    Raises:
        RunError: another line of MindSpeed, or changed.
    """
    if not megatron.megatron_version().startswith(_MEGATRON):
        raise RunError(f"{name()} cannot follow a plan; {_advice()}")
    _require(schedules, "get_forward_backward_func", ())
    wanted = ("forward_step_func", "data_iterator", "model", "num_microbatches", "micro_batch_size", "forward_only")
    _require(schedules, "forward_backward_no_pipelining", wanted)


def check_targets() -> None:
    """Check everything that is hooked, or relied on, in Megatron and MindSpeed.

    Raises:
        RunError: a function or an argument is missing.
    """
    from megatron.core import packed_seq_params, parallel_state
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import attention
    from mindspeed import args_utils
    from mindspeed.core.context_parallel import dot_product_attention, model_parallel_utils, utils
    from mindspeed.core.context_parallel.ring_context_parallel import ring_context_parallel

    _require(gpt_model, "GPTModel.forward", ("input_ids", "packed_seq_params"))
    _require(attention, "Attention.forward", ("rotary_pos_emb", "packed_seq_params"))
    _require(attention, "Attention._checkpointed_attention_forward", ("packed_seq_params",))
    _require(packed_seq_params, "PackedSeqParams", ("cu_seqlens_q", "cu_seqlens_kv"))
    _require(rotary_pos_embedding, "RotaryEmbedding.forward", ("max_seq_len", "packed_seq"))
    _require(rotary_pos_embedding, "RotaryEmbedding.get_rotary_seq_len", ("packed_seq_params",))
    for asked in ("group", "global_ranks", "world_size", "rank"):
        _require(parallel_state, f"get_context_parallel_{asked}", ())
    _require(parallel_state, "get_data_parallel_group", ("with_context_parallel",))
    _require(args_utils, "get_full_args", ())
    core = ("query", "key", "value", "attention_mask", "packed_seq_params")
    _require(dot_product_attention, "CPDotProductAttentionImpl.forward", core)
    for asked in ("intra_window", "inter_window_kv", "inter_window_dkv"):
        _require(model_parallel_utils, f"get_ring_ranks_for_{asked}", ())
        _require(dot_product_attention, f"get_ring_ranks_for_{asked}", ())
    ring = ("q", "k", "v", "n", "cp_para", "softmax_scale", "attn_mask", "packed_seq_params")
    _require(ring_context_parallel, "ringattn_context_parallel", ring)
    _require(utils, "RingP2P", ("ring_global_ranks", "group"))
    _require(utils, "unflatten_softmax", ("x", "sub_seq_len"))


def _require(module: ModuleType, path: str, parameters: tuple[str, ...]) -> None:
    megatron.require(module, path, parameters, found=name(), advice=_advice())


def check_config(config: Any) -> None:
    """Check the transformer's configuration, into which MindSpeed copies its own settings.

    Raises:
        RunError: it asks for something that a plan cannot follow.
    """
    for is_refused, reason in _refusals(config):
        if is_refused:
            raise RunError(reason)
    megatron.check_settings(config)


def _refusals(config: Any) -> Iterable[tuple[bool, str]]:
    def setting(key: str, default: Any = None) -> Any:
        return getattr(config, key, default)

    size = config.context_parallel_size
    yield (
        size < 2,
        f"the job has context parallel {size}, and MindSpeed puts its ring attention into the model from 2 on only; "
        "start with --context-parallel-size 2, all other ranks as data parallel (the plan makes the groups itself)",
    )
    algorithm = setting("context_parallel_algo", _RING)
    yield (
        algorithm != _RING,
        f"--context-parallel-algo {algorithm} keeps the groups that its layers were made with, which a plan cannot "
        f"change; use {_RING} (ring attention)",
    )
    mask = setting("attention_mask_type", "causal")
    yield mask != "causal", f"--attention-mask-type {mask} cannot follow a plan, which is for causal attention"
    window = setting("cp_window_size", 1)
    yield (
        window != 1,
        f"--cp-window-size {window} makes rings of rings, whose windows would have to divide every degree of the plan; "
        "leave it at 1",
    )
    yield (
        bool(setting("use_cp_send_recv_overlap")),
        "--use-cp-send-recv-overlap sends over a second communicator of the static group; leave it off",
    )
    yield (
        bool(setting("reset_attention_mask")),
        "--reset-attention-mask cuts samples into documents that the plan does not know of; leave it off, and make "
        "each document a row of the manifest, which the plan packs",
    )
    yield bool(setting("tp_2d")), "2D tensor parallelism (--tp-2d) cannot follow a plan"
    yield setting("alibi_fusion_attn_type") is not None, "ALiBi (--alibi-fusion-attn-type) cannot follow a plan"
    stages = setting("pipeline_model_parallel_size", 1)
    yield stages > 1, f"pipeline parallel {stages} has not been made to follow a plan under MindSpeed; use 1"


def check_layers(model: Any) -> None:
    """The attention layers of a GPTModel.

    Raises:
        RunError: one is not of MindSpeed's ring attention.
    """
    from mindspeed.core.context_parallel.dot_product_attention import CPDotProductAttentionImpl

    for layer in megatron.attention_layers(model):
        if not isinstance(layer.core_attention, CPDotProductAttentionImpl):
            raise RunError(
                f"the model attends with a {type(layer.core_attention).__name__}, not with MindSpeed's ring attention; "
                "import mindspeed.megatron_adaptor before the model is built"
            )
