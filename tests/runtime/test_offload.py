"""Inputs of recomputed layers that wait on the host; sessions with it are in test_session."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcp_cli.runtime import recompute as offload_module
from fcp_cli.runtime.recompute import ActivationOffload, StreamLink, recomputed

pytestmark = pytest.mark.torch

LAYERS, TOKENS, WIDTH = 4, 8, 32
INPUT_BYTES = TOKENS * WIDTH * 4


class MicroBatch:
    def __init__(self, tokens: int = TOKENS) -> None:
        self.input_ids = torch.zeros(1, tokens, dtype=torch.int64)


class Model(nn.Module):
    """Layers that need their input in backward, and a head that is not recomputed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self) -> Tensor:
        hidden = torch.linspace(-1, 1, TOKENS * WIDTH).view(1, TOKENS, WIDTH).requires_grad_() * 1.0
        for layer in self.layers:
            hidden = recomputed(layer, hidden)
        loss: Tensor = self.head(hidden).square().sum()
        return loss


def trained(run: Callable[[Model], Tensor]) -> list[Tensor]:
    model = Model()
    return list(torch.autograd.grad(run(model), list(model.parameters())))


def offloading(offload: ActivationOffload, tokens: int = TOKENS) -> Callable[[Model], Tensor]:
    def run(model: Model) -> Tensor:
        with offload.of(MicroBatch(tokens)):
            loss: Tensor = model()
        return loss

    return run


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "LEAST_BYTES", INPUT_BYTES)


def host(*, above_tokens: int = 0) -> ActivationOffload:
    return ActivationOffload(torch.device("cpu"), above_tokens=above_tokens)


def test_gradients_are_the_same_bit_for_bit() -> None:
    offload, whole = host(), trained(lambda model: model())
    for _ in range(2):
        assert all(map(torch.equal, trained(offloading(offload)), whole))
    assert offload.microbatches == 2
    assert offload.moved_bytes == 2 * (LAYERS + LAYERS - 1) * INPUT_BYTES, "the last layer's input need not come back"


@pytest.mark.parametrize(("above", "moves"), [(TOKENS - 1, True), (TOKENS, False)])
def test_only_micro_batches_of_more_tokens_than_fit_are_offloaded(above: int, moves: bool) -> None:
    offload = host(above_tokens=above)
    trained(offloading(offload))
    assert (offload.microbatches, offload.moved_bytes > 0) == (int(moves), moves)


def test_outside_of_a_micro_batch_nothing_is_moved() -> None:
    offload = host()
    trained(offloading(offload))
    moved = offload.moved_bytes
    trained(lambda model: model())
    assert offload.moved_bytes == moved


def test_two_forwards_may_come_before_their_backwards() -> None:
    offload, model, twice = host(), Model(), Model()
    losses = [offloading(offload)(model) for _ in range(2)]
    for loss in losses:
        torch.autograd.backward(loss)
    torch.autograd.backward(2 * twice())
    for one, other in zip(model.parameters(), twice.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_backward_may_run_twice() -> None:
    model = Model()
    loss = offloading(host())(model)
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, list(model.parameters()))))


def test_weights_indices_and_trifles_stay() -> None:
    offload = ActivationOffload(torch.device("cpu"))
    large = INPUT_BYTES // 4
    assert offload.takes(torch.empty(large))
    assert not offload.takes(torch.empty(large - 1))
    assert not offload.takes(torch.empty(large, dtype=torch.int64))
    assert not offload.takes(nn.Parameter(torch.empty(large)))


def test_memory_is_let_go_of_as_soon_as_backward_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, seen = host(), list[weakref.ref[Tensor]]()
    link, send = offload._link, offload._link.to_host

    def to_host(tensor: Tensor) -> tuple[Tensor, Any]:
        copy, mark = send(tensor)
        seen.append(weakref.ref(copy))
        return copy, mark

    monkeypatch.setattr(link, "to_host", to_host)
    gc.disable()  # what is let go of must not wait for a circle to be found
    try:
        loss = offloading(offload)(Model())
        assert [one() is not None for one in seen] == [True] * LAYERS
        torch.autograd.backward(loss)
        del loss
        assert [one() is not None for one in seen] == [False] * LAYERS
    finally:
        gc.enable()


class LazyStream:
    """A stream whose work is done as late as its events allow; the computing stream works at once."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], None]] = []
        self.waited_for_compute = 0

    def wait_stream(self, other: LazyStream) -> None:
        self.waited_for_compute += 1

    def wait_event(self, event: Callable[[], None]) -> None:
        self.work.append(event)

    def record_event(self) -> Callable[[], None]:
        position = len(self.work)

        def finish() -> None:
            for place in range(position):
                self.work[place]()
                self.work[place] = lambda: None

        return finish


class Compute(LazyStream):
    def wait_event(self, event: Callable[[], None]) -> None:
        event()


class LazyDevice:
    """A device module of PyTorch with lazy streams; memory that leaves unrecorded is overwritten meanwhile."""

    Stream = LazyStream

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute, self.recorded, self.pinned = Compute(), set[int](), 0
        self.active: LazyStream | None = None
        copy, empty_like = Tensor.copy_, torch.empty_like

        def lazy_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            stream = self.active
            if stream is None:
                return copy(target, source)
            assert non_blocking, "the host must not wait"

            def work() -> None:
                assert {id(target), id(source)} & self.recorded, "its memory could have been used for something else"
                copy(target, source)

            target.fill_(torch.nan)  # until it has arrived
            stream.work.append(work)
            return target

        def pageable(tensor: Tensor, *, device: Any = None, pin_memory: bool = False) -> Tensor:
            self.pinned += pin_memory
            return empty_like(tensor)

        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(torch, "empty_like", pageable)
        monkeypatch.setattr(Tensor, "copy_", lazy_copy)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.recorded.add(id(tensor)))

    def current_stream(self, device: Any) -> LazyStream:
        return self.compute

    @contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        self.active = stream
        yield
        self.active = None


def test_streams_wait_for_each_other_where_they_must_and_the_host_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(lambda model: model())
    device = LazyDevice(monkeypatch)
    offload = host()
    offload._link = link = StreamLink(torch.device("cpu"))
    found = trained(offloading(offload))
    monkeypatch.undo()
    assert all(map(torch.equal, found, whole))
    assert device.pinned == LAYERS
    assert (link._out.waited_for_compute, link._back.waited_for_compute) == (LAYERS, LAYERS - 1)
