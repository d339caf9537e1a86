"""Steps on ranks of different speeds: planned for equal speeds, then adapted.

The compiled searches assume equal speeds. A rank of speed s does in T seconds the work that another does in s T, so a
dummy pack of (1 - s) T seconds would make it equal to the others. Under `iteration` the batch gets such a pack for each
slow rank, and the rank to which the search gives a dummy pack takes the slow rank's place. Under `microbatch`, the
lightest packs of each wave go to its slowest ranks. If few ranks are slow, plans for the fast ranks alone compete.
Finally, sequences are exchanged between the rank that ends last and others, at their real speeds, and the answer with
the shortest predicted makespan wins.

`read_rank_speeds` reads the speeds from an option or a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from fcp_cli.cost.model import WindowWork, Work, joined
from fcp_cli.errors import UsageError
from fcp_cli.plan.pricing import list_schedule
from fcp_cli.plan.setup import QUICKEST, SLOWEST, Speeds, slowest_speeds
from fcp_cli.plan.step import offsets_of, sizes_of
from fcp_cli.planning.assemble import assignment_seconds, makespan_seconds
from fcp_cli.planning.bounds import lower_bound_seconds
from fcp_cli.planning.options import PlanRequest
from fcp_cli.planning.problem import Assignment, Batch, Problem
from fcp_cli.util.arrays import FloatArray, Int32Array, IntArray
from fcp_cli.util.inputs import parse_yaml, read_text

_MOST_EXCHANGES: Final = 512  # per step or wave
_LEAST_GAIN: Final = 1e-5  # relative gain of the last rank below which exchanging stops

_CLOSE_ENOUGH: Final = 0.01  # gap to the proven bound at which no further prices of hops are tried
_MOST_SLOW: Final = 0.25  # largest share of slow ranks for which the fast ones are planned alone
_HOPS: Final = 0.0, 1 / 128, 1 / 32, 1 / 8  # shares of the step time added to a ring hop, tried in turn

AnyInts: TypeAlias = IntArray | Int32Array


Solve: TypeAlias = Callable[[int, float, Batch], Assignment]
"""Plans a batch for so many ranks of speed 1, with rings whose hops take so many seconds more."""


def assign_at_speeds(batch: Batch, problem: Problem, speeds: Speeds, solve: Solve) -> Assignment:
    """Plan one step on ranks of these speeds.

    A slow rank delays its whole ring, so dearer ring hops are tried, too: they make the search prefer narrower rings.

    Args:
        batch, problem: the global batch, and the problem with `rank_speeds`.
        speeds: [ranks].
        solve: plans for ranks of speed 1.
    """
    each = np.array(speeds)
    enough = lower_bound_seconds(batch.work, problem) * (1.0 + _CLOSE_ENOUGH)
    best, seconds, step_seconds = None, np.inf, 0.0
    for share in _HOPS:
        even = solve(problem.num_ranks, share * step_seconds, batch)
        # Set by the first pass, whose share is 0.
        step_seconds = step_seconds or makespan_seconds(even, batch, problem)
        tried = _candidates(even, batch, problem, each, partial(solve, problem.num_ranks, share * step_seconds))
        for one in chain(_fast_ranks_only(batch, problem, each, solve), tried) if not share else tried:
            if (takes := makespan_seconds(one, batch, problem)) < seconds:
                best, seconds = one, takes
        if seconds <= enough or problem.pipeline is not None:
            break
    assert best is not None, "the first answer is always one"
    return best


def _fast_ranks_only(batch: Batch, problem: Problem, speeds: FloatArray, solve: Solve) -> Iterator[Assignment]:
    """Yield a step that uses only the fast ranks, and the same with some work moved to the slow ones."""
    slow = np.flatnonzero(speeds < speeds.max())
    num_ranks = problem.num_ranks - len(slow)
    holds = num_ranks * problem.tokens_per_rank >= int(batch.work.tokens.max())
    if problem.pipeline is not None or not holds or len(slow) > _MOST_SLOW * problem.num_ranks:
        return
    node = np.arange(problem.num_ranks) // problem.ranks_per_node
    lacking = np.bincount(node[slow], minlength=int(node[-1]) + 1)
    names = np.lexsort((node, lacking[node], speeds < speeds.max()))[:num_ranks]  # whole nodes first
    found = _renamed(solve(num_ranks, 0.0, batch), names[None, :])
    yield found
    yield exchanged(found, batch, problem, speeds)


def _candidates(
    even: Assignment, batch: Batch, problem: Problem, speeds: FloatArray, solve: Callable[[Batch], Assignment]
) -> Iterator[Assignment]:
    yield even
    placed = _by_load(even, batch, problem, speeds)
    yield placed
    if problem.pipeline is not None:  # exchanges balance sums of seconds, which do not time a pipeline
        return
    yield exchanged(placed, batch, problem, speeds)
    if problem.sync == "iteration":
        alike = replace(problem, rank_speeds=None)
        target = makespan_seconds(even, batch, alike) * problem.num_ranks / float((speeds / speeds.max()).sum())
        for one in _with_dummy_packs(batch, problem, speeds, target, solve):
            yield one
            yield exchanged(one, batch, problem, speeds)


def _with_dummy_packs(
    batch: Batch, problem: Problem, speeds: FloatArray, target: float, solve: Callable[[Batch], Assignment]
) -> Iterator[Assignment]:
    """Yield steps in which slow ranks have less work, by the capacity that they lack in `target` seconds."""
    # Less the fixed seconds, which the dummy pack pays as a micro-batch.
    lost = target * (1.0 - speeds / speeds.max()) - problem.profile.coefficients.microbatch_seconds
    slow = np.flatnonzero(lost > 0)
    if not len(slow):
        return
    slow = slow[np.argsort(-lost[slow], kind="stable")]
    found = solve(_with_packs(batch, lost[slow], problem.tokens_per_rank))
    n = len(batch.rows)
    groups = np.repeat(np.arange(len(found.wave)), sizes_of(found.member_offsets))
    group_of = np.empty(len(found.members), dtype=np.int64)
    group_of[found.members] = groups
    held, ranks = group_of[n:], found.ranks[found.rank_offsets[group_of[n:]]]
    if (sizes_of(found.rank_offsets)[held] != 1).any() or len(np.unique(ranks)) < len(slow):
        return  # a dummy pack in a ring, or two of them on one rank
    real = _gathered(found.wave, sizes_of(found.rank_offsets), found.ranks, group_of[:n])
    names = np.arange(problem.num_ranks)
    for rank, holder in zip(slow.tolist(), ranks.tolist(), strict=True):
        at = int(np.flatnonzero(names == rank)[0])
        names[at], names[holder] = names[holder], names[at]
    yield _renamed(real, names[None, :])
    yield _by_load(real, batch, problem, speeds)


def _with_packs(batch: Batch, seconds: FloatArray, tokens_per_rank: int) -> Batch:
    """Add to a batch one dummy sequence per entry of `seconds`, each with the tokens of a whole rank."""
    count = len(seconds)
    tokens = np.full(count, tokens_per_rank, dtype=np.int64)
    nothing = np.zeros(count)
    return replace(
        batch,
        rows=np.concatenate((batch.rows, np.full(count, -1))),
        lengths=np.concatenate((batch.lengths, tokens.astype(np.int32))),
        work=joined(
            [
                batch.work,
                Work(
                    attention_seconds=nothing,
                    linear_seconds=seconds,
                    tokens=tokens,
                    windows=batch.work.windows
                    and WindowWork(seconds=nothing, halo_tokens=np.zeros_like(tokens), shortest_tokens=tokens),
                ),
            ],
            np.concatenate,
        ),
    )


def _gathered(wave: AnyInts, degree: IntArray, ranks: AnyInts, group_of: IntArray) -> Assignment:
    """Return an assignment of the groups in their order, without empty groups and empty waves.

    Args:
        wave, degree: [groups].
        ranks: the ranks of the groups, back to back.
        group_of: [sequences] group of each sequence, by position in the batch.
    """
    sizes = np.bincount(group_of, minlength=len(wave))
    kept = sizes > 0
    waves = wave[kept]
    if waves.min(initial=0) >= 0:
        waves = np.unique(waves, return_inverse=True)[1]
    return Assignment(
        wave=waves.astype(np.int32),
        rank_offsets=offsets_of(degree[kept]),
        ranks=ranks[np.repeat(kept, degree)].astype(np.int32),
        member_offsets=offsets_of(sizes[kept]),
        members=np.argsort(group_of, kind="stable"),
    )


def _scopes(found: Assignment) -> IntArray:
    """Return [groups] the wave of each; 0 under `iteration`, since the whole step is one scope."""
    return np.maximum(found.wave.astype(np.int64), 0)


def _by_load(found: Assignment, batch: Batch, problem: Problem, speeds: FloatArray) -> Assignment:
    """Let slow ranks delay as few others as possible, and give them the lightest packs of a wave or a step.

    Ranks outside rings swap places anywhere; ranks in rings only within their node, where no ring becomes slower.
    """
    alike = replace(problem, rank_speeds=None)
    scope, degree = _scopes(found), sizes_of(found.rank_offsets)
    seconds = assignment_seconds(found, batch, alike)
    group = np.repeat(np.arange(len(degree)), degree)
    names = []
    for wave in range(int(scope[-1]) + 1):
        here = scope[group] == wave
        ranks = found.ranks[here].astype(np.int64)
        names.append(_names(ranks, group[here], seconds, degree, speeds, problem.ranks_per_node))
    return _renamed(found, np.stack(names))


def _names(
    ranks: IntArray, group: IntArray, seconds: FloatArray, degree: IntArray, speeds: FloatArray, per_node: int
) -> IntArray:
    """Return [ranks] the rank that takes over each rank's work.

    Args:
        ranks, group: [entries] (rank, group) pairs of a wave or a step.
        seconds, degree: [groups] of the whole step.
        speeds: [ranks].
        per_node: ranks of a node.
    """
    num_ranks = len(speeds)
    names, taken = np.arange(num_ranks), np.zeros(num_ranks, dtype=np.bool_)
    waits = seconds * degree  # rank-seconds of a group, all delayed by its slowest rank
    for rank in np.argsort(speeds, kind="stable").tolist():
        if speeds[rank] == speeds.max():
            break
        held_up = np.bincount(ranks, weights=waits[group], minlength=num_ranks)
        held_up[taken] = np.inf
        first = rank // per_node * per_node
        at, chosen = int(np.flatnonzero(names == rank)[0]), first + int(np.argmin(held_up[first : first + per_node]))
        if held_up[chosen] < held_up[at]:
            names[at], names[chosen] = names[chosen], names[at]
            at = chosen
        taken[at] = True
        waits[group[ranks == at]] = 0.0  # a group that waits for a slow rank already loses nothing by a second one
    in_ring = np.zeros(num_ranks, dtype=np.bool_)
    in_ring[ranks[degree[group] > 1]] = True
    alone = np.flatnonzero(~in_ring)
    load = np.bincount(ranks, weights=seconds[group], minlength=num_ranks)
    who = names[alone]
    heaviest, quickest = np.argsort(-load[alone], kind="stable"), np.argsort(-speeds[who], kind="stable")
    names[alone[heaviest]] = who[quickest]
    return names


def _renamed(found: Assignment, names: IntArray) -> Assignment:
    """Move the work of each rank to rank `names[wave, rank]`; a single row holds for all waves."""
    degree = sizes_of(found.rank_offsets)
    group = np.repeat(np.arange(len(degree)), degree)
    ranks = names[_scopes(found)[group] if len(names) > 1 else 0, found.ranks]
    return replace(found, ranks=ranks[np.lexsort((ranks, group))].astype(np.int32))


@dataclass(kw_only=True, slots=True)
class _Bins:
    """State of the exchange of sequences. A bin is a rank under `iteration`, else a group.

    Attributes:
        group: [sequences] group of each; -1 if it may not move: under `iteration`, in a ring or before one.
        bin: [groups] bin that runs each group; -1 as above.
        scope: [bins] wave of each bin.
        load: [bins] seconds at which each bin ends.
        speed: [bins] summed speed of the bin's ranks; messages of rings are only in the final price.
        tokens, room, count: [groups] tokens held, token capacity, and number of sequences.
    """

    group: IntArray
    bin: IntArray
    scope: IntArray
    load: FloatArray
    speed: FloatArray
    tokens: IntArray
    room: IntArray
    count: IntArray


def exchanged(found: Assignment, batch: Batch, problem: Problem, speeds: FloatArray) -> Assignment:
    """Move or swap sequences between the bin that ends last, in each wave or the step, and others while that pays."""
    found = _with_room(found, problem)
    degree = sizes_of(found.rank_offsets)
    group_of = np.empty(len(batch.rows), dtype=np.int64)
    group_of[found.members] = np.repeat(np.arange(len(degree)), sizes_of(found.member_offsets))
    bins = _bins(found, group_of, batch, problem, speeds)
    for scope in range(int(bins.scope.max()) + 1):
        members = np.flatnonzero(bins.scope == scope)
        for _ in range(min(_MOST_EXCHANGES, 2 * len(members) + 64)):
            worst = int(members[np.argmax(bins.load[members])])
            if not _relieve(worst, bins, batch.work, problem):
                break
    moved = bins.group >= 0
    group_of[moved] = bins.group[moved]
    return _gathered(found.wave, degree, found.ranks, group_of)


def _with_room(found: Assignment, problem: Problem) -> Assignment:
    """Add an empty single-rank group for every rank; under `microbatch`, for the idle ranks of each wave."""
    scope, degree = _scopes(found), sizes_of(found.rank_offsets)
    used = np.zeros((int(scope[-1]) + 1, problem.num_ranks), dtype=np.bool_)
    if problem.sync == "microbatch":
        used[np.repeat(scope, degree), found.ranks] = True
    wave, rank = np.nonzero(~used)
    waves = np.concatenate((found.wave, wave if problem.sync == "microbatch" else np.full(len(rank), -1)))
    by = np.argsort(waves, kind="stable")
    degrees = np.concatenate((degree, np.ones(len(rank), dtype=np.int64)))
    firsts = offsets_of(degrees)
    ranks = np.concatenate((found.ranks, rank))
    sizes = np.concatenate((sizes_of(found.member_offsets), np.zeros(len(rank), dtype=np.int64)))
    return replace(
        found,
        wave=waves[by].astype(np.int32),
        rank_offsets=offsets_of(degrees[by]),
        ranks=np.concatenate([ranks[firsts[i] : firsts[i + 1]] for i in by.tolist()]).astype(np.int32),
        member_offsets=offsets_of(sizes[by]),
    )


def _bins(found: Assignment, group_of: IntArray, batch: Batch, problem: Problem, speeds: FloatArray) -> _Bins:
    degree = sizes_of(found.rank_offsets)
    number = len(degree)
    count = sizes_of(found.member_offsets)
    seconds = np.zeros(number)
    real = count > 0
    seconds[real] = assignment_seconds(_gathered(found.wave, degree, found.ranks, group_of), batch, problem)
    first_rank = found.ranks[found.rank_offsets[:-1]].astype(np.int64)
    is_free = np.ones(number, dtype=np.bool_)
    if problem.sync == "microbatch":
        bin_of, scope, load = np.arange(number), _scopes(found), seconds
        speed = slowest_speeds(tuple(speeds), found.rank_offsets, found.ranks) * degree
    else:
        bin_of, scope, speed = first_rank, np.zeros(problem.num_ranks, dtype=np.int64), speeds
        ends = list_schedule(found.rank_offsets, found.ranks, seconds, problem.num_ranks) + seconds
        load = np.zeros(problem.num_ranks)
        np.maximum.at(load, found.ranks, np.repeat(ends, degree))
        last_ring = np.full(problem.num_ranks, -1)
        entries = np.repeat(np.arange(number), degree)
        in_ring = np.repeat(degree > 1, degree)
        np.maximum.at(last_ring, found.ranks[in_ring], entries[in_ring])
        is_free = (degree == 1) & (np.arange(number) > last_ring[first_rank])  # work before a ring delays others
    tokens = np.bincount(group_of, weights=batch.work.tokens, minlength=number).astype(np.int64)
    return _Bins(
        group=np.where(is_free[group_of], group_of, -1),
        bin=np.where(is_free, bin_of, -1),
        scope=scope,
        load=load,
        speed=speed,
        tokens=tokens,
        room=degree * problem.tokens_per_rank,
        count=count.copy(),
    )


def _relieve(worst: int, bins: _Bins, work: Work, problem: Problem) -> bool:
    """Move a sequence away from the bin that ends last, or swap it for a lighter one; False if that gains nothing.

    Another wave may take the sequence if it grows by less than the bin's own wave shrinks.
    """
    movable = np.flatnonzero(bins.group >= 0)
    bin_of = bins.bin[bins.group[movable]]
    mine, theirs = movable[bin_of == worst], movable[bin_of != worst]
    groups = np.flatnonzero((bins.bin >= 0) & (bins.bin != worst))  # targets of a move, which gives nothing back
    if not len(mine) or not len(groups):
        return False
    beta, seconds = problem.profile.coefficients.microbatch_seconds, work.total_seconds
    to = np.concatenate((bins.group[theirs], groups))
    back = np.concatenate((seconds[theirs], np.zeros(len(groups))))
    back_tokens = np.concatenate((work.tokens[theirs], np.zeros(len(groups), dtype=np.int64)))
    opens = np.concatenate((np.zeros(len(theirs)), beta * (bins.count[groups] == 0)))
    given, tokens, source = seconds[mine][:, None], work.tokens[mine][:, None], bins.group[mine]
    closes = beta * ((bins.count[source] == 1)[:, None] & (np.arange(len(to)) >= len(theirs)))
    top = bins.load[worst]
    ours = top - (given - back + closes) / bins.speed[worst]
    other = bins.load[bins.bin[to]] + (given - back + opens) / bins.speed[bins.bin[to]]
    fits = (bins.tokens[source][:, None] - tokens + back_tokens <= bins.room[source][:, None]) & (
        bins.tokens[to] - back_tokens + tokens <= bins.room[to]
    )
    ends = np.where(fits, _ends(worst, bins.bin[to], ours, other, bins), np.inf)
    a, b = np.unravel_index(int(np.argmin(ends)), ends.shape)
    if not ends[a, b] < top * (1.0 - _LEAST_GAIN):
        return False
    sequence, left, joined = int(mine[a]), int(source[a]), int(to[b])
    bins.load[worst], bins.load[bins.bin[joined]] = ours[a, b], other[a, b]
    shift = int(tokens[a, 0] - back_tokens[b])
    bins.tokens[left] -= shift
    bins.tokens[joined] += shift
    bins.group[sequence] = joined
    if b < len(theirs):
        bins.group[theirs[b]] = left
    else:
        bins.count[left] -= 1
        bins.count[joined] += 1
    return True


def _ends(worst: int, others: IntArray, ours: FloatArray, theirs: FloatArray, bins: _Bins) -> FloatArray:
    """Return [mine, targets] the end of the worst bin's wave or step after each move, plus any growth of another wave.

    `ours` and `theirs` are the new loads of the worst bin and of the target bins `others`.
    """
    scope = bins.scope[worst]
    latest = np.zeros(int(bins.scope.max()) + 1)
    np.maximum.at(latest, bins.scope, bins.load)
    rest = bins.load[(bins.scope == scope) & (np.arange(len(bins.load)) != worst)].max(initial=0.0)
    growth = np.maximum(theirs - latest[bins.scope[others]], 0.0)
    elsewhere = np.where(growth > 0, np.maximum(ours, rest) + growth, ours)
    return np.where(bins.scope[others] == scope, np.maximum(ours, theirs), elsewhere)


# Parsing of rank speeds: a list, assignments such as `12=0.7`, or a file of either.

_NAME: Final = re.compile(r"(?:(?P<node>node)(?P<number>\d+)|(?P<first>\d+)(?:-(?P<last>\d+))?)$")
_FORMS: Final = (
    "one speed per rank, as 1,1,0.7,1; or the others' only, as 12=0.7,16-23=0.9,node3=0.8; or a file of them"
)

GivenSpeeds: TypeAlias = str | Sequence[float] | Mapping[Any, float]


def read_rank_speeds(given: GivenSpeeds, *, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [num_ranks] the rank speeds relative to the cost profile, or None if all are 1.

    Args:
        given: a list of one speed per rank, or a mapping from rank (`12`), rank range (`16-23`) or node (`node3`) to
            speed, with 1 for all others. Either may be comma-separated text or the name of a YAML or JSON file.
        num_ranks, ranks_per_node: of the job.

    Raises:
        UsageError: the speeds are malformed, out of range, or name ranks that the job does not have.
    """
    where = "--rank-speeds"
    if isinstance(given, str):
        given, where = _spoken(given, where)
    if isinstance(given, Mapping):
        speeds = [1.0] * num_ranks
        for name, speed in given.items():
            for rank in _ranks(str(name), num_ranks, ranks_per_node, where):
                speeds[rank] = _speed(speed, str(name), where)
    elif isinstance(given, Sequence):
        if len(given) != num_ranks:
            raise UsageError(f"{where} has {len(given)} speeds for {num_ranks} ranks; it takes {_FORMS}")
        speeds = [_speed(speed, str(rank), where) for rank, speed in enumerate(given)]
    else:
        raise UsageError(f"{where} is {given!r}; it takes {_FORMS}")
    return tuple(speeds) if any(speed != 1.0 for speed in speeds) else None


def requested_speeds(request: PlanRequest, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [ranks] the speeds of `--rank-speeds`, or None if all are 1."""
    if request.rank_speeds is None:
        return None
    for flag, given in (("balance", request.encoder_balance != "ring"), ("ranks", request.encoder_ranks is not None)):
        if given:
            raise UsageError(f"--encoder-{flag} shares work as if ranks were equally fast; remove it or --rank-speeds")
    return read_rank_speeds(request.rank_speeds, num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def speeds_words(given: GivenSpeeds | None) -> str | None:
    """Return speeds as the argument of `--rank-speeds`."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return ",".join(f"{name}={speed}" for name, speed in given.items()) or None
    return ",".join(str(speed) for speed in given)


def _spoken(text: str, where: str) -> tuple[Any, str]:
    """Return the parsed value of text or of the file that it names, and its location for messages."""
    words = [word.strip() for word in text.split(",")]
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words), where
    # A single number is the list of a job with one rank; any other single word names a file.
    if len(words) > 1 or _is_number(text):
        return words, where
    document = parse_yaml(read_text(Path(text), error=UsageError, label=f"{where}: "), name=text, error=UsageError)
    return document, f"{where}: {text}"


def _ranks(name: str, num_ranks: int, ranks_per_node: int, where: str) -> Iterator[int]:
    found = _NAME.match(name)
    if found is None:
        raise UsageError(f"{where} names {name!r}; it takes {_FORMS}")
    if found["node"]:
        first, nodes = int(found["number"]) * ranks_per_node, -(-num_ranks // ranks_per_node)
        if first >= num_ranks:
            raise UsageError(f"{where} names node {found['number']} of a job of {nodes} nodes, which count from 0")
        yield from range(first, min(first + ranks_per_node, num_ranks))
        return
    first, last = int(found["first"]), int(found["last"] or found["first"])
    if last >= num_ranks or last < first:
        raise UsageError(f"{where} names {name} of a job of {num_ranks} ranks, which count from 0")
    yield from range(first, last + 1)


def _speed(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not _is_number(str(value)) or not SLOWEST <= float(value) <= QUICKEST:
        raise UsageError(
            f"{where} says {value} of {name}; a speed is a number from {SLOWEST:g} to {QUICKEST:g}, and 1 is as the "
            "cost profile says"
        )
    return float(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
