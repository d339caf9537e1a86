"""Kernels against plain fp64 mathematics, and what each of them refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.runtime.kernels import AttentionKernel, cpu, cuda, lse_dtype, npu, select_kernel
from fcp_cli.runtime.kernels.cpu import CpuKernel
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel, tokens_first
from fcp_cli.runtime.kernels.dense import DenseKernel
from fcp_cli.runtime.kernels.npu import NpuKernel
from fcp_cli.runtime.kernels.select import ChosenKernel, Preference
from fcp_cli.runtime.layout import Segments
from tests.runtime.fake_npu import FakeNpu
from tests.runtime.reference import HEADS, PACKS, absolute_error, make_example, relative_error

pytestmark = pytest.mark.torch

EXACT: list[AttentionKernel] = [CpuKernel(), DenseKernel()]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("kernel", EXACT, ids=["cpu", "dense"])
def test_causal_segments_match_plain_attention_in_fp64(
    kernel: AttentionKernel, lengths: tuple[int, ...], heads: tuple[int, int]
) -> None:
    example = make_example(lengths, heads)
    segments = Segments(lengths, lengths, causal=True)
    out, lse = kernel.forward(example.q, example.k, example.v, segments, example.scale)
    grads = kernel.backward(example.grad_out, example.q, example.k, example.v, out, lse, segments, example.scale)
    assert lse.shape == example.q.shape[:2]
    assert lse.dtype == torch.float64
    for found, expected in zip((out, *grads), example.results, strict=True):
        assert found.shape == expected.shape
        assert absolute_error(found, expected) <= 1e-12


@pytest.mark.parametrize("heads", HEADS)
def test_the_cpu_kernel_repeats_key_heads_for_releases_that_cannot_share_them(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_SHARES_KV_HEADS", False)
    test_causal_segments_match_plain_attention_in_fp64(CpuKernel(), (5, 7, 13), heads)


@pytest.mark.parametrize("sizes", [(12, 8), (8, 12)], ids=str)
@pytest.mark.parametrize("kernel", [*EXACT, NpuKernel(FakeNpu(head_major=True))], ids=["cpu", "dense", "npu"])
def test_values_may_have_heads_of_another_size(kernel: AttentionKernel, sizes: tuple[int, int]) -> None:
    example = make_example((5, 7), (4, 2), sizes[0], value_dim=sizes[1], dtype=torch.float32)
    inputs = (example.q.float(), example.k.float(), example.v.float())
    segments = Segments((5, 7), (5, 7), causal=True)
    out, lse = kernel.forward(*inputs, segments, example.scale)
    grads = kernel.backward(example.grad_out.float(), *inputs, out, lse, segments, example.scale)
    for found, expected in zip((out, *grads), example.results, strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) <= 2e-6


@pytest.mark.parametrize("kernel", EXACT, ids=["cpu", "dense"])
def test_a_backward_over_part_of_the_keys_gives_that_part_of_the_gradients(kernel: AttentionKernel) -> None:
    """With the whole row's out and lse, the shares over two halves of the keys add up to the whole."""
    example = make_example((40,), (4, 2))
    q, k, v = example.q[:10], example.k, example.v
    whole = Segments((10,), (40,), causal=False)
    out, lse = kernel.forward(q, k, v, whole, example.scale)
    expected = kernel.backward(example.grad_out[:10], q, k, v, out, lse, whole, example.scale)
    part = Segments((10,), (20,), causal=False)
    first, second = (
        kernel.backward(example.grad_out[:10], q, k[half], v[half], out, lse, part, example.scale)
        for half in (slice(20), slice(20, 40))
    )
    assert absolute_error(first[0] + second[0], expected[0]) <= 1e-12
    for i in (1, 2):
        assert absolute_error(torch.cat((first[i], second[i])), expected[i]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_keeps_the_log_sum_exp_in_fp32(dtype: torch.dtype) -> None:
    example = make_example((37, 5), (4, 2), dtype=dtype)
    segments = Segments((37, 5), (37, 5), causal=True)
    q, k, v = (tensor.to(dtype) for tensor in (example.q, example.k, example.v))
    out, lse = select_kernel("cpu", dtype).forward(q, k, v, segments, example.scale)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert relative_error(out, example.out) <= (2e-6 if dtype == torch.float32 else 1e-2)


def test_the_cpu_kernel_stops_at_an_empty_segment_before_it_kills_the_process() -> None:
    q = torch.zeros(3, 2, 8)
    for bad in (Segments((3, 0), (2, 1), causal=False), Segments((2, 1), (3, 0), causal=False)):
        with pytest.raises(AssertionError, match=r"an empty (query|key) segment"):
            CpuKernel().forward(q, q, q, bad, 1.0)


@pytest.mark.parametrize("head_major", [True, False], ids=["head-major", "token-major"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_npu_kernel_reads_and_writes_the_row_statistics_in_their_order(
    causal: bool, heads: tuple[int, int], head_major: bool
) -> None:
    q_lengths = (5, 1, 9)
    k_lengths = q_lengths if causal else (3, 7, 2)
    example = make_example((30,), heads)
    rows, keys = sum(q_lengths), sum(k_lengths)
    inputs = (example.q[:rows].float(), example.k[:keys].float(), example.v[:keys].float())
    grad_out = example.grad_out[:rows].float()
    segments = Segments(q_lengths, k_lengths, causal=causal)
    expected_out, expected_lse = DenseKernel().forward(*inputs, segments, example.scale)
    # A row's final values, as the ring has them once further keys were merged in.
    final_out, final_lse = expected_out * 0.5, expected_lse + 0.25
    expected = DenseKernel().backward(grad_out, *inputs, final_out, final_lse, segments, example.scale)

    kernel = NpuKernel(FakeNpu(head_major=head_major))
    out, lse = kernel.forward(*inputs, segments, example.scale)
    grads = kernel.backward(grad_out, *inputs, final_out, final_lse, segments, example.scale)
    assert relative_error(out, expected_out) <= 2e-6
    assert relative_error(lse, expected_lse) <= 2e-6
    for found, wanted in zip(grads, expected, strict=True):
        assert found.shape == wanted.shape
        assert relative_error(found, wanted) <= 2e-6


@pytest.mark.parametrize(
    "lengths", [(7,), (5, 5, 5), (1, 4, 2), tuple(range(1, 70))], ids=["one", "equal", "few", "many"]
)
def test_statistics_of_segments_change_their_order_and_back(lengths: tuple[int, ...]) -> None:
    heads = 3
    stats = torch.arange(sum(lengths) * heads, dtype=torch.float32).view(-1, heads)
    memory = torch.cat([part.t().reshape(-1) for part in torch.split_with_sizes(stats, lengths)]).view(stats.shape)
    assert torch.equal(npu.tokens_first(memory, lengths), stats)
    assert torch.equal(npu.heads_first(stats, lengths), memory)
    columns = stats.t().contiguous().t()  # as a merge may leave it
    assert torch.equal(npu.heads_first(columns, lengths), memory)


def test_the_npu_kernel_keeps_no_index_with_a_layout() -> None:
    q, segments = torch.randn(10, 2, 16), Segments((1, 4, 2, 3), (1, 4, 2, 3), causal=True)
    NpuKernel(FakeNpu(head_major=True)).forward(q, q, q, segments, 1.0)
    assert not [value for value in segments.memo.values() if isinstance(value, Tensor)]


def test_the_npu_kernel_asks_for_the_order_of_the_statistics_once() -> None:
    fake = FakeNpu(head_major=True)
    kernel = NpuKernel(fake)
    q = torch.randn(4, 2, 16)
    for _ in range(3):
        kernel.forward(q, q, q, Segments((4,), (4,), causal=True), 1.0)
    assert len(fake.calls) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stats: stats[..., :1], r"row statistics of shape \(4, 2, 1\), expected \(4, 2, 8\)"),
        (lambda stats: stats.flip(0), "orders its row statistics in a way"),
    ],
    ids=["shape", "order"],
)
def test_the_npu_kernel_refuses_unknown_statistics(change: Callable[[Tensor], Tensor], message: str) -> None:
    class Other(FakeNpu):
        def _stats(self, rows: list[Tensor]) -> Tensor:
            return change(super()._stats(rows))

    q = torch.randn(4, 2, 16)
    with pytest.raises(RunError, match=message):
        NpuKernel(Other(head_major=False)).forward(q, q, q, Segments((4,), (4,), causal=True), 1.0)


@pytest.mark.parametrize("window", [None, 3])
def test_the_cuda_kernel_calls_the_flash_operators_with_shapes_they_accept(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake CUDA tensors run the operators' own shape functions; no GPU is needed, and no number is checked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)  # fake tensors cannot
    asked: list[tuple[int | None, int | None]] = []

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: Any) -> object:
            asked.append((options.get("window_size_left"), options.get("window_size_right")))
            return real(*args, **options)

        return run

    operators = cuda.FlashOperators(*map(counted, cuda.ATEN))
    kernel, segments = (
        CudaFlashKernel(operators=operators),
        Segments((4, 6), (3, 5), causal=window is not None, window=window),
    )
    with FakeTensorMode():
        q = torch.empty(10, 8, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(8, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = kernel.forward(q, k, k, segments, 0.125)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == ((10, 8), torch.float32)
        grads = kernel.backward(out, q, k, k, out, lse, segments, 0.125)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    assert asked == 2 * [(None, None) if window is None else (window - 1, 0)]


def test_the_cuda_kernel_refuses_a_log_sum_exp_of_unknown_shape() -> None:
    q = torch.empty(10, 8, 64)
    assert tokens_first(torch.empty(8, 10), q).shape == (10, 8)
    with pytest.raises(RunError, match=r"log-sum-exp of shape \(2, 8, 6\), expected \(8, 10\)"):
        tokens_first(torch.empty(2, 8, 6), q)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_the_cuda_kernel_names_a_head_dim_it_cannot_take(head_dim: int) -> None:
    q = torch.empty(10, 8, head_dim)
    for kernel in (CudaFlashKernel(), ChosenKernel(Preference())):
        with pytest.raises(RunError, match=f"head_dim {head_dim} does not fit"):
            kernel.forward(q, q, q, Segments((10,), (10,), causal=True), 1.0)


def test_kernels_are_chosen_by_device_and_type() -> None:
    assert isinstance(select_kernel("cpu", torch.bfloat16), CpuKernel)
    assert isinstance(select_kernel("cuda", torch.bfloat16), CudaFlashKernel)
    assert isinstance(select_kernel("cuda", torch.float32), DenseKernel)
    assert isinstance(select_kernel("npu", torch.float64), DenseKernel)
    with pytest.raises(RunError, match="no attention kernel for device 'xpu'"):
        select_kernel("xpu", torch.bfloat16)
    with pytest.raises(RunError, match=r"not torch\.int32"):
        select_kernel("cpu", torch.int32)


def test_results_merge_in_fp32_or_better() -> None:
    assert lse_dtype(torch.bfloat16) == lse_dtype(torch.float32) == torch.float32
    assert lse_dtype(torch.float64) == torch.float64
