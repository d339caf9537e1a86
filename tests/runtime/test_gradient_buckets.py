"""Messages in which gradients of unsharded models are summed, counted on a world of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.model import load_model
from fcp_cli.runtime.gradients import PlainSync, present_anywhere

pytestmark = pytest.mark.torch

MIB = 1 << 20


@dataclass
class Message:
    """A sum that has begun; the tensor must stay as it is until the wait."""

    world: CountedWorld
    tensor: Tensor

    def wait(self) -> None:
        self.world.in_flight.remove(self)
        self.tensor.mul_(2)  # of another rank with the same gradients


@dataclass
class CountedWorld:
    """Two ranks with equal gradients, of which one exists."""

    rank: int = 0
    size: int = 2
    collectives: list[int] = field(default_factory=list)
    in_flight: list[Message] = field(default_factory=list)
    most_in_flight: int = 0
    most_copied_bytes: int = 0
    own: frozenset[int] = frozenset()

    def all_reduce_sum(self, tensor: Tensor) -> None:
        self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Message:
        self.collectives.append(tensor.nbytes)
        message = Message(self, tensor)
        self.in_flight.append(message)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        copied = sum(one.tensor.nbytes for one in self.in_flight if one.tensor.untyped_storage()._cdata not in self.own)
        self.most_copied_bytes = max(self.most_copied_bytes, copied)
        return message

    def start_sum(self, tensor: Tensor) -> Message:
        return self.start_all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None: ...

    def swap(self, told: Tensor, to: int, heard: Tensor, source: int) -> None: ...


def with_gradients(model: nn.Module) -> frozenset[int]:
    """Give every parameter a gradient of ones; return the identities of their memory."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return frozenset(p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None)


def test_gradients_of_8b_parameters_are_summed_in_few_large_messages_of_which_two_overlap() -> None:
    spec = load_model("qwen3-8b")
    table = torch.empty(spec.vocab_size, spec.hidden_size, device="meta")
    model = nn.ParameterList([table, torch.empty_like(table)])
    for _ in range(spec.num_layers):  # projections, MLP and norms of a layer
        sizes = [4096 * 4096, 1024 * 4096, 1024 * 4096, 4096 * 4096, *[12_288 * 4096] * 3, 128, 128, 4096, 4096]
        model.extend(torch.empty(size, device="meta") for size in sizes)
    world = CountedWorld()
    world.own = with_gradients(model)
    PlainSync(model, world).reduce()
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(world.collectives) == total + 4 * len(list(model.parameters())), "every gradient once, and a flag each"
    assert len(world.collectives) <= 1.35 * total / (256 * MIB)
    assert world.most_in_flight == 2
    assert not world.in_flight
    assert 256 * MIB < world.most_copied_bytes <= 512 * MIB
    alone = rank_memory(spec, Recipe(precision="fp32"), sync="iteration", ranks=2, on_cpu=True)
    (moment,) = (one for one in alone.moments if one.name == "gradient reduction")
    counted = next(item.fixed_bytes for item in moment.items if item.name == "gradient message")
    assert counted >= world.most_copied_bytes


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_sums_reach_every_gradient_that_a_rank_has_and_no_other(layout: str) -> None:
    model = nn.ParameterList(torch.zeros(3, 4) for _ in range(3))
    model.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))  # a bucket to itself: another type
    sync = PlainSync(model, CountedWorld())
    given = [torch.arange(12.0).view(3, 4), None, torch.ones(4, 3).t() if layout == "transposed" else torch.ones(3, 4)]
    expected = [None if one is None else 2 * one for one in given]
    for parameter, gradient in zip(model, (*given, torch.ones(2, dtype=torch.float64)), strict=True):
        parameter.grad = gradient
    sync.reduce()
    for parameter, total in zip(model, (*expected, torch.full((2,), 2.0, dtype=torch.float64)), strict=True):
        if total is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, total)


def test_a_gradient_that_only_another_rank_has_is_created() -> None:
    class OtherHasAll(CountedWorld):
        def all_reduce_sum(self, tensor: Tensor) -> None:
            tensor.add_(1)

    world = OtherHasAll()
    assert present_anywhere([None, torch.ones(1)], world, torch.device("cpu")) == [True, True]
    model = nn.ParameterList(torch.zeros(3) for _ in range(2))
    sync = PlainSync(model, world)
    sync.reduce()
    assert all(parameter.grad is not None and parameter.grad.storage_offset() == 0 for parameter in model)
