"""Single checks of `fcp selftest`, without processes: what they compare, and that they can fail."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    """One CPU rank alone."""

    def gather(values: Sequence[float]) -> list[list[float]]:
        return [list(values)]

    return SimpleNamespace(
        settings=SimpleNamespace(quick=True, folder=tmp_path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        sharers=1,
        world=SimpleNamespace(rank=0, size=1),
        gather=gather,
        begin=lambda what: None,
        kernels=(None,),
        unavailable={},
        running=lambda kernel: nullcontext(),
    )


def test_the_formula_in_fp64_is_what_pytorch_computes_sequence_by_sequence() -> None:
    from fcp_cli.verification.checks import Case, draw, exact

    case = Case(heads=4, kv_heads=2, head_size=8, lengths=(5, 1, 9))
    drawn = draw(case, torch.float64, torch.device("cpu"))
    q, k, v = (tensor.requires_grad_() for tensor in drawn[:3])
    pieces = [
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        for parts in zip(*(torch.split(tensor, list(case.lengths), dim=2) for tensor in (q, k, v)), strict=True)
    ]
    out = torch.cat(pieces, dim=2)
    wanted = (out, *torch.autograd.grad(out, (q, k, v), drawn.dout))
    for found, expected in zip(exact(case, drawn), wanted, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)


def test_messages_of_several_nodes_come_with_their_channels(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.verification import checks

    monkeypatch.setattr(checks, "Messenger", lambda *_: None)
    monkeypatch.setattr(checks, "fresh_links", lambda *_: [])
    monkeypatch.setattr(checks, "links", lambda *_: [])
    bench.transport = bench.stopwatch = None
    bench.device, bench.ranks_per_node = torch.device("cuda"), 8

    def told(size: int) -> str:
        bench.world.size = size
        return checks.check_links(bench).lines[0]

    monkeypatch.setenv("NCCL_NCHANNELS_PER_NET_PEER", "8")
    assert told(16) == "channels per peer: 8, by NCCL_NCHANNELS_PER_NET_PEER"
    monkeypatch.delenv("NCCL_NCHANNELS_PER_NET_PEER")
    assert told(16).startswith("channels per peer: NCCL's choice, 1 to 4")
    assert "channels" not in told(8)


@pytest.mark.parametrize(("longer", "passed"), [(0.0, True), (0.2, True), (0.9, False)])
def test_an_overlap_that_hides_nothing_fails_and_names_what_holds_messages_up(
    longer: float, passed: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.profiling.workload import SilentTransport
    from fcp_cli.verification import checks

    def seconds(_: Any, degree: int, transport: Any) -> tuple[float, float]:
        return (1.0 if isinstance(transport, SilentTransport) else 1.0 + longer), 2.0

    monkeypatch.setattr(checks, "_seconds", seconds)
    monkeypatch.setattr(checks, "_message_seconds", lambda *_: 1.0)
    bench.transport, bench.degrees = object(), [2]
    assert checks.check_overlap(bench).passed is None, "no bound on a CPU"
    bench.device = torch.device("cuda")
    finding = checks.check_overlap(bench)
    assert finding.passed is passed
    assert any("FlashAttention 3" in line for line in finding.lines) is not passed


def test_the_kernel_of_this_machine_passes(bench: Any) -> None:
    from fcp_cli.verification import checks

    finding = checks.check_kernel(bench)
    assert finding.passed
    names = " ".join(finding.figures["relative_error_by_case"])
    assert "length 1" in names and "500 sequences" in names and "heads of 256" in names


def test_every_kernel_of_a_device_is_compared(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.runtime import ring_passes
    from fcp_cli.runtime.kernels import select
    from fcp_cli.runtime.kernels.available import kernels_of
    from fcp_cli.runtime.kernels.select import ChosenKernel
    from fcp_cli.verification import checks
    from fcp_cli.verification.checks import Bench
    from tests.runtime.fake_cuda import FakeCudnn, FakeFlash, registered

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(ring_passes, "select_kernel", lambda *_: ChosenKernel(select._preferences[-1]))
    bench.unavailable = {}
    bench.running = lambda name: Bench.running(bench, name)
    fake, flash = FakeCudnn(), FakeFlash()
    kernels_of.cache_clear()
    with registered(flash, fake):
        Bench._find_kernels(bench)
        assert bench.kernels == ("cudnn", "fa2")
        fake.calls.clear()
        finding = checks.check_kernel(bench)
    kernels_of.cache_clear()
    assert finding.passed and {"dense forward", "dense backward"} <= set(fake.calls) and flash.calls
    first, *others = finding.lines
    assert first.startswith("12 cases on cudnn, fa2 against fp64")
    assert others == [
        "not fa3: the package flash-attn-3 is not installed",
        "not fa4: the package flash-attn-4 is not installed",
    ]

    fake.shares_heads = False  # as a release that has no plan for grouped heads
    with registered(FakeFlash(), fake):
        Bench._find_kernels(bench)
    kernels_of.cache_clear()
    assert bench.kernels == ("fa2",)
    assert bench.unavailable["cudnn"] == "cuDNN Frontend error: No valid execution plans built."


def test_ranks_on_the_same_cores_take_a_case_each(bench: Any) -> None:
    from fcp_cli.verification import checks

    bench.sharers = 3
    others = [0.25, 0.5]  # what ranks 1 and 2 find, whatever the case

    def gather(values: Sequence[float]) -> list[list[float]]:
        assert not any(values[1:]), "this rank computes the first case of each round only"
        return [
            list(values),
            *([0.0] * i + [other] + [0.0] * (len(values) - i - 1) for i, other in enumerate(others, 1)),
        ]

    bench.gather = gather
    finding = checks.check_kernel(bench)
    first, second, third, *_ = finding.figures["relative_error_by_case"].values()
    assert 0.0 < first < 1e-5
    assert [second, third] == others
    assert finding.passed is False, "what another rank found counts"


def test_a_kernel_that_is_a_little_wrong_fails(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.runtime.ring_attention import attention
    from fcp_cli.verification import checks

    monkeypatch.setattr(checks, "attention", lambda *tensors, ring: attention(*tensors, ring=ring) * (1 + 1e-4))
    assert checks.check_kernel(bench).passed is False


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_steps_that_could_hang_end_with_a_ring_for_some_of_its_members_only(ranks: int) -> None:
    from fcp_cli.verification.step_ends import rows_of_step

    ends_apart = []
    for number in range(2):
        rows = rows_of_step(ranks, number, "iteration")
        last = {rank: row for row in rows for rank in row.ranks}
        rings = [row for row in rows if len(row.ranks) > 1]
        ends_apart += [len({last[rank] is ring for rank in ring.ranks}) == 2 for ring in rings]
        waves = rows_of_step(ranks, number, "microbatch")
        for wave in {row.wave for row in waves}:
            assert sorted(rank for row in waves if row.wave == wave for rank in row.ranks) == list(range(ranks))
        packs = [{(row.sequences, row.lengths) for row in planned if row.lengths} for planned in (rows, waves)]
        assert packs[0] == packs[1]
    assert any(ends_apart)
