"""All ranks of a CUDA job use the same attention kernels, and the first lines of a run name them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from fcp_cli.cost.kernels import KernelTable, KernelTiming
from fcp_cli.cost.profile import CostProfile, dump_cost_profile, load_cost_profile, parse_cost_profile
from fcp_cli.cost.recipe import KernelName, Recipe
from fcp_cli.models.cluster import load_cluster, shipped_profile_path
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.runtime import kernel_agreement, session
from fcp_cli.runtime.kernel_agreement import agree_on_kernels, prefer_agreed_kernels
from fcp_cli.runtime.kernels import select
from fcp_cli.runtime.kernels.select import Preference
from fcp_cli.verification.emulation import ThreadWorld, run_ranks
from tests.messages import raises

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
MISSING = {"fa3": "the package flash-attn-3 is not installed", "fa4": "the package flash-attn-4 is not installed"}


@pytest.fixture
def profile() -> CostProfile:
    return load_cost_profile(shipped_profile_path("qwen3-8b"))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(kernel_agreement, "major_capability", lambda: 9)
    monkeypatch.delenv("FCP_ATTENTION_KERNEL", raising=False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")


def agreed(
    monkeypatch: pytest.MonkeyPatch,
    profile: CostProfile,
    *,
    asked: str | None = None,
    failed: dict[str, str] | None = None,
    missing: dict[str, str] = MISSING,
) -> tuple[Preference, tuple[str, ...]]:
    """Return what two ranks agree on; `failed` test calls fail on rank 1 alone."""
    if asked is not None:
        monkeypatch.setenv("FCP_ATTENTION_KERNEL", asked)
    here = threading.local()

    def of_rank(meeting: Any, rank: int) -> tuple[Preference, tuple[str, ...]]:
        here.reasons = {**missing, **((failed or {}) if rank else {})}
        return agree_on_kernels(ThreadWorld(meeting, rank), CPU, profile)

    monkeypatch.setattr(kernel_agreement, "unavailability", missing.get)
    monkeypatch.setattr(kernel_agreement, "unusable", lambda name, *_: here.reasons.get(name))
    first, second = run_ranks(2, of_rank)
    assert first[0].asked == second[0].asked
    assert first[0].excluded == second[0].excluded
    assert second[1] == tuple(f"rank 1: attention kernel {name}: {why}" for name, why in (failed or {}).items())
    return first


def test_the_first_line_names_the_kernel_and_why(monkeypatch: pytest.MonkeyPatch, profile: CostProfile) -> None:
    assert agreed(monkeypatch, profile)[1] == snapshot(
        (
            "attention kernel cudnn from 4,096 tokens of a sequence and rank on, else fa2 (Hopper: cuDNN 1.7 to 2.3 x FlashAttention 2 (transformers#48163, #48324); not measured: run 'fcp profile' here)",
        )
    )
    assert agreed(monkeypatch, profile, asked="fa2")[1] == snapshot(
        ("attention kernel fa2 (FCP_ATTENTION_KERNEL; calls that it refuses go to cudnn)",)
    )


def test_a_profile_of_another_kernel_is_named_with_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = analytic_profile(
        load_model("qwen3-8b"), load_cluster("h100-8x8"), recipe=Recipe(), sync="iteration", ranks=64
    )
    assert computed.attention_kernel == "cudnn"
    assert agreed(monkeypatch, computed)[1][1:] == snapshot(
        ("the profile's times are of cudnn; fa2 takes 1.74 x as long for attention",)
    )
    assert agreed(monkeypatch, computed, asked="fa2")[1][1:] == snapshot(
        (
            "warning: the profile's times are of cudnn, and fa2 takes 1.74 x as long for attention; run 'fcp profile' here, then 'fcp plan'",
        )
    )


def test_a_kernel_that_fails_its_test_on_one_rank_is_used_on_none(
    monkeypatch: pytest.MonkeyPatch, profile: CostProfile
) -> None:
    found = agreed(monkeypatch, profile, failed={"cudnn": "No valid execution plans built."}, asked="cudnn")
    assert found[0].excluded == {"cudnn", "fa3", "fa4"}
    assert found[1] == snapshot(
        (
            "attention kernel fa2 (Hopper: cuDNN 1.7 to 2.3 x FlashAttention 2 (transformers#48163, #48324); not measured: run 'fcp profile' here)",
            "warning: attention kernel cudnn is used on no rank: rank 1's test call failed (1 of 2 ranks)",
        )
    )


def test_what_cannot_run_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, profile: CostProfile) -> None:
    with raises(
        snapshot(
            "RunError: --attention-kernel fa3 (FCP_ATTENTION_KERNEL) cannot run here: the package flash-attn-3 is not installed; use --attention-kernel auto or cudnn or fa2"
        )
    ):
        agreed(monkeypatch, profile, asked="fa3")
    with raises(snapshot("RunError: FCP_ATTENTION_KERNEL is 'fa5'; it must be auto, cudnn, fa2, fa3, fa4")):
        agreed(monkeypatch, profile, asked="fa5")


def test_ranks_that_ask_for_different_kernels_stop(monkeypatch: pytest.MonkeyPatch, profile: CostProfile) -> None:
    class Other(ThreadWorld):
        def all_reduce_sum(self, tensor: torch.Tensor) -> None:
            super().all_reduce_sum(tensor)
            tensor[1, 0] += 1

    monkeypatch.setattr(kernel_agreement, "unusable", lambda *_: None)
    with raises(
        snapshot("RunError: FCP_ATTENTION_KERNEL differs between rank 0 and rank 1; set it alike on all nodes")
    ):
        run_ranks(2, lambda meeting, rank: agree_on_kernels(Other(meeting, rank), CPU, profile))


def table_of(device: str, kernel: KernelName | None = None) -> KernelTable:
    def timing(name: KernelName, tokens: int, seconds: float) -> KernelTiming:
        return KernelTiming(
            kernel=name, mask="causal", pack="single", tokens=tokens, forward_seconds=seconds, backward_seconds=seconds
        )

    return KernelTable(
        device=device,
        release="2.13.0",
        heads=(32, 8, 128),
        kernel=kernel,
        timings=(
            *(timing("cudnn", tokens, tokens / 1e6) for tokens in (1024, 4096, 16384)),
            *(timing("fa2", tokens, tokens * tokens / 1e9) for tokens in (512, 1024, 4096, 16384)),
        ),
    )


def test_a_measured_profile_decides_by_shape(monkeypatch: pytest.MonkeyPatch, profile: CostProfile) -> None:
    measured = replace(profile, attention_kernels=table_of("NVIDIA H100 80GB HBM3", "fa2"))
    again = parse_cost_profile(dump_cost_profile(measured), name="it")
    assert again.attention_kernels == measured.attention_kernels
    found = agreed(monkeypatch, again)
    assert found[0].table == measured.attention_kernels
    assert found[1] == snapshot(
        (
            "attention kernel cudnn (measured on NVIDIA H100 80GB HBM3, torch 2.13.0; of 4 shapes cudnn 3, fa2 1)",
            "warning: the profile's times are of fa2, and cudnn takes 0.08 x as long for attention; run 'fcp profile' here, then 'fcp plan'",
        )
    )


def test_a_table_of_another_device_decides_nothing(monkeypatch: pytest.MonkeyPatch, profile: CostProfile) -> None:
    found = agreed(monkeypatch, replace(profile, attention_kernels=table_of("NVIDIA A100-SXM4-80GB")))
    assert found[0].table is None
    empty = replace(profile, attention_kernels=replace(table_of("NVIDIA H100 80GB HBM3"), timings=()))
    assert agreed(monkeypatch, empty)[0].table is None
    assert found[1][1:] == snapshot(
        (
            "warning: the profile's kernels were measured on NVIDIA A100-SXM4-80GB, not on this device; run 'fcp profile' here",
        )
    )


def test_only_cuda_has_a_choice(
    monkeypatch: pytest.MonkeyPatch, profile: CostProfile, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata: Any = SimpleNamespace(cost_profile=profile.text)
    world: Any = SimpleNamespace(rank=0, size=1, all_reduce_sum=lambda tensor: None)
    no_profile: Any = SimpleNamespace()
    session._agree_on_kernels(world, CPU, no_profile)
    assert not select._preferences
    monkeypatch.setattr(kernel_agreement, "agree_on_kernels", lambda world, *_: (
        Preference(asked="fa2"), ("rank 1: no",) if world.rank else ("attention kernel fa2",)))  # fmt: skip
    device: Any = SimpleNamespace(type="cuda")
    session._agree_on_kernels(world, device, metadata)
    assert select._preferences[-1].asked == "fa2"
    select._preferences.clear()
    select.select_kernel.cache_clear()
    assert capsys.readouterr().err == "fcp: attention kernel fa2\n"
    world.rank = 1
    prefer_agreed_kernels(world, device, metadata)
    select._preferences.clear()
    select.select_kernel.cache_clear()
    assert capsys.readouterr().err == "fcp: rank 1: no\n"
