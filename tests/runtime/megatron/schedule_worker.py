"""megatron-core's interleaved schedule on stages that are threads, whose exchanges of lengths and tensors block.

Its own code runs. Every message waits until the other side has asked for it, as over NCCL, and each is preceded by one
with its length, as under a plan. Run as `-m tests.runtime.megatron.schedule_worker STAGES,CHUNKS,MICROBATCHES,KIND ...`;
prints as JSON whether each comes to its end.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from tests.runtime.megatron.cpu_shim import on_cpu

ONE_AT_A_TIME = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "one": ONE_AT_A_TIME,
    "ahead": {**ONE_AT_A_TIME, "overlap_p2p_comm_warmup_flush": True},
    "both": {"overlap_p2p_comm": False, "batch_p2p_comm": True},
}


class CircleError(Exception):
    """All stages that have work left wait for a message that none of them sends or receives."""


@dataclass(slots=True)
class Message:
    """One side of it."""

    is_met: bool = False


@dataclass(slots=True)
class Wires:
    """Messages between stages; each is over when both sides have asked for it."""

    running: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    open: dict[tuple[Any, ...], deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    waiting: dict[int, list[Message]] = field(default_factory=dict)

    def ask(self, side: str, *wire: Any) -> Message:
        """One side of the next message on a wire."""
        message = Message()
        mine, theirs = (side, *wire), ("recv" if side == "send" else "send", *wire)
        with self.changed:
            if self.open[theirs]:
                self.open[theirs].popleft().is_met = message.is_met = True
                self.changed.notify_all()
            else:
                self.open[mine].append(message)
        return message

    def wait(self, messages: list[Message]) -> None:
        with self.changed:
            self.waiting[threading.get_ident()] = messages
            while not all(message.is_met for message in messages):
                if self.is_circle():
                    self.changed.notify_all()
                    raise CircleError
                self.changed.wait(timeout=60.0)
            del self.waiting[threading.get_ident()]

    def is_circle(self) -> bool:
        held_up = [messages for messages in self.waiting.values() if not all(message.is_met for message in messages)]
        return len(held_up) == self.running

    def end(self) -> None:
        with self.changed:
            self.running -= 1
            self.waiting.pop(threading.get_ident(), None)
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class Group:
    """What the schedule asks a process group."""

    of: int
    at: int

    def size(self) -> int:
        return self.of

    def rank(self) -> int:
        return self.at


class Handle:
    def __init__(self, wires: Wires, message: Message) -> None:
        self.wires, self.message = wires, message

    def wait(self) -> None:
        self.wires.wait([self.message])


class Stage(P2PCommunicator):  # type: ignore[misc]  # megatron-core has no types
    """Megatron's, over `Wires`: lengths first, for which it waits, then tensors."""

    def __init__(self, wires: Wires, group: Group, config: Any) -> None:
        self.wires, self.pp_group, self.config = wires, group, config
        self.before, self.after = (group.at - 1) % group.of, (group.at + 1) % group.of
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp_group.at == self.pp_group.of - 1

    def _communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, Any]:
        here = self.pp_group.at
        wanted = {
            "send_prev": (tensor_send_prev is not None, "send", here, self.before),
            "recv_prev": (recv_prev, "recv", self.before, here),
            "send_next": (tensor_send_next is not None, "send", here, self.after),
            "recv_next": (recv_next, "recv", self.after, here),
        }
        asked: dict[str, Message] = {}
        for what in ("length", "tensor"):
            asked = {name: self.wires.ask(side, what, a, b) for name, (is_on, side, a, b) in wanted.items() if is_on}
            if what == "length" or wait_on_reqs:
                self.wires.wait(list(asked.values()))
        came = [torch.ones(2, 1, 1, requires_grad=True) if is_on else None for is_on in (recv_prev, recv_next)]
        handles = {name: Handle(self.wires, message) for name, message in asked.items()}
        return came[0], came[1], None if wait_on_reqs else handles


class Block(torch.nn.Module):
    """A chunk of a model of one number."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model_type, self.came = config, None, None
        self.weight = torch.nn.Parameter(torch.ones(()))

    def set_input_tensor(self, came: Any) -> None:
        self.came = came[0] if isinstance(came, list) else came


def forward_step(data_iterator: Any, block: Block) -> Any:
    given = torch.ones(2, 1, 1) if block.came is None else block.came
    return given * block.weight, lambda out: (out.sum(), torch.tensor(1, dtype=torch.int), {})


def ends(stages: int, chunks: int, microbatches: int, kind: str) -> bool:
    """Whether the schedule comes to its end on all stages."""
    config = tiny.config(
        num_layers=stages * chunks,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks,
        **KINDS[kind],
    )
    wires, errors = Wires(stages), list[BaseException]()

    def run(at: int) -> None:
        alone, group = Group(1, 0), Group(stages, at)
        try:
            with on_cpu():
                schedules.forward_backward_pipelining_with_interleaving(
                    forward_step_func=forward_step,
                    data_iterator=[None] * chunks,
                    model=[Block(config) for _ in range(chunks)],
                    num_microbatches=microbatches,
                    seq_length=2,
                    micro_batch_size=1,
                    p2p_communicator=Stage(wires, group, config),
                    pg_collection=SimpleNamespace(tp=alone, cp=alone, embd=None, pos_embd=None, pp=group, dp_cp=alone),
                )
        except BaseException as error:
            errors.append(error)
        finally:
            if not errors:
                wires.end()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120.0)
    for error in errors:
        if not isinstance(error, CircleError):
            raise error
    return not errors and not wires.running


def main(wanted: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    schedules.is_pp_first_stage = lambda group: group.at == 0
    schedules.is_pp_last_stage = lambda group: group.at == group.of - 1
    found = {}
    for words in wanted:
        *sizes, kind = words.split(",")
        stages, chunks, microbatches = map(int, sizes)
        found[words] = ends(stages, chunks, microbatches, kind)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
