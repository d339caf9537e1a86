"""The kernels of CUDA behind one interface: on fakes of their operators, through PyTorch's own schemas and adapters."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.cost.kernels import KernelTable, KernelTiming, Mask, Pack
from fcp_cli.cost.recipe import KERNELS, KernelName
from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels import AttentionKernel, available, select
from fcp_cli.runtime.kernels.available import UnavailableError, kernels_of
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel
from fcp_cli.runtime.kernels.cudnn import CudnnKernel, aten_operators, least_unmeasured_tokens, packs_soundly
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.select import ChosenKernel, Preference, Signature, asked_kernel
from fcp_cli.runtime.layout import Segments
from tests.runtime.emulation import require_exact, run_emulated, use_kernel
from tests.runtime.fake_cuda import FA3_MARGINS, FakeCudnn, FakeFlash, install_fa3, install_fa4, registered
from tests.runtime.reference import make_example, relative_error

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
SMALL = Signature(4, 2, 64, 64, torch.float32)
SHARING = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """A device of this capability, and nothing remembered of another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setenv(SHARING, "")
    monkeypatch.delenv(SHARING)  # and restored after the test
    kernels_of.cache_clear()


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    """A Hopper with PyTorch alone; yields its cuDNN, which counts the calls of both kernels."""
    pretend(monkeypatch)
    fake, flash = FakeCudnn(), FakeFlash()
    flash.calls = fake.calls
    with registered(flash, fake):
        yield fake
    kernels_of.cache_clear()


def agrees(
    kernel: AttentionKernel,
    segments: Segments,
    heads: tuple[int, int],
    sizes: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare a call, and a backward with a ring's final out and log-sum-exp, with plain products."""
    tokens, keys = sum(segments.q_lengths), sum(segments.k_lengths)
    example = make_example((max(tokens, keys),), heads, sizes[0], value_dim=sizes[1], dtype=dtype)
    q, k, v = example.q[:tokens].float(), example.k[:keys].float(), example.v[:keys].float()
    dout = example.grad_out[:tokens].float()
    exact = DenseKernel()
    narrow = (q.to(dtype), k.to(dtype), v.to(dtype))
    out, lse = kernel.forward(*narrow, segments, example.scale)
    wanted_out, wanted_lse = exact.forward(q, k, v, segments, example.scale)
    final = (wanted_out * 0.5, wanted_lse + 0.25)
    grads = kernel.backward(dout.to(dtype), *narrow, final[0].to(dtype), final[1], segments, example.scale)
    wanted = exact.backward(dout, q, k, v, *final, segments, example.scale)
    assert lse.shape == (tokens, heads[0])
    for found, expected in zip((out, lse, *grads), (wanted_out, wanted_lse, *wanted), strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= (2e-6 if dtype == torch.float32 else 1e-2)


CALLS = {
    "one": Segments((12,), (12,), causal=True),
    "equal": Segments((6, 6, 6), (6, 6, 6), causal=True),
    "mixed": Segments((4, 4, 9, 2, 2), (4, 4, 9, 2, 2), causal=True),
    "hop": Segments((5, 7), (3, 11), causal=False),
}


@pytest.mark.parametrize("stats_dims", [3, 4], ids=["torch 2.7-2.8", "torch 2.9-"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("call", CALLS)
def test_dense_cudnn_takes_equal_sequences_as_a_batch(
    call: str, heads: tuple[int, int], stats_dims: int, cudnn: FakeCudnn
) -> None:
    """Values of another head size need no padding."""
    cudnn.stats_dims = stats_dims
    agrees(CudnnKernel(cudnn.operators(packs=False)), CALLS[call], heads, (96, 64) if call == "mixed" else (64, 64))
    batches = {"one": 1, "equal": 1, "mixed": 3, "hop": 2}[call]
    assert cudnn.calls == ["dense forward"] * batches + ["dense backward"] * batches


@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
def test_lengths_that_share_a_graph_of_cudnn_read_their_own_log_sum_exps(
    heads: tuple[int, int], cudnn: FakeCudnn
) -> None:
    """Under TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1; a layout that falls back to a graph per length is read, too."""
    cudnn.shares_graphs = True
    kernel = CudnnKernel(cudnn.operators(packs=False))
    for lengths in ((40,), (57,), (33, 33), (60, 60), (40, 64, 50)):
        agrees(kernel, Segments(lengths, lengths, causal=True), heads)
        agrees(kernel, Segments(lengths, tuple(length + 7 for length in lengths), causal=False), heads)
    segments, exact = Segments((40,), (40,), causal=True), DenseKernel()
    whole = torch.randn(40, heads[0] + 2 * heads[1], 64)
    q, k, v = torch.split(whole, [heads[0], heads[1], heads[1]], dim=1)  # of one projection: rows lie apart
    out, lse = kernel.forward(q, k, v, segments, 0.1)
    grads = kernel.backward(out, q, k, v, out, lse.t().contiguous().t(), segments, 0.1)
    for found, expected in zip(grads, exact.backward(out, q, k, v, out, lse, segments, 0.1), strict=True):
        assert relative_error(found, expected) <= 2e-6


def test_a_process_builds_no_more_graphs_than_its_cap(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own: where autograd's runs forward again, a shape has three."""
    monkeypatch.setattr("fcp_cli.runtime.kernels.cudnn.MOST_GRAPHS", 6)

    def of(*lengths: int) -> Segments:
        return Segments(lengths, lengths, causal=True)

    for shares, known in ((False, of(20)), (True, of(30))):
        cudnn.shares_graphs = shares
        kernel = CudnnKernel(cudnn.operators(packs=False))
        agrees(kernel, of(20), (4, 2))
        agrees(kernel, of(40), (4, 2))
        assert kernel.refusal(of(70)) is None, "four graphs"
        thread = threading.Thread(target=agrees, args=(kernel, of(20), (4, 2)))
        thread.start()
        thread.join()
        assert kernel.refusal(of(70)) == kernel.refusal(of(20, 70)) == "a new shape, after 6 graphs"
        assert kernel.refusal(known) is None
        assert (kernel.refusal(of(30)) is None) == shares, "lengths up to 32 share the graph of 20"


def test_lengths_share_graphs_unless_the_user_or_the_release_says_otherwise(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr("fcp_cli.runtime.kernels.cudnn.packs_soundly", lambda _: True)  # torch 2.14: exact keys
        kernels_of("cudnn")
        assert SHARING not in os.environ and least_unmeasured_tokens() == 11_000
    for given, least in (("0", 11_000), ("1", 4096)):
        if given == "0":
            monkeypatch.setenv(SHARING, given)
        else:
            monkeypatch.delenv(SHARING)
        kernels_of.cache_clear()
        kernels_of("cudnn")
        assert os.environ[SHARING] == given
        assert least_unmeasured_tokens() == least


def test_a_kernel_whose_lengths_share_wrong_strides_fails_its_test_call(cudnn: FakeCudnn) -> None:
    class Forgetful(CudnnKernel):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
            results = super().forward(q, k, v, segments, scale)
            self._shares_graphs = False
            return results

    cudnn.shares_graphs = True
    operators = cudnn.operators(packs=False)
    assert select.failure(CudnnKernel(operators), SMALL, CPU) is None
    unequal = [segments for segments in select.PACKS if len(set(segments.q_lengths)) > 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "PACKS", unequal)
        found = select.failure(Forgetful(operators), SMALL, CPU)
    assert found is not None and found.startswith("its dq is off by")


@pytest.mark.parametrize("layout", ["rows, 1", "rows", "heads"])
@pytest.mark.parametrize("call", CALLS)
def test_packed_cudnn_takes_sequences_of_several_lengths_in_one_call(call: str, layout: str, cudnn: FakeCudnn) -> None:
    cudnn.packed_stats = layout
    agrees(CudnnKernel(cudnn.operators(packs=True), packs=True), CALLS[call], (4, 2))
    form = "packed" if call in ("mixed", "hop") else "dense"
    assert cudnn.calls == [f"{form} forward", f"{form} backward"]


def test_the_packed_form_of_cudnn_needs_a_release_that_keeps_its_graphs(cudnn: FakeCudnn) -> None:
    operators = aten_operators()
    assert operators is not None and not packs_soundly(operators)  # torch 2.13 and before
    assert packs_soundly(cudnn.operators(packs=True))
    assert not packs_soundly(operators._replace(packed_forward=None))


def test_a_packed_form_that_would_allocate_too_much_is_not_used(cudnn: FakeCudnn) -> None:
    """Its backward allocates for every sequence as much as for the longest."""
    lengths = (90, 2, 3, 2, 3, 2, 3, 2)
    segments = Segments(lengths, lengths, causal=True)
    kernel = CudnnKernel(cudnn.operators(packs=True), packs=True)
    agrees(kernel, segments, (4, 2))
    assert set(cudnn.calls) == {"dense forward", "dense backward"}
    assert kernel.refusal(Segments((*lengths, 3), (*lengths, 3), causal=True)) == "more than 8 batches of one shape"


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        (Segments((4,), (4,), causal=True, window=2), "no windows"),
        (Segments((2,), (4,), causal=True), "causal masks are aligned at the first key"),
        (Segments((4, 1), (4, 1), causal=True), "no sequences of one token"),
        (Segments((4, 4), (1, 4), causal=False), "no sequences of one token"),
        (Segments((4, 4), (4, 4), causal=True), None),
    ],
)
def test_cudnn_says_what_it_cannot_take(segments: Segments, reason: str | None, cudnn: FakeCudnn) -> None:
    assert CudnnKernel(cudnn.operators(packs=False)).refusal(segments) == reason


def test_a_log_sum_exp_of_unknown_shape_is_refused(cudnn: FakeCudnn) -> None:
    operators = cudnn.operators(packs=True)
    odd = operators._replace(
        dense_forward=lambda q, *_, **__: (q, torch.empty(1, 2)), packed_forward=lambda q, *_, **__: (q, torch.empty(7))
    )
    q = torch.zeros(12, 4, 64)
    with pytest.raises(RunError, match=r"gives log-sum-exp of shape \(1, 2\), expected \(1, 4, 12\)"):
        CudnnKernel(odd).forward(q, q, q, CALLS["one"], 1.0)
    mixed = Segments((4, 8), (4, 8), causal=True)
    with pytest.raises(RunError, match=r"shape \(7,\) for 12 tokens and 4 heads"):
        CudnnKernel(odd, packs=True).forward(q, q, q, mixed, 1.0)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("name", "has_adapters"), [("fa2", True), *product(("fa3", "fa4"), (True, False))])
def test_flash_kernels_agree_with_plain_products(
    name: KernelName, window: int | None, has_adapters: bool, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fa3(monkeypatch)
    install_fa4(monkeypatch)
    if not has_adapters:  # torch before 2.13
        without_adapters(monkeypatch)
    (kernel,) = kernels_of(name)
    assert kernel.name == name
    agrees(kernel, Segments((5, 7), (5, 7), causal=True, window=window), (4, 2), dtype=torch.bfloat16)
    if window is None:
        agrees(kernel, CALLS["hop"], (4, 2), dtype=torch.bfloat16)
    assert torch.nn.attention.current_flash_attention_impl() is None
    if name != "fa2":
        assert not cudnn.calls, "the process's own operators are left as they are"


def test_operators_without_defaults_of_the_first_release_are_called(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fa3(monkeypatch, first_release=True)
    without_adapters(monkeypatch)
    (kernel,) = kernels_of("fa3")
    for segments in (Segments((5, 7), (5, 7), causal=True), CALLS["hop"]):
        agrees(kernel, segments, (4, 2), dtype=torch.bfloat16)


def without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fa3", "fa4"):
        monkeypatch.setitem(sys.modules, f"torch.nn.attention._{name}", None)


def renamed(function: Any, old: str, new: str) -> Any:
    """Return something with the schema of an operator in which one argument has another name."""
    arguments = [SimpleNamespace(name=new if one.name == old else one.name) for one in function._schema.arguments]
    return SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=arguments)))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("q", "queries", "its fwd takes queries, k, v first, not q, k, v"),
        ("softmax_scale", "scale", "its fwd has no argument softmax_scale"),
    ],
)
def test_an_operator_of_another_schema_is_one_line_and_the_next_kernel(
    old: str, new: str, reason: str, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fa3(monkeypatch)
    without_adapters(monkeypatch)
    fwd, bwd = torch.ops.flash_attn_3.fwd, torch.ops.flash_attn_3.bwd
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace(fwd=renamed(fwd.default, old, new), bwd=bwd))
    with pytest.raises(UnavailableError, match=f"flash-attn-3 does not fit torch .*: {reason}"):
        kernels_of("fa3")
    chosen = ChosenKernel(Preference(asked="fa3", excluded=frozenset({"cudnn"})))
    assert chosen.of(SMALL._replace(dtype=torch.bfloat16), CALLS["one"], CPU).name == "fa2"
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
    with pytest.raises(UnavailableError, match=r"flash-attn-3 does not fit torch .*'fwd'"):
        kernels_of("fa3")


@pytest.mark.parametrize(
    ("name", "capability", "reason"),
    [
        ("fa3", (10, 0), r"it needs a device of compute capability 9\.x"),
        ("fa3", (9, 0), "the package flash-attn-3 is not installed"),
        ("fa4", (8, 0), r"it needs a device of compute capability 9\.x or 10\.x"),
        ("fa4", (10, 0), "the package flash-attn-4 is not installed"),
        ("cudnn", (7, 5), r"it needs compute capability 8\.0"),
    ],
)
def test_a_kernel_that_cannot_run_here_says_why(
    name: KernelName, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    with pytest.raises(UnavailableError, match=reason):
        kernels_of(name)


def test_releases_settings_and_scripts_rule_kernels_out(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    install_fa3(monkeypatch)
    with monkeypatch.context() as broken:
        broken.delattr("torch.nn.attention._fa3._fa3_flash_attention_backward_impl")
        with pytest.raises(UnavailableError, match=r"flash-attn-3 does not fit torch .*_fa3_flash_attention_backward"):
            kernels_of("fa3")
    with monkeypatch.context() as chosen:
        chosen.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
        for name in ("fa2", "fa3"):
            with pytest.raises(UnavailableError, match="the script has activated FA4 in its place"):
                kernels_of(name)
        assert kernels_of("fa4")[0].name == "fa4", "it is what PyTorch's operators run"
    kernels_of.cache_clear()
    with monkeypatch.context() as exact:
        exact.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        with pytest.raises(UnavailableError, match="its backward is not deterministic"):
            kernels_of("cudnn")
    with monkeypatch.context() as amd:
        amd.setattr(available, "is_rocm", lambda: True)
        with pytest.raises(UnavailableError, match="ROCm has no such kernel"):
            kernels_of("cudnn")
    with monkeypatch.context() as old:
        old.setattr(available, "aten_operators", lambda: None)
        with pytest.raises(UnavailableError, match="has no attention of cuDNN"):
            kernels_of("cudnn")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), ["fa2", "cudnn"]),
        ((9, 0), ["cudnn", "fa3", "fa4", "fa2"]),
        ((10, 0), ["cudnn", "fa4", "fa2"]),
        ((12, 0), ["fa2", "cudnn"]),
    ],
)
def test_each_architecture_has_an_order(
    capability: tuple[int, int], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, capability)
    long = Segments((11_000,), (11_000,), causal=True)
    assert Preference().order(long) == tuple(expected)
    assert Preference().favours("cudnn", "fa2", long) == (expected[0] == "cudnn")
    hop = Segments((11_000,), (5500,), causal=False)
    assert Preference().order(hop) == tuple(expected), "a hop with half of the keys has as many pairs"
    short = Segments((10_999, 20_000), (10_999, 20_000), causal=True)
    last = [name for name in expected if name != "cudnn"] + ["cudnn"]
    assert Preference().order(short) == tuple(last), "a graph for a new shape would not pay"
    assert not Preference().favours("cudnn", "fa2", short)
    asked = Preference(asked="cudnn", excluded=frozenset({"fa3"})).order(short)
    assert asked[0] == "cudnn" and "fa3" not in asked
    monkeypatch.setattr("fcp_cli.runtime.kernels.select.is_rocm", lambda: True)
    assert Preference().order(long) == ("fa2",)


def table(*rows: tuple[KernelName, Mask, Pack, int, float, float]) -> KernelTable:
    timings = tuple(
        KernelTiming(
            kernel=kernel, mask=mask, pack=pack, tokens=tokens, forward_seconds=seconds, backward_seconds=2 * seconds,
            first_seconds=first,
        )
        for kernel, mask, pack, tokens, seconds, first in rows
    )  # fmt: skip
    return KernelTable(device="fake", release="2.13", heads=(4, 2, 64), layers=10, timings=timings)


def test_measured_classes_come_before_the_default_order(cudnn: FakeCudnn) -> None:
    measured = table(
        ("cudnn", "causal", "single", 1024, 1.0, 0.0),
        ("fa2", "causal", "single", 1024, 2.0, 0.0),
        ("cudnn", "causal", "equal", 1024, 1.0, 40.0),
        ("fa2", "causal", "equal", 1024, 2.0, 0.0),
        ("fa2", "causal", "mixed", 1024, 1.0, 0.0),
    )
    chosen = ChosenKernel(Preference(table=measured))

    def name(lengths: tuple[int, ...], causal: bool = True) -> str:
        return chosen.of(SMALL, Segments(lengths, lengths, causal=causal), CPU).name

    assert name((1000,)) == "cudnn"
    assert name((1000, 1000)) == "fa2", "a shape's first call costs a layer 4 seconds more"
    assert name((1000, 900)) == "cudnn", "no cuDNN of mixed packs was measured: one by one, as alone"
    assert name((1000, 900), causal=False) == "fa2", "not measured: the default for short sequences"
    assert name((9000, 8500), causal=False) == "cudnn"
    assert name((2896, 2800), causal=False) == "fa2", "from as many pairs as 4,096 causal tokens on"


def test_a_kernel_is_tested_once_and_only_for_calls_that_it_does_not_refuse(cudnn: FakeCudnn) -> None:
    chosen = ChosenKernel(Preference(asked="cudnn"))
    chosen.of(SMALL, Segments((4, 1), (4, 1), causal=True), CPU)
    assert not cudnn.calls
    chosen.of(SMALL, CALLS["one"], CPU)
    tested = len(cudnn.calls)
    chosen.of(SMALL, CALLS["equal"], CPU)
    assert tested == len(cudnn.calls) > 0


def mixed_preference() -> Preference:
    """cuDNN is the quicker from some 360 tokens of a sequence on, and FlashAttention 2 on shorter ones and mixed packs."""
    rows: list[tuple[KernelName, Mask, Pack, int, float, float]] = []
    for mask in ("causal", "full"):
        rows += [("cudnn", mask, "single", 512, 1.0, 0.0), ("fa2", mask, "single", 512, 2.0, 0.0)]
        rows += [("cudnn", mask, "single", 256, 2.0, 0.0), ("fa2", mask, "single", 256, 1.0, 0.0)]
        rows += [("fa2", mask, "mixed", tokens, 1.0, 0.0) for tokens in (256, 512)]
    return Preference(table=table(*rows))


def test_long_sequences_of_a_mixed_pack_run_on_cudnn_one_by_one_and_runs_of_others_packed(cudnn: FakeCudnn) -> None:
    chosen = ChosenKernel(mixed_preference())
    lengths = (5, 90, 600, 400, 1, 40, 450, 450, 12)
    segments = Segments(lengths, lengths, causal=True)
    agrees(chosen, segments, (4, 2))  # with its tests
    cudnn.calls.clear()
    agrees(chosen, segments, (4, 2))
    names = [call for call in cudnn.calls if call.endswith("forward")]
    dense, flash = "dense forward", "flash forward"
    assert names == [flash, dense, dense, flash, dense, flash], "neighbours of one shape are a batch"
    assert cudnn.calls.count("dense backward") == cudnn.calls.count("flash backward") == 3
    halves = tuple(length // 2 + 1 for length in lengths)
    agrees(chosen, Segments(halves, lengths, causal=False), (4, 2))  # a hop: half of a rank's queries, all keys


def test_packs_run_whole_where_no_kernel_is_split_off(cudnn: FakeCudnn) -> None:
    def calls(preference: Preference, segments: Segments) -> set[str]:
        chosen = ChosenKernel(preference)
        agrees(chosen, segments, (4, 2))
        cudnn.calls.clear()
        agrees(chosen, segments, (4, 2))
        return {call.split()[0] for call in cudnn.calls}

    mixed = Segments((30, 500), (30, 500), causal=True)
    preference = mixed_preference()
    assert calls(preference, mixed) == {"flash", "dense"}
    assert calls(preference, Segments((30, 40), (30, 40), causal=True)) == {"flash"}, "none is long"
    assert calls(preference, Segments((30, 500), (30, 500), causal=True, window=8)) == {"flash"}
    assert calls(replace(preference, asked="fa2"), mixed) == {"flash"}
    assert calls(replace(preference, excluded=frozenset(["cudnn"])), mixed) == {"flash"}
    many = (371, 362, 372, 363, 373, 364, 374, 365, 375, 366)
    chosen = ChosenKernel(preference)
    agrees(chosen, Segments(many, many, causal=True), (2, 2))
    cudnn.calls.clear()
    agrees(chosen, Segments(many, many, causal=True), (2, 2))
    assert cudnn.calls.count("dense forward") == 8, "the eight longest"


def test_a_split_pack_that_fails_runs_whole_from_then_on(cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    chosen = ChosenKernel(replace(mixed_preference(), report=lines.append))
    mixed = Segments((30, 500), (30, 500), causal=True)
    agrees(chosen, mixed, (4, 2))
    monkeypatch.setattr(CudnnKernel, "backward", lambda *_: 1 / 0)
    agrees(chosen, mixed, (4, 2))
    assert lines == ["warning: attention kernel cudnn failed and is not used any more: division by zero"]


@pytest.mark.parametrize("degree", [1, 2])
def test_rings_of_split_packs_compute_plain_attention(
    degree: int, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ChosenKernel(mixed_preference())
    use_kernel(monkeypatch, chosen)
    example = make_example((40, 1600, 13, 1500), (2, 1), 64, dtype=torch.float32)
    require_exact(example, degree, dtype=torch.float32)
    kinds = {f"{kernel} {direction}" for kernel in ("dense", "flash") for direction in ("forward", "backward")}
    assert kinds <= set(cudnn.calls)


def test_what_a_kernel_cannot_take_goes_to_the_next_call_by_call(cudnn: FakeCudnn) -> None:
    chosen = ChosenKernel(Preference(asked="cudnn"))
    assert chosen.of(SMALL, CALLS["equal"], CPU).name == "cudnn"
    assert chosen.of(SMALL, Segments((4, 1), (4, 1), causal=True), CPU).name == "fa2"
    assert chosen.of(SMALL, Segments((4,), (4,), causal=True, window=2), CPU).name == "fa2"
    big = SMALL._replace(head_dim=192, value_dim=192)
    assert chosen.of(big, Segments((4, 4), (4, 4), causal=True), CPU).name == "fa2", "no plan for this head size"
    cudnn.most_head_dim = 256  # as on a Hopper with a newer cuDNN
    assert ChosenKernel(Preference(asked="cudnn")).of(big, CALLS["one"], CPU).name == "cudnn"


def test_a_packed_form_that_fails_its_test_leaves_the_dense_one(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = cudnn.operators(packs=True)
    wrong = operators._replace(
        packed_backward=lambda *args, **options: [-g for g in cudnn.packed_backward(*args, **options)]
    )
    wrong.packed_forward._schema = operators.packed_forward._schema  # type: ignore[union-attr]
    monkeypatch.setattr(available, "aten_operators", lambda: wrong)
    kernel = ChosenKernel(Preference(asked="cudnn")).of(SMALL, Segments((4, 4), (4, 4), causal=True), CPU)
    assert isinstance(kernel, CudnnKernel) and not kernel._packs


@pytest.mark.parametrize("fault", ["dq", "log-sum-exp", "own statistics", "no shared heads", "shapes"])
def test_a_kernel_with_wrong_numbers_fails_its_test_call(fault: str, cudnn: FakeCudnn) -> None:
    kernel = CudnnKernel(cudnn.operators(packs=False))
    assert select.failure(kernel, SMALL, CPU) is None
    real_forward, real_backward = kernel.forward, kernel.backward
    if fault == "no shared heads":
        cudnn.shares_heads = False
        assert select.failure(kernel, SMALL, CPU) == "cuDNN Frontend error: No valid execution plans built."
        return

    class Faulty(CudnnKernel):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
            out, lse = real_forward(q, k, v, segments, scale)
            if fault == "shapes":
                return out, lse.t()
            return out, lse / 0.6931 if fault == "log-sum-exp" else lse

        def backward(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
            scale: float
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            if fault == "own statistics":  # as a kernel that computes them anew
                out, lse = real_forward(q, k, v, segments, scale)
            dq, dk, dv = real_backward(dout, q, k, v, out, lse, segments, scale)
            return (dq * float("nan") if fault == "dq" else dq), dk, dv

    found = select.failure(Faulty(cudnn.operators(packs=False)), SMALL, CPU)
    expected = {
        "dq": "its dq is off by nan in a test call",
        "log-sum-exp": "its log-sum-exp is off by",
        "own statistics": "its dq is off by",
        "shapes": r"it returns (192, 4, 64) and (4, 192) for (192, 4, 64)",
    }[fault]
    assert found is not None and found.startswith(expected)


def test_a_kernel_that_fails_in_a_run_is_dropped_once_and_said_so(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    chosen = ChosenKernel(Preference(asked="cudnn", report=lines.append))
    agrees(chosen, CALLS["equal"], (4, 2))
    assert not lines

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cuDNN Frontend error: no engine\nmore")

    monkeypatch.setattr(CudnnKernel, "backward", fail)
    monkeypatch.setattr(CudnnKernel, "forward", fail)
    for _ in range(2):
        agrees(chosen, CALLS["equal"], (4, 2))
    assert lines == ["warning: attention kernel cudnn failed and is not used any more: cuDNN Frontend error: no engine"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: illegal")])
def test_what_no_other_kernel_would_mend_ends_the_run(
    error: Exception, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ChosenKernel(Preference(asked="cudnn"))
    agrees(chosen, CALLS["equal"], (4, 2))

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(CudnnKernel, "forward", fail)
    with pytest.raises(type(error)):
        agrees(chosen, CALLS["equal"], (4, 2))
    with pytest.raises(type(error)):
        select.failure(CudnnKernel(cudnn.operators(packs=False)), SMALL, CPU)


def test_a_test_call_holds_under_autocast(cudnn: FakeCudnn) -> None:
    class Exact(CudnnKernel):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
            return DenseKernel().forward(q.double(), k.double(), v.double(), segments, scale)

        def backward(
            self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
            scale: float
        ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
            wide = [tensor.double() for tensor in (dout, q, k, v, out, lse)]
            return DenseKernel().backward(wide[0], wide[1], wide[2], wide[3], wide[4], wide[5], segments, scale)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert select.failure(Exact(cudnn.operators(packs=False)), SMALL._replace(dtype=torch.bfloat16), CPU) is None


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("packs", [False, True], ids=["dense", "packed"])
def test_a_ring_whose_calls_run_different_kernels_computes_plain_attention(
    packs: bool, degree: int, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "aten_operators", lambda: cudnn.operators(packs=packs))
    chosen = ChosenKernel(Preference(asked="cudnn"))
    use_kernel(monkeypatch, chosen)
    for lengths in ((40, 52, 67, 101), (5, 13, 37, 101, 1)):
        require_exact(make_example(lengths, (4, 2), 64, dtype=torch.float32), degree, dtype=torch.float32)
    form = "packed" if packs else "dense"
    expected_calls = {f"{kernel} {direction}" for kernel in (form, "flash") for direction in ("forward", "backward")}
    assert expected_calls <= set(cudnn.calls), "rows of one token run on flash attention"


def test_flash_attention_3_leaves_multiprocessors_to_the_messages_of_rings(
    cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is persistent: a message would start when it ends. Nothing else is affected, and the script's own number stays."""
    install_fa3(monkeypatch)
    chosen = ChosenKernel(Preference(asked="fa3"))
    use_kernel(monkeypatch, chosen)
    example = make_example((40, 52), (4, 2), 64, dtype=torch.bfloat16)
    run_emulated(example, 1, torch.bfloat16)  # with the kernel's test calls
    assert set(FA3_MARGINS) == {0}, "no message is under way"
    for given, margin in ((None, 8), (20, 20)):
        FA3_MARGINS.clear()
        torch._C._set_sm_carveout_experimental(given)
        try:
            run_emulated(example, 3, torch.bfloat16)
            assert torch._C._get_sm_carveout_experimental() == given
        finally:
            torch._C._set_sm_carveout_experimental(None)
        assert set(FA3_MARGINS) == {margin}
    monkeypatch.setattr(chosen, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_emulated(example, 3, torch.bfloat16)
    assert torch._C._get_sm_carveout_experimental() is None


def test_the_environment_names_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [asked_kernel(value) for value in (None, "", "auto", *KERNELS)] == [None, None, None, *KERNELS]
    with pytest.raises(RunError, match="FCP_ATTENTION_KERNEL is 'fa5'; it must be auto, cudnn, fa2, fa3, fa4"):
        asked_kernel("fa5")
    pretend(monkeypatch)
    select.select_kernel.cache_clear()
    monkeypatch.setenv("FCP_ATTENTION_KERNEL", "fa2")
    kernel = select.select_kernel("cuda", torch.bfloat16)
    assert isinstance(kernel, ChosenKernel) and kernel.preference.asked == "fa2"
    select.prefer(Preference(asked="cudnn"))
    kernel = select.select_kernel("cuda", torch.bfloat16)
    assert isinstance(kernel, ChosenKernel) and kernel.preference.asked == "cudnn"
    select._preferences.clear()
    select.select_kernel.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(select.select_kernel("cuda", torch.bfloat16), CudaFlashKernel)
    select.select_kernel.cache_clear()
