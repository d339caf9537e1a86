"""The exact run of pipelines: against devices that step through time on their own, and against what is known of 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from fcp_cli.plan.simulation.pipeline import Pipelines, better_places, device_order, run


def pipelines(
    groups: Sequence[Sequence[int]],
    forward: Sequence[float] | np.ndarray,
    *,
    stages: int,
    chunks: int = 1,
    ratio: float = 2.0,
    sends: float = 0.0,
    num_ranks: int | None = None,
) -> Pipelines:
    """Micro-batches of these forward seconds per stage on these replicas, shared evenly by the stage's chunks."""
    blocks = stages * chunks
    each = np.asarray(forward, dtype=np.float64)
    seconds = np.repeat(each[:, None], blocks, axis=1) / chunks if each.ndim == 1 else each
    ranks = [rank for group in groups for rank in group]
    return Pipelines(
        stages=stages,
        chunks=chunks,
        num_ranks=num_ranks or max(ranks) + 1,
        rank_offsets=np.cumsum([0, *(len(group) for group in groups)]),
        ranks=np.array(ranks, dtype=np.int32),
        forward_seconds=seconds,
        backward_seconds=ratio * seconds,
        send_seconds=np.full(len(groups), sends),
    )


class Devices:
    """Devices that each know their own list of work, and are asked in turn whether the next of it can begin.

    Nothing here is shared with the simulation but its input: what a device runs, it works out from Megatron's rule, and
    times come from asking again and again.
    """

    def __init__(self, step: Pipelines) -> None:
        self.step = step
        groups = [
            step.ranks[step.rank_offsets[i] : step.rank_offsets[i + 1]].tolist() for i in range(len(step.send_seconds))
        ]
        self.groups = groups
        self.work = {
            (rank, stage): list(self.one_f_one_b([i for i, group in enumerate(groups) if rank in group], stage))
            for rank in range(step.num_ranks)
            for stage in range(step.stages)
        }
        self.at = dict.fromkeys(self.work, 0)
        self.free = dict.fromkeys(self.work, 0.0)  # when a device's last piece of work and its message are over
        self.ends: dict[tuple[str, int, int], float] = {}

    def one_f_one_b(self, microbatches: list[int], stage: int) -> Iterator[tuple[str, int]]:
        ahead = min(self.step.stages - 1 - stage, len(microbatches))
        yield from (("F", i) for i in microbatches[:ahead])
        for q, i in enumerate(microbatches[ahead:]):
            yield from (("F", i), ("B", microbatches[q]))
        yield from (("B", i) for i in microbatches[len(microbatches) - ahead :])

    def makespan(self) -> float:
        """Run everything; infinite where nobody can go on."""
        while any(self.at[device] < len(work) for device, work in self.work.items()):
            if not sum(self.step_on(kind, i, stage) for kind, i, stage in self.next_up()):
                return float("inf")
        return max(self.ends.values())

    def next_up(self) -> set[tuple[str, int, int]]:
        return {
            (*work[self.at[rank, stage]], stage)
            for (rank, stage), work in self.work.items()
            if self.at[rank, stage] < len(work)
        }

    def step_on(self, kind: str, i: int, stage: int) -> bool:
        """Run a piece of work if all its replicas have come to it, and what it needs is over."""
        devices = [(rank, stage) for rank in self.groups[i]]
        if any(not self.is_next(device, kind, i) for device in devices):
            return False
        source = stage - 1 if kind == "F" else stage + 1
        first = kind == "F" and stage == 0
        turns = kind == "B" and stage == self.step.stages - 1
        before = 0.0
        if turns:
            if ("F", i, stage) not in self.ends:
                return False
            before = self.ends["F", i, stage]
        elif not first:
            if (kind, i, source) not in self.ends:
                return False
            send = float(self.step.send_seconds[i])
            sent = max(self.ends[kind, i, source], *(self.computed(device) for device in devices)) + send
            before = sent
        begin = max(before, *(self.released(device) for device in devices))
        if begin == float("inf"):
            return False
        seconds = self.step.forward_seconds if kind == "F" else self.step.backward_seconds
        self.ends[kind, i, stage] = begin + seconds[i, stage]
        for device in devices:
            self.at[device] += 1
        return True

    def is_next(self, device: tuple[int, int], kind: str, i: int) -> bool:
        at, work = self.at[device], self.work[device]
        return at < len(work) and work[at] == (kind, i)

    def computed(self, device: tuple[int, int]) -> float:
        """When the device's last piece of work was over, and it came to receive."""
        at = self.at[device]
        kind, i = self.work[device][at - 1] if at else ("", 0)
        return self.ends[kind, i, device[1]] if at else 0.0

    def released(self, device: tuple[int, int]) -> float:
        """When its last message is through: the receiver had come for it; infinite where it has not yet."""
        at, (rank, stage) = self.at[device], device
        if at == 0:
            return 0.0
        kind, i = self.work[device][at - 1]
        end = self.ends[kind, i, stage]
        target = stage + 1 if kind == "F" else stage - 1
        if not 0 <= target < self.step.stages:
            return end
        theirs = self.work[rank, target].index((kind, i))
        if theirs == 0:
            return end + float(self.step.send_seconds[i])
        before = (*self.work[rank, target][theirs - 1], target)
        return max(end, self.ends.get(before, float("inf"))) + float(self.step.send_seconds[i])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_replica_takes_as_long_as_devices_that_step_through_time(stages: int, count: int) -> None:
    """All orders of micro-batches of unlike lengths; with messages that take time."""
    rng = np.random.default_rng(10 * stages + count)
    forward = rng.uniform(0.2, 3.0, (count, stages))
    for order in itertools.permutations(range(count)):
        step = pipelines([[0]] * count, forward[list(order)], stages=stages, sends=0.13)
        assert run(step).makespan_seconds == pytest.approx(Devices(step).makespan(), rel=1e-12)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_rings_between_replicas_take_as_long_as_devices_that_wait_for_each_other(stages: int) -> None:
    rng = np.random.default_rng(stages)
    stuck = 0
    for _ in range(60):
        groups = [sorted(rng.choice(3, rng.integers(1, 4), replace=False).tolist()) for _ in range(5)]
        step = pipelines(groups, rng.uniform(0.2, 3.0, 5), stages=stages, sends=0.1, num_ranks=3)
        expected = Devices(step).makespan()
        found = run(step)
        assert found.makespan_seconds == pytest.approx(expected, rel=1e-12)
        assert bool(len(found.stuck)) == np.isinf(expected)
        stuck += np.isinf(expected)
    assert 0 < stuck < 60


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_equal_micro_batches_wait_p_minus_one_of_them(stages: int, count: int) -> None:
    """The known law: a bubble of (P - 1) / m of the work."""
    found = run(pipelines([[0]] * count, [1.0] * count, stages=stages)).makespan_seconds
    assert found == pytest.approx(3.0 * (count + stages - 1))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_divide_the_bubble(chunks: int) -> None:
    """Interleaved, the bubble of equal micro-batches is (P - 1) / (m V)."""
    found = run(pipelines([[0]] * 8, [1.0] * 8, stages=4, chunks=chunks)).makespan_seconds
    assert found == pytest.approx(3.0 * (8 + 3 / chunks))


def test_replicas_that_meet_at_two_rings_with_work_between_on_one_side_wait_for_ever() -> None:
    """Replica 0 runs the second ring's forward before the first's backward; replica 1, with more work between, after."""
    rings = [[0, 1], [1], [0, 1]]
    assert run(pipelines(rings, [1.0] * 3, stages=2)).stuck.tolist() == [0, 1, 2]
    assert not len(run(pipelines([[0, 1], [0], [1], [0, 1]], [1.0] * 4, stages=2)).stuck)
    assert not len(run(pipelines(rings, [1.0] * 3, stages=1)).stuck)


@pytest.mark.parametrize(("stages", "chunks", "waves"), [(2, 2, 4), (2, 3, 2), (4, 2, 8)])
def test_with_virtual_stages_replicas_with_equally_many_micro_batches_never_wait_for_ever(
    stages: int, chunks: int, waves: int
) -> None:
    """Waves of rings over any ranks; as soon as one replica has a round of micro-batches more, two rings are enough."""
    rng = np.random.default_rng(stages * chunks)
    for _ in range(20):
        groups = [group for _ in range(waves) for group in np.split(rng.permutation(5), sorted(rng.choice(6, 2)))]
        whole = [sorted(group.tolist()) for group in groups if len(group)]
        assert not len(run(pipelines(whole, rng.uniform(0.1, 3.0, len(whole)), stages=stages, chunks=chunks)).stuck)
    unequal = [[0, 1], *([1] for _ in range(stages)), *([0, 1] for _ in range(stages - 1))]
    assert len(run(pipelines(unequal, [1.0] * len(unequal), stages=stages, chunks=chunks)).stuck)


@pytest.mark.parametrize("chunks", [1, 2])
def test_swaps_keep_waves_and_end_steps_sooner(chunks: int) -> None:
    """Four waves of three replicas, a ring of two in each of the first two, in which every replica stays once."""
    rng = np.random.default_rng(chunks)
    groups = [[0, 1], [2], [0], [1, 2], *([rank] for rank in (0, 1, 2, 0, 1, 2))]
    gained = 0
    for _ in range(20):
        step = pipelines(groups, rng.uniform(0.1, 3.0, len(groups)), stages=2, chunks=chunks)
        waves = better_places(step, reach=2, most_runs=100)
        assert all(
            sorted(waves[i] for i, group in enumerate(groups) if rank in group) == [0, 1, 2, 3] for rank in range(3)
        )
        order = np.argsort(waves, kind="stable")
        swapped = replace(
            pipelines([groups[i] for i in order], [0.0] * len(groups), stages=2, chunks=chunks),
            forward_seconds=step.forward_seconds[order],
            backward_seconds=step.backward_seconds[order],
        )
        before, after = run(step).makespan_seconds, run(swapped).makespan_seconds
        assert after <= before
        gained += after < 0.99 * before
    assert gained > 10


def test_device_orders_are_those_of_megatron() -> None:
    per = 2 * 4
    order = device_order(4, 1, 5)
    named = [["FB"[code % 2] + str(code // per) for code in row] for row in order.tolist()]
    assert named[0] == ["F0", "F1", "F2", "F3", "B0", "F4", "B1", "B2", "B3", "B4"]
    assert named[3] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4"]
    interleaved = device_order(2, 2, 2)[1].tolist()  # blocks 1 and 3
    assert [(code // 8, code % 8 // 2, "FB"[code % 2]) for code in interleaved] == [
        (0, 1, "F"), (1, 1, "F"), (0, 3, "F"), (0, 3, "B"), (1, 3, "F"), (1, 3, "B"), (0, 1, "B"), (1, 1, "B"),
    ]  # fmt: skip
