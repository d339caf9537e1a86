"""Checks of a training loop that abort it at the first step that would train incorrectly.

All checks run on the host: counters, hooks on the loss, and one all-reduced number a step. They cost a few microseconds
per micro-batch (`python -m benchmarks.guards`).
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcp_cli.errors import RunError
from fcp_cli.plan.step import MicroBatch
from fcp_cli.runtime.choices import OnNan
from fcp_cli.runtime.gradients import GradientSync
from fcp_cli.runtime.loader import Shard
from fcp_cli.runtime.metrics import Clock
from fcp_cli.runtime.rank_agreement import SameData
from fcp_cli.runtime.ring import Ring
from fcp_cli.runtime.transport import World, rank_timeout

NO_BACKWARD = (
    "no backward of its loss was run: gradients are summed over ranks when the loop over the step ends, so call "
    "backward inside it, for every micro-batch"
)
OTHER_LOSS = (
    "backward was called on a loss that the micro-batch did not make, and a mean of a rank's own weighs tokens by how "
    "the plan packed them: use microbatch.loss(logits), or microbatch.normalised(sum of token losses)"
)


class Guards:
    """Checks of one call of `Session.steps`.

    Attributes:
        sync: gradient reducer.
        on_nan: reaction to a loss that is not finite.
    """

    def __init__(
        self,
        world: World,
        sync: GradientSync,
        *,
        model: nn.Module | GradientSync | None,
        on_nan: OnNan,
        losses: LossWatch,
    ) -> None:
        self.sync = sync
        self.on_nan = on_nan
        self._world = world
        self._losses = losses
        self._most_forwards = self._most_backwards = 0
        self._passes: PassAgreement | None = PassAgreement(world)
        self._is_model_missing = model is None
        self._is_walked = world.size == 1  # with one rank, nothing is reduced

    def place(self, step: int, row: MicroBatch) -> str:
        """Return step, micro-batch and rank, for messages."""
        return f"step {step}, micro-batch {row.order}, rank {self._world.rank}"

    def same_data(self, step: int, shards: tuple[Shard, ...]) -> SameData | None:
        """Start to compare the sequences of each ring over its ranks; return None if there is one rank."""
        if self._world.size == 1:
            return None
        return SameData(self._world, step, [shard.digest for shard in shards if shard.digest is not None])

    def expect_as_before(self, ring: Ring, order: int) -> None:
        """Limit a ring's passes to the counts of earlier micro-batches, since ranks that differ would deadlock."""
        ring.context.most_forwards, ring.context.most_backwards = self._most_forwards, self._most_backwards
        if self._passes is not None:
            self._passes.watch(ring, order)

    def note_forwards(self, ring: Ring) -> None:
        """Record the forwards of a finished micro-batch."""
        self._most_forwards = max(self._most_forwards, ring.context.forward_calls)

    def note_backwards(self, rings: Iterable[Ring]) -> None:
        """Record the backwards of a finished step, since a loop may defer them to its end."""
        if self._passes is not None:
            # Later steps are compared with the counts of this one, without messages.
            self._passes.end_step()
            self._passes = None
        self._most_backwards = max(self._most_backwards, *(ring.context.backward_calls for ring in rings))

    def poll_losses(self) -> None:
        """Raise RunError if a loss of an earlier micro-batch turned out not to be finite."""
        self._losses.poll()

    def check_loss(self, place: str, row: MicroBatch, loss_sum: Tensor, loss: Tensor) -> None:
        """Check a loss that a micro-batch computed.

        Args:
            place, row: place and row of the micro-batch.
            loss_sum: sum of its token losses (0-d, detached).
            loss: this rank's share of the step's loss.
        """
        if self.on_nan == "stop":
            self._losses.check(place, row.sequences, loss_sum)
        if not self._is_walked and loss.requires_grad:
            self._is_walked = True
            summed = self.sync.summed()
            if summed is not None or self._is_model_missing:
                ids = None if summed is None else frozenset(map(id, summed))
                require_summed(loss, ids, ranks=self._world.size, place=place)

    def is_skipped(self, losses: list[Tensor], device: torch.device) -> bool:
        """Return whether to skip the step: under `skip-step`, if any rank's loss is not finite. Every rank calls it."""
        if self.on_nan != "skip-step":
            return False
        bad = torch.zeros(1, device=device)
        for loss in losses:
            bad += ~torch.isfinite(loss)
        self._world.all_reduce_sum(bad)
        return bool(bad.item())


# Detect a NaN or infinite loss before it has cost more than a step.
#
# On the CPU a loss is checked when it is computed. On a device that would block the host in every micro-batch, so its
# value is copied asynchronously and checked once it has arrived: in a later micro-batch, at the latest in the next
# step.

_ROWS_NAMED = 4


class _Copy(NamedTuple):
    place: str
    rows: tuple[int, ...]
    value: Tensor
    mark: Any


class LossWatch:
    """Stops a rank at its first loss that is not finite.

    Args:
        clock: clock of the session, which tells how far the device is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: deque[_Copy] = deque()

    def check(self, place: str, rows: tuple[int, ...], loss_sum: Tensor) -> None:
        """Check a loss (0-d, detached), immediately or once the device has computed it.

        Args:
            place: step, micro-batch and rank, for the message.
            rows: rows of the data in the micro-batch.
            loss_sum: sum of this rank's token losses.
        """
        if loss_sum.device.type == "cpu":
            _require_finite(place, rows, loss_sum)
            return
        # Pinned, or the copy would block the host.
        value = torch.empty_like(loss_sum, device="cpu", pin_memory=loss_sum.device.type == "cuda")
        value.copy_(loss_sum, non_blocking=True)
        self._under_way.append(_Copy(place, rows, value, self._clock.mark()))

    def poll(self) -> None:
        """Raise RunError if a loss that has arrived is not finite; never wait."""
        while self._under_way and self._clock.has_passed(self._under_way[0].mark):
            copy = self._under_way.popleft()
            _require_finite(copy.place, copy.rows, copy.value)


def _require_finite(place: str, rows: tuple[int, ...], loss_sum: Tensor) -> None:
    value = float(loss_sum)
    if math.isfinite(value):
        return
    named = ", ".join(map(str, rows[:_ROWS_NAMED])) + (", ..." if len(rows) > _ROWS_NAMED else "")
    raise RunError(
        f"{place}: the loss is {value} (rows {named} of the data); look at these rows, lower the learning rate, or "
        "skip such steps with on_nan='skip-step' (--on-nan skip-step)"
    )


# Compare attention passes over the ranks of a ring in the first step of a loop, before each pass begins.
#
# In later steps a rank knows how often the loop runs attention on a ring, and raises at an extra pass
# (`Guards.expect_as_before`). In the first step it can only ask the other ranks: if only some of them ran a pass, they
# would take the hops of another pass for its own, and hang at the last. So each rank announces a pass to the next rank
# of its ring, between hosts, and waits for the announcement of the previous rank. Later steps have no such cost.

_END = "end"
_KINDS = ("forward", "backward", "recomputed forward", _END)


class PassAgreement:
    """Attention passes of one rank in the first step of a loop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._orders: dict[Ring, int] = {}  # index of the micro-batch of each ring in use

    def watch(self, ring: Ring, order: int) -> None:
        """Compare the passes on a micro-batch's ring from now on, if it has several ranks."""
        if ring.degree > 1:
            self._orders[ring] = order
            ring.context.begin_pass = partial(self.begin, ring)

    def begin(self, ring: Ring, kind: str, number: int) -> None:
        """Raise RunError unless the previous rank begins the same pass. All ranks of a ring call it before each pass.

        Args:
            ring: ring of the micro-batch.
            kind: `forward`, `backward` or `recomputed forward`.
            number: number of the pass among those of its kind on this ring.
        """
        # Orders count from 1, so that zeros mean no announcement.
        mine = (self._orders[ring] + 1, _KINDS.index(kind), number)
        before = ring.ranks[ring.index - 1]
        theirs = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._world.swap(torch.tensor(mine, device="cpu"), ring.ranks[(ring.index + 1) % ring.degree], theirs, before)
        if theirs[0] and tuple(theirs.tolist()) != mine:  # simulated ranks do not answer
            raise RunError(
                f"{ring.place}: this rank {_named(mine, mine[0])} of attention, but rank {before} of its ring "
                f"{_named(tuple(theirs.tolist()), mine[0])}: run the model equally often in each micro-batch on every "
                "rank, and passes that only some ranks need in 'with fcp.outside():'"
            )

    def end_step(self) -> None:
        """Raise RunError if ranks of any ring run further passes on it.

        Called once per step rather than per micro-batch: a rank whose last backward reduces gradients stays in it until
        the others have run theirs, and a loop may defer its backwards.
        """
        for ring in list(self._orders):
            self.begin(ring, _END, 0)
            ring.context.begin_pass = None
            del self._orders[ring]


def _named(told: tuple[int, ...], order: int) -> str:
    where, kind, number = told
    place = "" if where == order else f" in micro-batch {where - 1}"
    return f"runs no more{place}" if _KINDS[kind] == _END else f"begins {_KINDS[kind]} {number}{place}"


# Report a rank that has waited too long: its step, its ring, and the ranks it waits for.
#
# Rings block silently: a rank whose neighbour never comes aborts minutes later with the name of a collective. A
# background thread watches the progress of the device, and prints a line before the timeout. In a job that hangs each
# rank prints one, and the rank in the earliest micro-batch is the straggler.

_SHARE = 0.9  # of the timeout, after which the line is printed
_LOOKS = 20  # polls of the device within that time


@dataclass(slots=True, eq=False)
class _WatchedPart:
    """A micro-batch, or the gradient reduction of a step (without `row`); `end` is None while the host is in it."""

    step: int
    row: MicroBatch | None
    end: Any = None


class Watch:
    """Stall reporter of one rank. The training loop calls `begin` and `end`; a thread does the rest.

    Args:
        rank: rank in the plan.
        clock: clock of the session.
        seconds: time in one part of a step after which to report.
        report: receives the line.
    """

    def __init__(self, rank: int, clock: Clock, seconds: float, report: Callable[[str], None]) -> None:
        self._rank, self._clock, self._seconds, self._report = rank, clock, seconds, report
        self._places: deque[_WatchedPart] = deque()
        self._latest: _WatchedPart | None = None
        self._seen: _WatchedPart | None = None
        self._since, self._is_told = 0.0, False
        self._stop = threading.Event()

    def start(self) -> None:
        """Start watching, until `stop` or until the watch is garbage-collected."""
        weakref.finalize(self, self._stop.set)
        given = (weakref.ref(self), self._clock, self._stop, self._seconds / _LOOKS)
        threading.Thread(target=_watch, args=given, name="fcp-watch", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def begin(self, step: int, row: MicroBatch | None) -> None:
        """Record the start of a micro-batch with its ranks in ring order, or (None) of a step's gradient reduction.

        It ends the previous one, unless `end` has.
        """
        self.end()
        self._latest = _WatchedPart(step, row)
        self._places.append(self._latest)

    def end(self, mark: Any = None) -> None:
        """Record that the host has left the latest micro-batch, if any, at a mark of the clock or now."""
        if self._latest is not None and self._latest.end is None:
            self._latest.end = self._clock.mark() if mark is None else mark

    def forget(self) -> None:
        """Drop all micro-batches, since the training loop was abandoned."""
        self._places.clear()
        self._latest = None

    def poll(self, now: float) -> None:
        """Report the device's current part once if it has lasted too long at `now` (monotonic seconds)."""
        places = self._places
        # Runs in the watch's thread while the loop appends: single deque operations are atomic.
        while places and places[0].end is not None and self._clock.has_passed(places[0].end):
            places.popleft()
        place = places[0] if places else None
        if place is not self._seen:
            self._seen, self._since, self._is_told = place, now, False
        elif place is not None and not self._is_told and now - self._since > self._seconds:
            self._is_told = True
            self._report(_line(self._rank, place, now - self._since))


def _watch(watched: weakref.ref[Watch], clock: Clock, stop: threading.Event, every_seconds: float) -> None:
    clock.enter_thread()
    while not stop.wait(every_seconds):
        if (watch := watched()) is None:
            return
        watch.poll(time.monotonic())
        del watch  # or the thread would keep it alive


def _line(rank: int, place: _WatchedPart, seconds: float) -> str:
    begun = f"rank {rank} has been in step {place.step} for {seconds:.0f} s"
    if place.row is None:
        return f"{begun}, at the sum of gradients over all ranks: one that is not there yet holds the others up"
    ranks = place.row.ranks
    where = f"{begun}, in micro-batch {place.row.order}"
    if len(ranks) == 1:
        return f"{where}, which it runs alone: it computes for long, or waits for all ranks' weights or gradients"
    at, shared = ranks.index(rank), place.row.heads_degree
    ring, first = ranks[at % shared :: shared], at - at % shared
    sharing = [other for other in ranks[first : first + shared] if other != rank]
    among = f", sharing heads with {_and(sharing)}" if sharing else ""
    if len(ring) > 1:
        among += (
            f", next to {_and(dict.fromkeys((ring[at // shared - 1], ring[(at // shared + 1) % len(ring)])))} in the "
        )
        among += f"ring of {', '.join(map(str, ring))}"
    return f"{where}{among}: the one in the earliest micro-batch holds the others up"


def _and(ranks: Iterable[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def watch_for(rank: int, clock: Clock, device: torch.device) -> Watch:
    """Return a watch that reports on stderr before the job's timeout."""
    seconds = _SHARE * rank_timeout(device).total_seconds()
    return Watch(rank, clock, seconds, lambda line: print(f"fcp: {line}", file=sys.stderr, flush=True))


# Verify at the first loss that the gradients of every weight it trains are reduced over ranks.

_NO_MODEL = (
    "steps() was given no model, so nothing sums the gradients of {name} over the {ranks} ranks: pass the model to "
    "steps(), or, where the script sums them itself, fcp_cli.runtime.GradientSync()"
)
_OTHER_MODEL = (
    "the loss trains {name}, which is not in the model given to steps(), so its gradients would not be summed over the "
    "{ranks} ranks: give steps() one module that holds all that is trained, for example an nn.ModuleList of them"
)


def require_summed(loss: Tensor, summed: frozenset[int] | None, *, ranks: int, place: str) -> None:
    """Raise RunError if a loss trains a weight whose gradients are not reduced.

    Args:
        loss: loss with its graph, which is walked once: a few microseconds per node.
        summed: ids of the parameters whose gradients are reduced, or None if there are none.
        ranks: number of ranks of the job.
        place: step, micro-batch and rank, for the message.
    """
    for parameter in _trained_by(loss):
        if summed is None or id(parameter) not in summed:
            said = _NO_MODEL if summed is None else _OTHER_MODEL
            raise RunError(f"{place}: {said.format(name=_name(parameter), ranks=ranks)}")


def _trained_by(loss: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters in a loss's graph, except inside reentrant checkpoints, which have no graph yet."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        # Only nodes that accumulate a leaf's gradient have a `variable`.
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            yield variable
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following


def _name(parameter: nn.Parameter) -> str:
    """Return the longest name of a parameter in any module of this process."""
    best = f"a weight of shape {list(parameter.shape)}"
    depth = -1
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):  # isinstance would resolve lazy proxies
            continue
        for name, found in module.named_parameters():
            if found is parameter and name.count(".") > depth:
                depth, best = name.count("."), f"{name} of a {type(module).__name__}"
    return best
