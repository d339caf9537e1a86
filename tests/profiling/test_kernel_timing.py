"""Kernels are timed on the shapes of plans, within a budget, and the profile keeps their table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fcp_cli.cost.kernels import KernelTable, KernelTiming, ShapeClass, shape_class
from fcp_cli.cost.recipe import Recipe
from fcp_cli.errors import ProfileError
from fcp_cli.models.model import load_model
from fcp_cli.profiling.fits import profile_from_samples
from fcp_cli.profiling.samples import append_line, read_samples
from fcp_cli.report.profiles import reading
from tests.profiling.recorded import write_samples

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Hopper with PyTorch alone, on fakes of its operators."""
    from fcp_cli.runtime.kernels.available import kernels_of
    from tests.runtime.fake_cuda import FakeCudnn, FakeFlash, registered

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    kernels_of.cache_clear()
    cudnn = FakeCudnn()
    with registered(FakeFlash(), cudnn):
        yield cudnn
    kernels_of.cache_clear()


def test_calls_cover_masks_packs_and_lengths_up_to_the_budget() -> None:
    from fcp_cli.profiling.timing import calls

    found = calls(70_000)
    assert {sum(call.lengths) for call in found if len(call.lengths) == 1} == {256, 1024, 4096, 16384, 65536}
    classes = {shape_class(call.lengths, causal=call.causal) for call in found}
    assert len(classes) == len(found) == 2 * (5 + 3 + 3)
    for mask in ("causal", "full"):
        for pack in ("equal", "mixed"):
            assert {one.tokens for one in classes if (one.mask, one.pack) == (mask, pack)} == {256, 1024, 4096}
    assert max(sum(call.lengths) for call in found if len(call.lengths) > 1) <= 16_384
    pairs = [call.pairs for call in found]
    assert pairs == sorted(pairs)
    assert max(sum(call.lengths) for call in calls(1 << 20)) <= 131_072


def test_usable_kernels_are_timed_and_a_class_that_one_refuses_has_no_time_of_it(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcp_cli.profiling import timing
    from fcp_cli.profiling.timing import Call, time_kernels
    from fcp_cli.runtime.kernels.select import Signature

    many = tuple(range(20, 29))
    asked = [Call(lengths=lengths, causal=True) for lengths in ((256,), (700, 800), many)]
    monkeypatch.setattr(timing, "calls", lambda most: asked)
    found = time_kernels(torch.device("cpu"), Signature(2, 1, 16, 16, torch.float32), 4096, budget_seconds=600)
    assert [(one.kernel, one.pack, one.tokens) for one in found] == [
        ("cudnn", "single", 256),
        ("fa2", "single", 256),
        ("cudnn", "mixed", 1024),
        ("fa2", "mixed", 1024),
        ("fa2", "mixed", 256),  # more than 8 batches of one shape
    ]
    assert all(min(one.forward_seconds, one.backward_seconds) > 0 <= one.first_seconds for one in found)


def test_the_first_call_of_a_shape_is_timed_after_one_of_a_token_less(
    hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each length would bear a graph that it shares; one of its own still counts."""
    from fcp_cli.profiling import timing
    from fcp_cli.runtime.kernels.cudnn import CudnnKernel
    from fcp_cli.runtime.kernels.select import Signature

    forward, seen, builds = CudnnKernel.forward, set[int](), [0.0]

    def building(self: Any, q: Any, k: Any, v: Any, segments: Any, scale: float) -> Any:
        shape = segments.q_lengths[0] if not shares else 1 << (segments.q_lengths[0] - 1).bit_length()
        builds[0] += 1000.0 * (shape not in seen)
        seen.add(shape)
        return forward(self, q, k, v, segments, scale)

    monkeypatch.setattr(CudnnKernel, "forward", building)
    monkeypatch.setattr(timing, "calls", lambda most: [timing.Call(lengths=(32,), causal=True)])
    perf_counter = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + builds[0])
    for shares in (True, False):
        seen.clear()
        found = timing.time_kernels(torch.device("cpu"), Signature(2, 1, 16, 16, torch.float32), 32)
        assert found[0].first_seconds == pytest.approx(0.0 if shares else 1000.0, abs=100.0)


def test_a_measured_shape_bears_the_graphs_of_recomputed_layers() -> None:
    """A timing's thread builds two; autograd's builds forward's again."""
    one = timing("cudnn", 256, 1.0)
    table = KernelTable(device="fake", release="2.13", heads=(4, 2, 64), layers=10, timings=(one,))
    priced = table.seconds(replace(one, first_seconds=0.8)) - table.seconds(replace(one, first_seconds=0.0))
    assert priced == pytest.approx(0.12)


def test_timing_ends_where_memory_does(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.profiling import timing as timings
    from fcp_cli.runtime.kernels.select import Signature

    def timed(kernel: Any, call: Any, *_: object) -> KernelTiming:
        if call.lengths == (1024,):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return timing(kernel.name, 256, 1.0)

    monkeypatch.setattr(timings, "_timed", timed)
    found = timings.time_kernels(torch.device("cpu"), Signature(2, 1, 16, 16, torch.float32), 1 << 17)
    assert {one.kernel for one in found} == {"cudnn", "fa2"} and len(found) < 12


def test_timing_ends_with_its_budget(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.profiling import timing as timings
    from fcp_cli.runtime.kernels.select import Signature

    monkeypatch.setattr(timings, "calls", lambda most: [timings.Call(lengths=(8,), causal=True)])
    signature = Signature(2, 1, 16, 16, torch.float32)
    assert timings.time_kernels(torch.device("cpu"), signature, 256, budget_seconds=-1) == []


def timing(kernel: Any, tokens: int, seconds: float) -> KernelTiming:
    return KernelTiming(
        kernel=kernel, mask="causal", pack="single", tokens=tokens, forward_seconds=seconds, backward_seconds=seconds
    )


TABLE = KernelTable(
    device="NVIDIA H100 80GB HBM3",
    release="2.13.0+cu130",
    heads=(32, 8, 128),
    layers=36,
    kernel="cudnn",
    timings=(timing("cudnn", 1024, 2.0), timing("fa2", 1024, 1.0), timing("cudnn", 16384, 1.0), timing("fa2", 16384, 2.0)),
)  # fmt: skip


def test_the_nearest_class_decides() -> None:
    def order(tokens: int, mask: Any = "causal", pack: Any = "single") -> tuple[str, ...]:
        return TABLE.order(ShapeClass(mask=mask, pack=pack, tokens=tokens))

    assert order(256) == order(2048) == ("fa2", "cudnn")
    assert order(8192) == order(1 << 20) == ("cudnn", "fa2")
    assert order(8192, pack="mixed") == ("cudnn", "fa2"), "of no such pack: of the same mask"
    assert order(8192, mask="full") == ()
    assert TABLE.quickest() == {"cudnn": 1, "fa2": 1}
    assert TABLE.ratio("fa2", "cudnn") == 1.0
    assert TABLE.ratio("fa3", "cudnn") is None


def test_rank_0_times_kernels_once_and_all_prefer_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fcp_cli.profiling import worker

    timed: list[int] = []

    def time_kernels(*_: object) -> list[KernelTiming]:
        timed.append(1)
        return list(TABLE.timings)

    path = tmp_path / "h100.samples.jsonl"
    write_samples(path, Recipe(), finished=False)
    monkeypatch.setattr(worker, "time_kernels", time_kernels)
    monkeypatch.setattr(worker, "device_name", lambda _: TABLE.device)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda *_, **__: None)
    preferred: list[Any] = []
    monkeypatch.setattr(worker, "prefer", preferred.append)
    rank: Any = object.__new__(worker.Measurer)
    rank.device, rank.spec = SimpleNamespace(type="cuda"), load_model("qwen3-8b")
    rank.request = SimpleNamespace(samples=path, max_length=4096)
    rank.world, rank.workload = SimpleNamespace(rank=0), SimpleNamespace(dtype=torch.bfloat16)
    for _ in range(2):
        rank._prefer_kernels()
    assert len(timed) == 1, "a resumed measurement keeps its table"
    expected = replace(TABLE, release=torch.__version__, kernel="cudnn")
    assert [one.table for one in preferred] == [expected, expected]
    rank.workload.dtype = torch.float32
    rank._prefer_kernels()
    assert len(preferred) == 2


def measured(folder: Path) -> Path:
    path = folder / "h100.samples.jsonl"
    write_samples(path, Recipe(zero_stage=3, recompute="selective"), finished=False)
    append_line(path, {"kind": "attention_kernels", "table": TABLE.document()})
    append_line(path, {"kind": "finished", "at": "later"})
    return path


def test_a_profile_names_its_kernel_and_what_each_kernel_is_the_quickest_of(tmp_path: Path) -> None:
    profile = profile_from_samples(read_samples(measured(tmp_path)))
    assert profile.attention_kernels == TABLE and profile.attention_kernel == "cudnn"
    shares = "Attention kernels, by the number of shapes for which each is fastest: cudnn 1, fa2 1."
    assert shares in reading(profile, [1])


def test_a_damaged_table_in_the_samples_is_refused_in_a_line(tmp_path: Path) -> None:
    path = measured(tmp_path)
    damaged = TABLE.document() | {"heads": [1, 2]}
    append_line(path, {"kind": "attention_kernels", "table": damaged})
    with pytest.raises(ProfileError, match=r"line \d+: table\.heads"):
        read_samples(path)
