"""What MindSpeed's settings must be for a plan to be followed, and what is said where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.runtime.integrations.mindspeed.checks import check_config


def config(**changes: Any) -> SimpleNamespace:
    """A transformer's configuration, as far as it must be right."""
    right = {"context_parallel_size": 2, "calculate_per_token_loss": True, "attention_dropout": 0.0}
    return SimpleNamespace(**{**right, **changes})


def test_a_job_with_summed_losses_is_let_through() -> None:
    check_config(config())
    check_config(config(context_parallel_size=1, context_parallel_algo="kvallgather_cp_algo"))
    for algorithm in ("ulysses_cp_algo", "hybrid_cp_algo"):
        check_config(config(context_parallel_algo=algorithm, pipeline_model_parallel_size=2))
    check_config(config(context_parallel_algo="megatron_cp_algo", attention_mask_type="causal", cp_window_size=1))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "context_parallel_algo",
            "kvallgather_cp_algo",
            "--context-parallel-algo kvallgather_cp_algo attends over groups and masks that were made before the first "
            "step, which a plan cannot change; use megatron_cp_algo (the plan says how many ranks share heads)",
        ),
        (
            "attention_mask_type",
            "general",
            "--attention-mask-type general cannot follow a plan, which is for causal attention",
        ),
        (
            "cp_window_size",
            2,
            "--cp-window-size 2 makes rings of rings, whose windows would have to divide every ring of the plan; "
            "leave it at 1",
        ),
        (
            "use_cp_send_recv_overlap",
            True,
            "--use-cp-send-recv-overlap sends over a second communicator of the static group; leave it off",
        ),
        (
            "reset_attention_mask",
            True,
            "--reset-attention-mask cuts samples into documents that the plan does not know of; leave it off, and make "
            "each document a row of the manifest, which the plan packs",
        ),
        ("tp_2d", True, "2D tensor parallelism (--tp-2d) cannot follow a plan"),
        ("alibi_fusion_attn_type", 2, "ALiBi (--alibi-fusion-attn-type) cannot follow a plan"),
        (
            "calculate_per_token_loss",
            False,
            "the loss is averaged per micro-batch, which weighs tokens by how the plan packs them; add "
            "--calculate-per-token-loss (TransformerConfig.calculate_per_token_loss)",
        ),
        ("multi_latent_attention", True, "multi-latent attention (MLA) cannot follow a plan"),
    ],
)
def test_a_setting_that_a_plan_cannot_follow_is_refused_with_one_line(setting: str, value: Any, message: str) -> None:
    with pytest.raises(RunError) as refused:
        check_config(config(**{setting: value}))
    assert str(refused.value) == message
