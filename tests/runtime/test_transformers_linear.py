"""Unmodified decoders with linear attention under a plan, on threads as ranks and on gloo ranks."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.plan.metadata import Sync
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.ring import Ring
from fcp_cli.verification.emulation import (
    Meeting,
    Replayed,
    gradients_on_rank,
    run_ranks,
    synthetic_tokens,
    thread_session,
)
from fcp_cli.verification.order import check_order
from fcp_cli.verification.recording import RecordingTransport, RecordingWorld
from tests.runtime.launch import run_worker
from tests.runtime.models import Recomputation
from tests.runtime.plans import Row, random_steps, write_plan

pytestmark = [pytest.mark.torch, pytest.mark.hf]

transformers = pytest.importorskip("transformers")

from tests.runtime.cache_argument import CACHE  # noqa: E402
from tests.runtime.linear_models import (  # noqa: E402
    MAMBA,
    InDouble,
    linear_alone,
    linear_model,
    loss_under_a_plan,
    model_under_a_plan,
)
from tests.runtime.workers.decoder_worker import CASES, ITERATION, WAVES  # noqa: E402

ROWS = (Row([0, 1, 2], [2, 75]), Row([1], [6, 3]))
_building = threading.Lock()  # weights are drawn from one random state


def require_trained_as_in_one_process(
    folder: Path, steps: list[tuple[Row, ...]], num_ranks: int, recompute: Recomputation = "off", **model: Any
) -> None:
    plan = write_plan(folder / "plan.parquet", steps, num_ranks=num_ranks)
    fetch = synthetic_tokens(plan, 61)

    def on_rank(meeting: Meeting, rank: int) -> Replayed:
        with _building:
            built = model_under_a_plan(recompute, **model)
        session = thread_session(plan, fetch, meeting, rank)
        session.transport = recorded[rank] = RecordingTransport(session.transport)
        session.world = RecordingWorld(session.world, recorded[rank])
        with InDouble():
            return gradients_on_rank(session, built, loss_under_a_plan(built))

    recorded: dict[int, RecordingTransport] = {}
    alone = linear_alone(plan, fetch, **model)
    for rank in run_ranks(num_ranks, on_rank):
        require_equal(rank, alone)
    check_order({rank: recorder.operations for rank, recorder in recorded.items()})


def require_equal(found: Replayed, alone: Replayed) -> None:
    largest = np.abs(alone.gradients).max()
    assert largest > 1e-2
    np.testing.assert_allclose(found.gradients, alone.gradients, rtol=0, atol=1e-12 * max(1.0, largest))
    np.testing.assert_allclose(found.losses, alone.losses, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("qwen3_next", "off"), ("qwen3_next", "selective"), ("bamba", "selective"), ("nemotron_h, experts", "off")],
)
def test_a_decoder_is_trained_as_in_one_process(kind: str, recompute: Recomputation, tmp_path: Path) -> None:
    require_trained_as_in_one_process(tmp_path, [ROWS], 3, recompute, kind=kind)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", *MAMBA])
def test_families_are_trained_as_in_one_process(kind: str, recompute: Recomputation, tmp_path: Path) -> None:
    require_trained_as_in_one_process(tmp_path, [ROWS], 3, recompute, kind=kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
@pytest.mark.parametrize("degree", [4, 5, 6, 7, 8])
def test_groups_of_any_degree_train_as_one_process(degree: int, kind: str, tmp_path: Path) -> None:
    rows = (Row(range(degree), [150, 11]), Row(range(0, degree, 2), [1, 80]))
    require_trained_as_in_one_process(tmp_path, [rows], degree, kind=kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "nemotron_h"])
def test_groups_that_share_heads_train_as_one_process(kind: str, tmp_path: Path) -> None:
    rows = (Row(range(4), [70, 11], heads_degree=2), Row([0, 1], [40], heads_degree=2))
    require_trained_as_in_one_process(tmp_path, [rows], 4, kind=kind)


@pytest.mark.full
@pytest.mark.processes
def test_processes_train_as_one(tmp_path: Path) -> None:
    plans: dict[str, Sync] = {ITERATION: "iteration", WAVES: "microbatch"}
    for name, sync in plans.items():
        write_plan(tmp_path / name, random_steps(4, 2, sync=sync, seed=5), num_ranks=4, sync=sync)
    found = run_worker("decoder_worker", tmp_path, "linear", num_ranks=4)
    for name, case in CASES["linear"].items():
        plan = tmp_path / case.plan
        alone = linear_alone(plan, synthetic_tokens(plan, 61), case.kind)
        assert len(found[name]) == 4
        for rank in found[name]:
            require_equal(rank, alone)


def test_what_the_hooks_stand_for_is_there() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    model_under_a_plan()
    rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)
    assert {"g", "beta", "initial_state", "output_final_state"} < set(inspect.signature(rule).parameters)
    convolution = inspect.unwrap(module.causal_conv1d_fn)
    assert list(inspect.signature(convolution).parameters)[:3] == ["hidden_states", "weight", "bias"]


def test_what_the_hooks_of_state_spaces_stand_for_is_there() -> None:
    from transformers.models.bamba import modeling_bamba as module

    model_under_a_plan(kind="bamba")
    scan = inspect.signature(inspect.unwrap(module.mamba2_chunk_scan)).parameters
    assert list(scan)[:5] == ["hidden_states", "dt", "A", "B", "C"]
    assert {"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit", "initial_states", "return_final_states"} < set(
        scan
    )
    whole: Any = module.mamba2_split_conv1d_scan_combined
    zeros, ring = torch.zeros(1, 1, 1), Ring(shard_layout((1,), 1))
    assert whole(zeros, zeros, None, zeros, zeros, zeros, 8, ring=ring) is None  # what a ring follows is called then


def test_without_a_ring_a_hooked_scan_does_what_it_did() -> None:
    from transformers.models.bamba import modeling_bamba as module

    own: Any = inspect.unwrap(module.mamba2_chunk_scan)
    x, groups = torch.rand(1, 5, 4, 8), torch.rand(1, 5, 2, 6)
    given: Any = {"chunk_size": 4, "dt_softplus": True, "return_final_states": True}
    model_under_a_plan(kind="bamba")
    for found, wanted in zip(
        module.mamba2_chunk_scan(x, x[..., 0], -torch.ones(4), groups, groups, **given),
        own(x, x[..., 0], -torch.ones(4), groups, groups, **given),
        strict=True,
    ):
        assert torch.equal(found, wanted)


def test_without_a_ring_a_hooked_layer_does_what_it_did() -> None:
    ids = torch.arange(9)[None]
    with torch.no_grad():
        model_under_a_plan()
        own = linear_model().eval()
        whole = own(input_ids=ids).logits
        begun = own(input_ids=ids[:, :6], use_cache=True)
        rest = own(input_ids=ids[:, 6:], **{CACHE: getattr(begun, CACHE)})
    torch.testing.assert_close(rest.logits, whole[:, 6:], rtol=1e-4, atol=1e-4)


def test_a_state_that_is_asked_for_under_a_plan_is_refused() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    model_under_a_plan()
    heads, gates, ring = torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2), Ring(shard_layout((3,), 1))
    asked = {"g": gates, "beta": gates, "output_final_state": True, "ring": ring}
    with pytest.raises(RunError, match="given or asked for a state"):
        module.torch_chunk_gated_delta_rule(heads, heads, heads, **asked)


@pytest.mark.parametrize("asked", [{"return_final_states": True}, {"z": torch.zeros(1, 3, 4, 8)}])
def test_what_no_plan_gives_a_state_space_is_refused(asked: dict[str, Any]) -> None:
    from transformers.models.bamba import modeling_bamba as module

    model_under_a_plan(kind="bamba")
    x, groups, decay = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 6), torch.zeros(4)
    with pytest.raises(RunError, match="a state space was given"):
        module.mamba2_chunk_scan(
            x, x[..., 0], decay, groups, groups, chunk_size=8, ring=Ring(shard_layout((3,), 1)), **asked
        )


@pytest.mark.parametrize(("kind", "layer"), [("granitemoehybrid", "mamba"), ("qwen3_next", "linear_attention")])
def test_a_model_whose_layers_on_rings_are_no_attention_is_refused_for_that(kind: str, layer: str) -> None:
    from fcp_cli.integrations.transformers import prepare

    with pytest.raises(RunError, match=f"the {kind} model has no layer of attention"):
        prepare(linear_model(kind, layer_types=[layer] * 2))


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba"])
def test_weights_that_are_still_to_come_are_judged_by_a_small_model(kind: str) -> None:
    from fcp_cli.integrations.transformers import prepare

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(linear_model(kind).config)
    prepare(model)
