"""Lower bounds: seconds that no schedule of a step can beat under the same cost profile.

Simple bounds are proven here, tighter ones in `compiled.certificate` and `compiled.wave_bounds`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fcp_cli.cost.model import Work, recomputation_seconds
from fcp_cli.plan.setup import Pipeline, Speeds
from fcp_cli.planning.compiled.certificate import alone_by_degree, area_bound, least_alone, longest_alone
from fcp_cli.planning.compiled.core import PlannerInputs, Sequences
from fcp_cli.planning.compiled.wave_bounds import waves_bound
from fcp_cli.planning.kernel_inputs import by_falling_work, in_batch_order, planner_inputs, repriced, shared_tokens
from fcp_cli.planning.problem import Problem
from fcp_cli.util.arrays import FloatArray

_MOST_ABREAST = 16  # if more sequences of a length fit side by side, the area bound is as good
_MOST_SUMMED = 512  # longest sequences considered
_MARGIN = 1e-9  # relative; keeps rounding on the safe side
_WEIGHTS = (0.25, 0.5, 0.75)  # of the host's clock in the bounds of both clocks together


def lower_bound_seconds(work: Work, problem: Problem, *, extra_seconds: float = 0.0) -> float:
    """Return the best proven lower bound of a step: simple, tightened and, under `microbatch`, of waves.

    It includes the closing seconds of a step, which follow all micro-batches.

    Args:
        work: the work of the step's sequences.
        problem: the problem of the step.
        extra_seconds: total seconds of all waves for other work, such as a shared encoder.
    """
    global _last
    if problem.rank_speeds is not None:
        return _bound_at_speeds(work, problem, problem.rank_speeds)
    # Cached, since the solver of a step and `assemble` both ask for the same bound.
    last = _last  # read once, since another thread may plan another step
    if last is not None and last[0] is work and last[1] is problem and last[2] == extra_seconds:
        return last[3]
    bound = _bound_of_like_ranks(work, problem, extra_seconds)
    _last = work, problem, extra_seconds, bound
    return bound


_last: tuple[Work, Problem, float, float] | None = None


def _bound_of_like_ranks(work: Work, problem: Problem, extra_seconds: float) -> float:
    if problem.pipeline is not None:
        # A ring occupies its devices as long as without stages, if not contiguously, so the area bounds hold.
        whole = replace(problem, pipeline=None, sync="iteration")
        bound = max(_work_bound(work, whole), pipeline_bound_seconds(work, problem, problem.pipeline))
        return bound + problem.profile.step.closing_seconds(problem.sync)
    work_bound = max(_work_bound(work, problem), abreast_bound_seconds(work, problem))
    bound = max(work_bound + extra_seconds, floored_bound_seconds(work, problem))
    return bound + problem.profile.step.closing_seconds(problem.sync)


def _bound_at_speeds(work: Work, problem: Problem, speeds: Speeds) -> float:
    """Bound a step on ranks of different speeds.

    No rank is faster than the fastest, so a bound for ranks of that speed is valid. Its speed counts as at least 1,
    since terms that do not grow with the work, such as messages between stages, do not slow down with the ranks.
    """
    closing = problem.profile.step.closing_seconds(problem.sync)
    alike = lower_bound_seconds(work, replace(problem, rank_speeds=None)) - closing
    return max(alike / max(1.0, *speeds), simple_bound_seconds(work, problem)) + closing


def _work_bound(work: Work, problem: Problem) -> float:
    bound, waves = simple_bound_seconds(work, problem), problem.sync == "microbatch"
    _order, sequences = by_falling_work(work)
    bound = max(bound, area_bound(bound, waves, sequences, planner_inputs(problem)))
    count = max(1.0, float(work.tokens.sum()) / (problem.num_ranks * problem.tokens_per_rank))
    # If hosts take much less than devices, no mean of both is longer.
    if problem.profile.coefficients.host_microbatch_seconds * count > 0.5 * bound:
        for weight in _WEIGHTS:
            bound = max(bound, area_bound(bound, waves, *_of_both_clocks(weight, sequences, problem)))
    if waves:
        bound = waves_bound(bound, sequences, planner_inputs(problem))
    return float(bound)


def _of_both_clocks(weight: float, sequences: Sequences, problem: Problem) -> tuple[Sequences, PlannerInputs]:
    """Return sequences and prices under which a pack takes w H + (1 - w) D seconds or less, with w = `weight`.

    H are its host's seconds and D its device's, so max(H, D) is no less: a bound under these prices is a bound.
    """
    less = 1.0 - weight
    scaled = Sequences(less * sequences.attention, less * sequences.linear, less * sequences.work, sequences.tokens)
    inputs = planner_inputs(problem)
    p = inputs.prices
    beta = less * p.beta + weight * p.host
    return scaled, repriced(
        inputs._replace(shared_tokens=shared_tokens(problem, beta / less)),
        beta=beta,
        chunk=less * p.chunk,
        ring=less * p.ring,
        hop=less * p.hop + weight * p.host_hop,
        home=less * p.home,
        home_hop=less * p.home_hop + weight * p.host_home,
        halo=less * p.halo,
        halo_message=less * p.halo_message + weight * p.host_halo,
        exchange=less * p.exchange,
        key_value_exchange=less * p.key_value_exchange,
        exchange_message=less * p.exchange_message + weight * p.host_exchange,
        again=less * p.again,
    )


def pipeline_bound_seconds(work: Work, problem: Problem, pipeline: Pipeline) -> float:
    """Bound a step with pipelines by the work of each stage, by the longest path, and by the work outside that path.

    A micro-batch passes P stages forwards and back again, in P times its mean seconds and 2 (L - 1) messages for L
    virtual stages in total, so the longest sequence alone bounds the step. The work of stage s is shared evenly by N
    devices at best. Each of them starts after some micro-batch's forwards on the s earlier stages, and ends with as
    many backwards still to go. On any stage, a micro-batch takes at least the fixed seconds and the share of the
    smallest sequence on all ranks.
    """
    stages, n = problem.pipeline_parallel, problem.num_ranks
    c = problem.profile.coefficients
    mean, again = pipeline.mean_recompute_seconds, pipeline.recompute_seconds_per_token
    language = c.linear_seconds_per_token * work.tokens
    vision, head = np.maximum(work.linear_seconds - language, 0.0), pipeline.head_share * language
    even = work.total_seconds - vision - head - mean * work.tokens
    microbatches = max(1.0, float(work.tokens.sum()) / (n * problem.tokens_per_rank))
    of_stage = np.full(stages, float(even.sum()) / n + c.microbatch_seconds * microbatches)
    if again:
        of_stage += float(work.tokens.sum()) / n * np.array(again)
    of_stage[0] += stages * float(vision.sum()) / n
    of_stage[-1] += stages * float(head.sum()) / n
    least = (c.microbatch_seconds + float(even.min()) / n) / pipeline.virtual_stages + 2 * pipeline.send_seconds
    path = _longest_path_seconds(work, even, problem, pipeline)
    return max(path, float((of_stage + np.arange(stages) * least).max()))


def _longest_path_seconds(work: Work, even: FloatArray, problem: Problem, pipeline: Pipeline) -> float:
    """Bound a step with pipelines by the path of its longest sequence, plus other work of its ranks before and after.

    On d ranks the longest sequence takes P t(d) seconds and its messages. For any other micro-batch of these ranks, the
    first stage (with V virtual stages, its first block) runs either the forward before that whole path or the backward
    after it: at least a share q of its seconds there. Sequences in the same micro-batch lengthen the path by P times
    their linear seconds instead. Let w(i) = min(q even(i), P linear(i)) for all other sequences. The N - d other ranks
    take at most q T of it each, so T >= P t(d) + (sum of w - (N - d) q T) / d for some d.
    """
    stages, n = problem.pipeline_parallel, problem.num_ranks
    share = min(pipeline.forward_share, 1.0 - pipeline.forward_share) / pipeline.virtual_stages
    longest = int(np.argmax(work.total_seconds))
    others = np.minimum(share * even, stages * work.linear_seconds)
    others_seconds = float(others.sum() - others[longest])
    degree = np.arange(max(1, -(-int(work.tokens[longest]) // problem.tokens_per_rank)), n + 1)
    messages = 2 * (stages * pipeline.virtual_stages - 1) * pipeline.send_seconds
    way = stages * alone_by_degree(longest, in_batch_order(work), planner_inputs(problem))[degree] + messages
    step = (degree * way + others_seconds) / (degree + share * (n - degree))
    best = stages * longest_sequence_bound_seconds(work, problem) + messages
    return max(best, float(np.maximum(way, step).min()))


def simple_bound_seconds(work: Work, problem: Problem) -> float:
    """Return the larger of the area bound and the longest-sequence bound."""
    return max(area_bound_seconds(work, problem), longest_sequence_bound_seconds(work, problem))


def area_bound_seconds(work: Work, problem: Problem) -> float:
    """Bound the step by all work, shared evenly by all ranks.

    A micro-batch of degree d holds at most d * tokens_per_rank tokens and costs its ranks d * microbatch_seconds in
    addition to the work. So the ranks together pay for at least tokens / tokens_per_rank micro-batches, and every
    working rank for at least one. With recomputation S(h) of h tokens on a rank, beta + S(h) is at least h times its
    least value per token.

    A rank of speed s does s seconds of work per second. A rank without work wastes the whole step, which lasts at least
    as long as the shortest micro-batch on the fastest rank.

    Some rank runs at least as many micro-batches as that, a whole number, each for at least its host's seconds.
    """
    n, c = problem.num_ranks, problem.profile.coefficients
    if problem.rank_speeds is not None:
        together, quickest = sum(problem.rank_speeds), max(problem.rank_speeds)
        paid = max(together / quickest, float(work.tokens.sum()) / problem.tokens_per_rank)
        on_devices = float(work.total_seconds.sum() + c.microbatch_seconds * paid)
        return max(on_devices, c.host_microbatch_seconds * paid) / together
    tokens, beta = float(work.tokens.sum()) / n, c.microbatch_seconds
    count = max(1.0, tokens / problem.tokens_per_rank)
    fixed = beta * count
    if problem.profile.priced_levels:
        best = shared_tokens(problem)
        paid = beta + float(recomputation_seconds(problem.profile, best, degree=1))
        fixed = max(fixed, tokens / best * paid)
    on_hosts = c.host_microbatch_seconds * math.ceil(count - _MARGIN)
    return max(float(work.total_seconds.sum()) / n + fixed, on_hosts)


def longest_sequence_bound_seconds(work: Work, problem: Problem) -> float:
    """Bound the step by its longest sequence: max over sequences of min over feasible degrees of the time alone.

    A group of d ranks is no faster than the d-th fastest rank.
    """
    return float(longest_alone(_quickest_first(problem), in_batch_order(work), planner_inputs(problem)))


def abreast_bound_seconds(work: Work, problem: Problem) -> float:
    """Bound the step by its longest sequences, of which only a few fit side by side.

    While a sequence runs, its tokens occupy its ranks' budgets, and all ranks together hold N E tokens. So at most
    k = floor(N E / t) sequences of at least t tokens run at any moment, each for at least its least time alone. The sum
    of these times is therefore at most k times the makespan. This does not hold in pipelines, whose stages hold several
    micro-batches at once.
    """
    room = problem.num_ranks * problem.tokens_per_rank
    longest = np.argsort(-work.tokens, kind="stable")[:_MOST_SUMMED]
    longest = longest[work.tokens[longest] * _MOST_ABREAST > room]
    if not len(longest):
        return 0.0
    abreast = np.maximum(1, room // work.tokens[longest])
    least = least_alone(longest, _quickest_first(problem), in_batch_order(work), planner_inputs(problem))
    return float((np.cumsum(least) / abreast).max()) * (1.0 - _MARGIN)


def floored_bound_seconds(work: Work, problem: Problem) -> float:
    """Bound a step of waves by their floor: the fewest waves that hold all tokens, one with the longest sequence."""
    floor = planner_inputs(problem).floor
    if problem.sync == "iteration" or not floor:
        return 0.0
    waves = max(1, -(-int(work.tokens.sum()) // (problem.num_ranks * problem.tokens_per_rank)))
    return (waves - 1) * floor + max(floor, longest_sequence_bound_seconds(work, problem))


def _quickest_first(problem: Problem) -> FloatArray:
    """Return [num_ranks] the rank speeds, fastest first."""
    if problem.rank_speeds is None:
        return np.ones(problem.num_ranks)
    return np.asarray(sorted(problem.rank_speeds, reverse=True), dtype=np.float64)
