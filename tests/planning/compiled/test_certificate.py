"""Bound <= optimum <= planner, with the optimum found by trying every schedule of a small step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcp_cli.cost.model import Work
from fcp_cli.cost.profile import parse_cost_profile
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.assemble import assemble
from fcp_cli.planning.batches import batch_of
from fcp_cli.planning.bounds import lower_bound_seconds, simple_bound_seconds
from fcp_cli.planning.compiled.certificate import other_waves, wave_bound, work_in_rings
from fcp_cli.planning.compiled.wave_bounds import (
    crowd_bound,
    dealt_with_others,
    least_partition,
    ringed_bound,
    whole_waves,
)
from fcp_cli.planning.fcp_solver import make_solver
from fcp_cli.planning.kernel_inputs import by_falling_work, planner_inputs, repriced
from fcp_cli.planning.problem import Problem, work_on
from tests.planning.examples import example_problem, first_step, one_batch, table_of

_PROFILE = """\
format: fcp-cost-profile/1
model: m
cluster: c
origin: assumed
coefficients:
  attention_seconds_per_token2: 0.01
  linear_seconds_per_token: {linear}
  ring_bytes_per_token: 1.0
  microbatch_seconds: {beta}
  ring_hop_seconds: {hop}
  exposed_ring_share: {exposed}
  chunk_seconds_per_token: {chunk}
  last_hop_bytes_per_token: {home}
  last_hop_seconds: {home}
{windows}{host}heads:
  query_heads: 4
  key_value_heads: {kv}
  exchange_bytes_per_token: {exchange}
  key_value_exchange_bytes_per_token: {exchange}
  exchange_seconds: {hop}
  host_exchange_seconds: {host_exchange}
step: {{wave_floor_seconds: {floor}}}
{levels}bandwidth_bytes_per_second: {{intra_node: {intra}, inter_node: {inter}}}
common_ground:
  coefficients:
    attention_seconds_per_token2: 0.01
    linear_seconds_per_token: {linear}
    ring_bytes_per_token: 1.0
    microbatch_seconds: {beta}
  bandwidth_bytes_per_second: {{intra_node: {intra}, inter_node: {inter}}}
"""


# From the fewest tokens of a rank on, or from some; in one line, or in three, each dearer than the one before.
_LEVELS = {
    "alike": "",
    "cheap": "- {recompute: none, tokens: 3}\n- {recompute: selective, tokens: 20, seconds_per_token: 0.05}\n",
    "dear": "- {recompute: none, tokens: 7}\n- {recompute: selective, tokens: 20, seconds_per_token: 1.5}\n",
    "frontier": "- {recompute: none, tokens: 2}\n- {recompute: activation, tokens: 4, seconds_per_token: 0.1}\n"
    "- {recompute: elementwise, tokens: 9, seconds_per_token: 0.3}\n"
    "- {recompute: selective, tokens: 20, seconds_per_token: 1.0}\n",
}


# Halos of three tokens, which take one message or several: from cheap to dear, and on the ring.
_WINDOWS = {
    "no windows": "",
    "on rings": "  window_seconds_per_token2: 0.005\n  window_tokens: 4\n",
    "halos": "  window_seconds_per_token2: 0.005\n  window_tokens: 4\n  halo_bytes_per_token: 0.5\n",
    "dear halos": "  window_seconds_per_token2: 0.005\n  window_tokens: 4\n  halo_bytes_per_token: 2.0\n"
    "  halo_message_seconds: 0.2\n",
}


# The host's clock: not priced; shorter than most packs, with dear messages; longer than most packs.
_HOSTS = {
    "none": "",
    "messages": "  host_microbatch_seconds: 0.5\n  host_hop_seconds: 1.0\n  host_last_hop_seconds: 0.5\n",
    "slow": "  host_microbatch_seconds: 4.0\n  host_hop_seconds: 0.1\n  host_halo_message_seconds: 0.3\n",
}


@dataclass(frozen=True)
class Exhaustive:
    """Every schedule of a few sequences on a few ranks."""

    work: Work
    problem: Problem

    @property
    def everything(self) -> int:
        return (1 << len(self.work.tokens)) - 1

    @property
    def all_ranks(self) -> int:
        return (1 << self.problem.num_ranks) - 1

    def seconds(self, pack: int, ranks: int) -> float:
        """Predicted seconds of a pack (bits are sequences) on a group (bits are ranks); infinite over the budget."""
        members = list(_bits(pack))
        group = list(_bits(ranks))
        degree = len(group)
        work = work_on(self.work.take(np.array(members)), degree, self.problem)
        tokens = int(work.tokens.sum())
        if tokens > degree * self.problem.tokens_per_rank:
            return math.inf
        nodes = [rank // self.problem.ranks_per_node for rank in group]
        attention, linear = float(work.attention_seconds.sum()), float(work.linear_seconds.sum())
        crosses = len(set(nodes)) > 1
        if work.windows is not None:
            linear += float(work.windows.seconds.sum())
        again, lengths = self.recomputation_seconds(tokens / degree), work.tokens.tolist()
        return min(
            max(
                self.split_seconds(attention, linear, tokens, degree, heads_degree, crosses=crosses)
                + self.halo_seconds(lengths, degree, heads_degree, crosses=crosses)
                + again,
                self.host_seconds(lengths, degree, heads_degree),
            )
            for heads_degree in ((1, 2, 4) if self.problem.attention else (1,))
            if degree % heads_degree == 0
            and all(len(set(nodes[i : i + heads_degree])) == 1 for i in range(0, degree, heads_degree))
        )

    def split_seconds(
        self, attention: float, linear: float, tokens: int, degree: int, heads_degree: int, *, crosses: bool
    ) -> float:
        """The seconds of a pack on sets of `heads_degree` ranks, each inside a node, which form a ring."""
        c, bandwidth, heads = (
            self.problem.profile.coefficients,
            self.problem.profile.bandwidth,
            self.problem.profile.heads,
        )
        assert heads is not None
        speed = bandwidth.inter_node if crosses else bandwidth.intra_node
        hops, copies = degree // heads_degree - 1, max(1.0, heads_degree / heads.key_value_heads)
        ring = home = 0.0
        if hops:
            home = c.last_hop_bytes_per_token * copies * tokens / degree / speed + c.last_hop_seconds
            ring = c.ring_bytes_per_token * copies * tokens * hops / degree / speed + c.ring_hop_seconds * hops
            ring += c.last_hop_seconds
        moved = heads.exchange_bytes_per_token + copies * heads.key_value_exchange_bytes_per_token
        exchange = moved * tokens / degree * (heads_degree - 1) / heads_degree / bandwidth.intra_node
        exchange += heads.exchange_seconds * (heads_degree - 1)
        exposed = c.exposed_ring_share * (ring - home) + home
        attention = (attention + c.chunk_seconds_per_token * tokens * hops) / degree
        return c.microbatch_seconds + linear / degree + max(attention, ring - exposed) + exposed + exchange

    def recomputation_seconds(self, tokens: float) -> float:
        """The seconds of layers of two levels, as many of the dearer as the bytes that the other keeps leave."""
        levels = self.problem.profile.recompute_levels
        if not levels or tokens <= levels[0].tokens:
            return 0.0
        low, high = next((low, high) for low, high in pairwise(levels) if tokens <= high.tokens)
        # A layer keeps 1 / its level's tokens of the room, for each token.
        share = (tokens / low.tokens - 1.0) / (tokens / low.tokens - tokens / high.tokens)
        return tokens * ((1.0 - share) * low.seconds_per_token + share * high.seconds_per_token)

    def host_seconds(self, lengths: list[int], degree: int, heads_degree: int) -> float:
        """The seconds in which the host issues a pack."""
        c, heads, sets = self.problem.profile.coefficients, self.problem.profile.heads, degree // heads_degree
        assert heads is not None
        seconds = c.host_microbatch_seconds + heads.host_exchange_seconds * (heads_degree - 1)
        if sets > 1:
            seconds += c.host_hop_seconds * (sets - 1) + c.host_last_hop_seconds
            seconds += c.host_halo_message_seconds * self.halo_messages(lengths, sets)
        return seconds

    def halo_messages(self, lengths: list[int], sets: int) -> int:
        """The messages of the halos of sequences in a ring of several sets."""
        c = self.problem.profile.coefficients
        if not c.halo_bytes_per_token:
            return 0
        return min(2 * math.ceil((int(c.window_tokens) - 1) / (min(lengths) / (2 * sets))), sets + 1)

    def halo_seconds(self, lengths: list[int], degree: int, heads_degree: int, *, crosses: bool) -> float:
        """The seconds of the halos of sequences in a ring of sets of `heads_degree` ranks."""
        c, bandwidth, heads = (
            self.problem.profile.coefficients,
            self.problem.profile.bandwidth,
            self.problem.profile.heads,
        )
        assert heads is not None
        sets, reach = degree // heads_degree, int(c.window_tokens) - 1
        if sets == 1 or not c.halo_bytes_per_token:
            return 0.0
        copies = max(1.0, heads_degree / heads.key_value_heads)
        rows = sum(min(length, 2 * reach) for length in lengths) * (sets - 1) / sets * copies / heads_degree
        speed = bandwidth.inter_node if crosses else bandwidth.intra_node
        return rows * c.halo_bytes_per_token / speed + self.halo_messages(lengths, sets) * c.halo_message_seconds

    def best_waves(self) -> float:
        """The least sum of wave maxima."""

        @cache
        def wave(todo: int, ranks: int) -> float:
            if not todo:
                return 0.0
            first, best = todo & -todo, math.inf
            for pack in _subsets(todo):
                if pack & first:
                    for group in _subsets(ranks):
                        if (own := seconds(pack, group)) < best:
                            best = min(best, max(own, wave(todo & ~pack, ranks & ~group)))
            return best

        @cache
        def waves(todo: int) -> float:
            lasts = ((max(floor, wave(part, self.all_ranks)), part) for part in _subsets(todo))
            return min((seconds + waves(todo & ~part) for seconds, part in lasts), default=0.0)

        seconds, floor = cache(self.seconds), self.problem.profile.step.wave_floor_seconds
        return waves(self.everything)

    def best_timelines(self, incumbent: float) -> float:
        """The least latest end over all orders, packs and groups; `incumbent` is the makespan of a known schedule."""
        seconds = cache(self.seconds)
        best = incumbent

        def extend(todo: int, free: tuple[float, ...]) -> None:
            nonlocal best
            if not todo:
                best = min(best, max(free))
                return
            work = float(self.work.total_seconds[list(_bits(todo))].sum())
            if (sum(free) + work) / len(free) >= best:
                return
            for pack in _subsets(todo):
                for group in _subsets(self.all_ranks):
                    ranks = list(_bits(group))
                    end = max(free[rank] for rank in ranks) + seconds(pack, group)
                    if end < best:
                        extend(todo & ~pack, tuple(end if r in ranks else f for r, f in enumerate(free)))

        extend(self.everything, (0.0,) * self.problem.num_ranks)
        return best


def _bits(mask: int) -> Iterator[int]:
    return (i for i in range(mask.bit_length()) if mask >> i & 1)


def _subsets(mask: int) -> Iterator[int]:
    """All non-empty subsets."""
    part = mask
    while part:
        yield part
        part = (part - 1) & mask


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
@settings(max_examples=40)
@given(data=st.data())
def test_no_schedule_beats_the_bound_and_the_planner_is_one_of_them(sync: Sync, data: st.DataObject) -> None:
    levels = _LEVELS[data.draw(st.sampled_from(sorted(_LEVELS)), label="levels")]
    text = _PROFILE.format(
        linear=data.draw(st.sampled_from(["0.02", "0.1", "1.0"]), label="linear"),
        beta=data.draw(st.sampled_from(["0.0", "0.3", "3.0"]), label="beta"),
        hop=data.draw(st.sampled_from(["0.0", "0.2"]), label="hop"),
        exposed=data.draw(st.sampled_from(["0.0", "0.3", "1.0"]), label="exposed"),
        chunk=data.draw(st.sampled_from(["0.0", "0.1"]), label="chunk"),
        home=data.draw(st.sampled_from(["0.0", "0.5"]), label="home"),
        kv=data.draw(st.sampled_from(["1", "2"]), label="key_value_heads"),
        exchange=data.draw(st.sampled_from(["0.1", "1.0"]), label="exchange"),
        windows=_WINDOWS[data.draw(st.sampled_from(sorted(_WINDOWS)), label="windows")],
        host=_HOSTS[data.draw(st.sampled_from(sorted(_HOSTS)), label="host")],
        host_exchange=data.draw(st.sampled_from(["0.0", "0.4"]), label="host_exchange"),
        floor=data.draw(st.sampled_from(["0.0", "1.0", "4.0"]), label="floor"),
        levels=levels and f"recipe: {{recompute: as-needed}}\nrecompute_levels:\n{levels}",
        intra=data.draw(st.sampled_from(["10.0", "2.0"]), label="intra"),
        inter=data.draw(st.sampled_from(["10.0", "1.0", "0.5"]), label="inter"),
    )
    num_ranks = data.draw(st.integers(2, 4 if sync == "microbatch" else 3), label="num_ranks")
    problem = Problem(
        num_ranks=num_ranks,
        ranks_per_node=data.draw(st.integers(1, 4), label="ranks_per_node"),
        tokens_per_rank=data.draw(st.sampled_from([8, 12, 20]), label="budget"),
        padding_multiple=data.draw(st.sampled_from([None, 2, 4]), label="padding"),
        attention=data.draw(st.sampled_from([None, "2d"]), label="attention"),
        sync=sync,
        profile=parse_cost_profile(text, name="test"),
    )
    most = problem.tokens_per_rank * num_ranks
    any_length = st.one_of(st.integers(1, problem.tokens_per_rank), st.integers(1, most))
    max_size = 6 if sync == "microbatch" else (5 if num_ranks == 2 else 4)
    lengths = data.draw(st.lists(any_length, min_size=2, max_size=max_size), label="lengths")
    batch = batch_of(table_of(lengths), problem)
    planned = first_step(one_batch(lengths, problem)).makespan_seconds

    schedules = Exhaustive(batch.work, problem)
    optimum = schedules.best_waves() if sync == "microbatch" else schedules.best_timelines(planned)
    bound = lower_bound_seconds(batch.work, problem)
    assert simple_bound_seconds(batch.work, problem) <= bound * (1 + 1e-9)
    assert bound <= optimum * (1 + 1e-9)
    if sync == "microbatch":
        _order, sequences = by_falling_work(batch.work)
        assert wave_bound(sequences, planner_inputs(problem)) <= optimum * (1 + 1e-9)
        assert crowd_bound(0.0, sequences, planner_inputs(problem)) <= optimum * (1 + 1e-9)
        assert dealt_with_others(sequences, planner_inputs(problem)) <= optimum * (1 + 1e-9)
        assert least_partition(whole_waves(sequences, planner_inputs(problem))) <= optimum * (1 + 1e-9)
    assert optimum <= planned * (1 + 1e-9)


def _recomputing(sync: Sync, *, beta: str, intra: str) -> Problem:
    """Return three ranks that recompute as needed, whose rings cost nothing but their bytes."""
    few: dict[str, str] = dict.fromkeys(("hop", "exposed", "chunk", "home", "floor"), "0.0")
    text = _PROFILE.format(
        **few,
        linear="0.02",
        beta=beta,
        kv="1",
        exchange="1.0",
        windows="",
        host="",
        host_exchange="0.0",
        intra=intra,
        inter="1.0",
        levels=f"recipe: {{recompute: as-needed}}\nrecompute_levels:\n{_LEVELS['frontier']}",
    )
    return Problem(
        num_ranks=3, ranks_per_node=3, tokens_per_rank=20, sync=sync, profile=parse_cost_profile(text, name="test")
    )


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_where_each_rank_holds_the_tokens_that_cost_the_least_each_no_gap_is_left(sync: Sync) -> None:
    """Nine of the frontier: fixed seconds of 3 and 2.7 of recomputation; with more, or less, each token costs more."""
    problem = _recomputing(sync, beta="3.0", intra="2.0")
    batch = batch_of(table_of([9, 9, 9]), problem)
    makespan = first_step(one_batch([9, 9, 9], problem)).makespan_seconds
    assert makespan == pytest.approx(3.0 + 2.7 + 9 * 0.02 + 81 * 0.01)
    assert lower_bound_seconds(batch.work, problem) == pytest.approx(makespan, rel=1e-6)
    assert lower_bound_seconds(batch.work, problem) <= makespan * (1 + 1e-9)


@pytest.mark.parametrize("sync", ["iteration", "microbatch"])
def test_sequences_that_recompute_alone_and_in_dear_rings_leave_no_gap(sync: Sync) -> None:
    """Two rounds of 15 tokens a rank: micro-batches are free, but rings cost more than the recomputation they save."""
    problem = _recomputing(sync, beta="0.0", intra="0.05")
    lengths = [15] * 6
    batch = batch_of(table_of(lengths), problem)
    makespan = first_step(one_batch(lengths, problem)).makespan_seconds
    assert makespan == pytest.approx(2 * (15 * 0.02 + 225 * 0.01 + 2.7 + 6 * (20 * 1.0 - 9 * 0.3) / 11))
    assert lower_bound_seconds(batch.work, problem) == pytest.approx(makespan, rel=1e-6)
    assert lower_bound_seconds(batch.work, problem) <= makespan * (1 + 1e-9)


def test_long_sequences_that_crowd_into_one_wave_raise_the_bound_to_what_can_be_planned() -> None:
    lengths = [131_072] * 8 + np.linspace(2048, 8192, 4088).astype(int).tolist()
    problem = example_problem("microbatch", num_ranks=1024, ranks_per_node=8)
    batches = one_batch(lengths, problem)
    batch = batches.batch(0)
    _order, sequences = by_falling_work(batch.work)
    one_by_one = max(simple_bound_seconds(batch.work, problem), wave_bound(sequences, planner_inputs(problem)))
    step = assemble(make_solver(batches).assign(batch), batch, problem)
    assert step.makespan_seconds > 1.05 * one_by_one
    assert step.gap < 0.03


def test_what_one_wave_may_last_at_most_makes_rings_wider_and_raises_the_bound() -> None:
    lengths = [60_000, 55_000, 50_000, 45_000, 40_000, 35_000] + [4096] * 300
    problem = example_problem("microbatch", num_ranks=32, ranks_per_node=8)
    batch = batch_of(table_of(lengths), problem)
    inputs = repriced(planner_inputs(problem), chunk=2e-5)
    _order, sequences = by_falling_work(batch.work)
    others = other_waves(sequences, inputs)
    bound = ringed_bound(0.0, sequences, inputs)
    narrowest, limited = (work_in_rings(limit, sequences, inputs) for limit in (np.inf, bound - others))
    assert others > 0.0
    assert np.all(limited >= narrowest) and limited.sum() > narrowest.sum()
    at_narrowest = sequences._replace(work=narrowest)
    unlimited = crowd_bound(wave_bound(at_narrowest, inputs), at_narrowest, inputs)
    assert bound > 1.002 * unlimited


def test_work_that_one_wave_leaves_takes_another_wave_even_if_all_tokens_fit_into_one() -> None:
    lengths = [97_665, 75_001] + [1500] * 480
    problem = example_problem("microbatch", num_ranks=64, ranks_per_node=8)
    batch = batch_of(table_of(lengths), problem)
    assert batch.work.tokens.sum() <= 64 * problem.tokens_per_rank
    _order, sequences = by_falling_work(batch.work)
    inputs = planner_inputs(problem)
    free = repriced(inputs, beta=0.0)
    assert wave_bound(sequences, inputs) > wave_bound(sequences, free) + 1.2 * inputs.prices.beta


def test_long_sequences_dealt_to_waves_raise_the_bound_where_they_do_not_fit_into_one() -> None:
    lengths = [131_072, 131_072, 97_000] + [6000] * 250
    problem = example_problem("microbatch", num_ranks=64, ranks_per_node=8, tokens_per_rank=8192)
    batches = one_batch(lengths, problem)
    batch = batches.batch(0)
    _order, sequences = by_falling_work(batch.work)
    inputs = planner_inputs(problem)
    bound, step = dealt_with_others(sequences, inputs), assemble(make_solver(batches).assign(batch), batch, problem)
    assert ringed_bound(0.0, sequences, inputs) * 1.001 < bound <= step.makespan_seconds


def test_the_bound_of_a_few_sequences_on_one_node_is_the_time_of_their_best_waves() -> None:
    lengths = [4713, 4163, 2478, 2096, 1495, 1166]
    problem = example_problem("microbatch", num_ranks=4, ranks_per_node=4)
    step = first_step(one_batch(lengths, problem))  # tries all that there are
    batch = batch_of(table_of(lengths), problem)
    _order, sequences = by_falling_work(batch.work)
    assert ringed_bound(0.0, sequences, planner_inputs(problem)) < 0.996 * step.makespan_seconds
    assert step.gap == pytest.approx(0.0, abs=1e-8)
