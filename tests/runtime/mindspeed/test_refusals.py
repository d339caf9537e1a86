"""What MindSpeed's settings must be for a plan to be followed, and what is said where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import refuse
from fcp_cli.integrations.mindspeed import checks
from fcp_cli.integrations.mindspeed.checks import config_refusals, why_own_ring


def config(**changes: Any) -> SimpleNamespace:
    """A transformer's configuration, as far as it must be right."""
    right = {"context_parallel_size": 2, "calculate_per_token_loss": True, "attention_dropout": 0.0}
    return SimpleNamespace(**{**right, **changes})


def _check(settings: Any) -> None:
    refuse(config_refusals(settings))


def test_a_job_with_summed_losses_is_let_through() -> None:
    _check(config())
    for algorithm in ("ulysses_cp_algo", "hybrid_cp_algo"):
        _check(config(context_parallel_algo=algorithm, pipeline_model_parallel_size=2))
    _check(config(context_parallel_algo="megatron_cp_algo", attention_mask_type="causal"))


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "attention_mask_type",
            "general",
            "--attention-mask-type general cannot follow a plan, which is for causal attention",
        ),
        (
            "reset_attention_mask",
            True,
            "--reset-attention-mask cuts samples into documents that the plan does not know of; leave it off, and make "
            "each document a row of the manifest, which the plan packs",
        ),
        (
            "virtual_pipeline_model_parallel_size",
            2,
            "virtual pipeline stages have not been made to follow a plan under MindSpeed; drop "
            "--num-layers-per-virtual-pipeline-stage",
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
        _check(config(**{setting: value}))
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"context_parallel_algo": "hybrid_cp_algo"}, ""),
        ({"context_parallel_algo": "kvallgather_cp_algo"}, " in place of --context-parallel-algo kvallgather_cp_algo"),
        ({"context_parallel_algo": "adaptive_cp_algo"}, " in place of --context-parallel-algo adaptive_cp_algo"),
        (
            {"cp_window_size": 2, "use_cp_send_recv_overlap": True},
            " in place of --cp-window-size 2 and --use-cp-send-recv-overlap",
        ),
    ],
)
def test_what_mindspeeds_ring_cannot_do_under_a_plan_is_said_to_be_replaced_by_fcps(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(checks, "_has_ring", lambda: True)
    _check(config(**changes))
    assert why_own_ring(config(**changes)) == why


def test_a_mindspeed_without_a_ring_leaves_attention_to_fcps() -> None:
    assert why_own_ring(config()) == ", as MindSpeed has none"
