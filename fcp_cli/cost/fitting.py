"""Fit of the cost model's coefficients to measured micro-batches, on relative error and robust to outliers.

With A = sum (1 + eta) length^2 / d, T = tokens / d and hops = r - 1 (d - 1 in a pure ring) the model of a sample is

    seconds = beta1 + alpha2 T + v P + max(alpha1 A, (1 - s) ring) + s ring + exchange
    ring    = r T hops + beta2 hops,    r = alpha3 / bandwidth (one r per tier)

If the prior prices the host, a sample takes the larger of that and of its host's seconds: those of a micro-batch, which
short samples determine, and the prior's for messages.

s is 0 by default (attention may hide the whole ring), and `exposed_ring_share` if that predicts held-out samples
better. P = patches / d is the vision encoder's work; the prior converts pairs of patches to patches. Window
attention with a halo exchange is outside the maximum, with a price proportional to alpha1 as in the prior, and halos
use the ring's bandwidth. Ulysses exchanges keep the prior's prices; `heads_fitting` fits those.

Bytes and bandwidth only appear as a quotient, so alpha3 is counted from the model, r is fitted, and the bandwidth
follows. A non-negative least-squares fit without the maximum is the start of a bounded, robust fit with it.
Undetermined coefficients, such as those of a ring that attention always hides, stay near their priors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fcp_cli.cost import formula
from fcp_cli.cost.formula import PackParts
from fcp_cli.cost.model import Work, causal_work, group_seconds, unit_prices, windowed_pairs
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, Bandwidth, Coefficients, CommonGround, CostProfile, Heads
from fcp_cli.errors import ProfileError
from fcp_cli.util.arrays import FloatArray

# Weight of the ring's prior against one sample; enough to hold coefficients that no sample determines.
PRIOR_WEIGHT = 0.02
LEAST_SAMPLES = 5
# Least relative reduction of the held-out error for which the exposed share is kept; less may be noise.
LEAST_GAIN = 0.1
_START_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured micro-batch.

    Attributes:
        lengths: tokens of each sequence of the pack.
        degree: ranks of its group.
        seconds: time from when all ranks of the group are ready to the end of the backward.
        crosses_nodes: whether the group spans nodes.
        heads_degree: Ulysses degree; a Ulysses group must lie within a node.
        silent: whether the peers were emulated, so that nothing was communicated.
        patches: patches of the pack's images and videos, plus their pairs of patches converted to patches.
    """

    lengths: tuple[int, ...]
    degree: int
    seconds: float
    crosses_nodes: bool = False
    heads_degree: int = 1
    silent: bool = False
    patches: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A fitted profile.

    Attributes:
        relative_errors: [samples] predicted / measured - 1.
        kept: names of undetermined coefficients, which keep the prior's values.
        held_out_percent: mean absolute held-out error of HIDDEN_RING and EXPOSED_RING; empty unless both were tried.
    """

    profile: CostProfile
    relative_errors: FloatArray
    kept: tuple[str, ...]
    held_out_percent: Mapping[str, float] = field(default_factory=dict)


def fit_profile(samples: Sequence[Sample], prior: CostProfile, *, held_out: Sequence[Sample] = ()) -> Fit:
    """Fit alpha1, alpha2, beta1, beta2, the bandwidths and, by one factor, the encoder; all else comes from `prior`.

    Args:
        samples: measured micro-batches of one model on one cluster.
        prior: source of bytes per token, and of the ring's figures if no sample of degree > 1 determines them.
        held_out: samples that decide whether to keep an exposed share; none is fitted unless they include rings.

    Raises:
        ProfileError: there are too few samples, or they do not determine the coefficients.
    """
    _require_enough(samples, prior)
    terms = _Terms.of(samples, prior)
    tiers = [name for name, used in (("intra_node", terms.intra), ("inter_node", terms.inter)) if used.any()]
    profile = _fitted(terms, tiers, prior.on_common_ground(), with_share=False)
    held_out_percent: dict[str, float] = {}
    # Without a measured ring the prior's exposed share stays, which requires a common ground.
    if prior.common_ground is not None and not tiers:
        profile = _with_ground(_fitted(terms, tiers, prior, with_share=False), profile)
    elif tiers and any(sample.degree > 1 and not sample.silent for sample in held_out):
        richer = _with_ground(_fitted(terms, tiers, prior, with_share=True), profile)
        held_out_percent = {
            HIDDEN_RING: error_percent(held_out, profile),
            EXPOSED_RING: error_percent(held_out, richer),
        }
        if held_out_percent[EXPOSED_RING] <= (1 - LEAST_GAIN) * held_out_percent[HIDDEN_RING]:
            profile = richer
    kept = [f"bandwidth_bytes_per_second.{name}" for name in ("intra_node", "inter_node") if name not in tiers]
    if not tiers:
        kept.append("coefficients.ring_hop_seconds")
    if terms.patches.any():
        kept.append("the ratio of coefficients.vision_seconds_per_patch2 to vision_seconds_per_patch")
    return Fit(
        profile=profile,
        relative_errors=predicted_seconds(samples, profile) / terms.seconds - 1.0,
        kept=tuple(kept),
        held_out_percent=held_out_percent,
    )


def _with_ground(richer: CostProfile, plain: CostProfile) -> CostProfile:
    """Return `richer` with the fit without an exposed share as its common ground."""
    ground = CommonGround(coefficients=plain.coefficients, bandwidth_bytes_per_second=plain.bandwidth)
    return replace(richer, common_ground=ground)


def _fitted(terms: _Terms, tiers: Sequence[str], prior: CostProfile, *, with_share: bool) -> CostProfile:
    """Return the best of the robust fits from several starting points."""
    starts = _starts(terms, tiers, prior, with_share=with_share)
    best = min((_robust_fit(terms, tiers, start) for start in starts), key=lambda found: found[1])[0]
    return _with_parameters(prior, best, tiers, sees_patches=bool(terms.patches.any()))


def predicted_seconds(samples: Sequence[Sample], profile: CostProfile) -> FloatArray:
    """Predict [samples] seconds under the cost model, assuming causal masks."""
    c = profile.coefficients
    silent = np.array([s.silent for s in samples], dtype=bool)
    patches = np.array([s.patches for s in samples], dtype=np.float64)
    work = _work_of(samples, c)
    work = replace(work, linear_seconds=work.linear_seconds + c.vision_seconds_per_patch * patches)
    with_ring, without_ring = (
        group_seconds(
            replace(profile, coefficients=coefficients),
            work,
            degree=[s.degree for s in samples],
            crosses_nodes=[s.crosses_nodes for s in samples],
            heads_degree=[s.heads_degree for s in samples],
        )
        for coefficients in (c, _without_rings(c))
    )
    return np.where(silent, without_ring, with_ring)


def _work_of(samples: Sequence[Sample], c: Coefficients) -> Work:
    """Return the work of each sample as a pack of causal text."""
    sizes = np.array([len(sample.lengths) for sample in samples], dtype=np.int64)
    lengths = np.array([tokens for sample in samples for tokens in sample.lengths], dtype=np.int64)
    return causal_work(lengths, c).packed(np.cumsum(sizes) - sizes)


def _without_rings(c: Coefficients) -> Coefficients:
    """Return the coefficients with ring and halo communication set to zero."""
    names = ("ring_bytes_per_token", "ring_hop_seconds", "last_hop_bytes_per_token", "last_hop_seconds")
    return replace(c, **dict.fromkeys((*names, "halo_bytes_per_token", "halo_message_seconds"), 0.0))


def error_percent(samples: Sequence[Sample], profile: CostProfile) -> float:
    """Return the mean absolute relative error of predicted seconds, in percent."""
    measured = np.array([sample.seconds for sample in samples])
    return mean_absolute_percentage(predicted_seconds(samples, profile) / measured - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terms:
    """Factors of the coefficients in each sample; every array is [samples]."""

    attention: FloatArray
    windows: FloatArray  # part of `attention` that overlaps with no ring: layers with a halo exchange
    chunks: FloatArray  # seconds by the prior
    exchanges: FloatArray  # seconds by the prior, including halo messages
    linear: FloatArray
    patches: FloatArray
    ring: FloatArray
    halo: FloatArray
    hops: FloatArray
    intra: FloatArray  # 1 if the sample has a ring inside a node
    inter: FloatArray
    messages: FloatArray  # the host's seconds by the prior
    has_host: bool  # whether the prior prices it
    seconds: FloatArray

    @classmethod
    def of(cls, samples: Sequence[Sample], prior: CostProfile) -> _Terms:
        c = prior.coefficients
        shared = np.array([s.heads_degree for s in samples], dtype=np.float64)
        degree = np.array([s.degree for s in samples], dtype=np.float64)
        tokens = np.array([sum(s.lengths) for s in samples], dtype=np.float64)
        squares = np.array([_pairs(s.lengths, c) for s in samples], dtype=np.float64)
        crosses = np.array([s.crosses_nodes for s in samples], dtype=np.float64)
        # The seconds per token and hop are fitted, so their factor is taken at a price of 1.
        prices = unit_prices(prior)._replace(ring=np.ones(2))
        terms = formula.group_terms(degree, shared, 0, 0, prices)
        hops = terms.sets - 1
        rings = (hops > 0) & ~np.array([s.silent for s in samples], dtype=bool)
        exchanges: FloatArray = terms.exchange * tokens + terms.messages
        windowed: FloatArray = np.zeros_like(degree)
        halo: FloatArray = np.zeros_like(degree)
        work, unit = _work_of(samples, c).windows, _ring_unit(c)
        if work is not None:
            windowed = work.seconds / (c.attention_seconds_per_token2 or c.window_seconds_per_token2)
            messages = formula.halo_messages(terms.sets, work.shortest_tokens, prices.reach)
            exchanges = exchanges + rings * c.halo_message_seconds * messages
            halo = c.halo_bytes_per_token / unit * work.halo_tokens.astype(np.float64)
        else:
            messages = np.zeros_like(degree)
        moved = rings * terms.ring
        return cls(
            messages=formula.host_seconds(messages, terms, prices) - c.host_microbatch_seconds,
            has_host=c.host_microbatch_seconds > 0.0,
            attention=squares / degree,
            windows=windowed / degree,
            chunks=terms.chunk * tokens,
            exchanges=exchanges,
            linear=tokens / degree,
            patches=np.array([s.patches for s in samples], dtype=np.float64) / degree,
            ring=(c.ring_bytes_per_token / unit if unit else 1.0) * moved * tokens,
            halo=moved * halo,
            hops=rings * hops,
            intra=rings * (1 - crosses),
            inter=rings * crosses,
            seconds=np.array([s.seconds for s in samples], dtype=np.float64),
        )

    @property
    def columns(self) -> FloatArray:
        """[samples, 3 or 4] design matrix of alpha1, alpha2, beta1 and, if any sample has patches, v."""
        columns = [self.attention, self.linear, np.ones_like(self.linear)]
        return np.stack([*columns, self.patches] if self.patches.any() else columns, axis=1)

    def tier(self, name: str) -> FloatArray:
        return self.intra if name == "intra_node" else self.inter

    def seconds_of(self, parameters: FloatArray, tiers: Sequence[str]) -> FloatArray:
        """Predict [samples] seconds; parameters = [alpha1, alpha2, beta1, v?, beta2?, r per tier, s?, host?]."""
        columns, host = self.columns, parameters[-1]
        parameters = parameters[:-1] if self.has_host else parameters
        at = columns.shape[1]
        attention = parameters[0] * (self.attention - self.windows) + self.chunks
        unhidden = parameters[0] * self.windows + self.exchanges
        ring, share = np.zeros_like(attention), 0.0
        if tiers:
            ring += parameters[at] * self.hops
        for position, name in enumerate(tiers, start=at + 1):
            ring += parameters[position] * self.ring * self.tier(name)
            unhidden += parameters[position] * self.halo * self.tier(name)
        if len(parameters) > at + 1 + len(tiers):
            share = parameters[-1]
        parts = PackParts(columns[:, 1:] @ parameters[1:at] + unhidden, attention, ring - share * ring, share * ring)
        on_device = np.asarray(formula.overlapped_seconds(parts))
        return np.maximum(on_device, host + self.messages) if self.has_host else on_device


def _ring_unit(c: Coefficients) -> float:
    """Return the bytes per token that the fitted rate r stands for: alpha3, or the halo's if rings carry nothing."""
    return c.ring_bytes_per_token or c.halo_bytes_per_token


def _pairs(lengths: Sequence[int], prior: Coefficients) -> float:
    """Return twice the token pairs of a pack; pairs within windows are weighted by their price in the prior."""
    full, windowed = prior.attention_seconds_per_token2, prior.window_seconds_per_token2
    squares = sum(length * length for length in lengths)
    if not windowed:
        return squares
    within = float(windowed_pairs(np.array(lengths, dtype=np.float64), prior.window_tokens).sum())
    return squares + windowed / full * within if full else within


def _require_enough(samples: Sequence[Sample], prior: CostProfile) -> None:
    for sample in samples:
        if not sample.lengths or not np.isfinite(sample.seconds) or sample.seconds <= 0:
            raise ProfileError(
                f"a sample of lengths {list(sample.lengths)} took {sample.seconds} s; it cannot be fitted"
            )
    if len(samples) < LEAST_SAMPLES:
        missing = LEAST_SAMPLES - len(samples)
        raise ProfileError(
            f"{len(samples)} samples are too few: a fit needs at least {LEAST_SAMPLES}; {missing} more are missing, so "
            "that there are packs of three different lengths or more"
        )
    terms = _Terms.of(samples, prior)
    # Attention, linear work and fixed cost scale with different powers of the length, so three lengths separate them.
    shares = {round(float(a / t), 6) for a, t in zip(terms.attention, terms.linear, strict=True)}
    loads = {round(float(t), 6) for t in terms.linear}
    if len(loads) < 2:
        raise ProfileError(
            f"all samples have {loads.pop():g} tokens per rank; microbatch_seconds and linear_seconds_per_token need "
            "packs of at least two sizes"
        )
    if len(shares) < 2:
        raise ProfileError(
            f"all samples have sequences of {shares.pop():g} tokens; attention_seconds_per_token2 and "
            "linear_seconds_per_token need at least two lengths"
        )
    columns = _columns(terms)
    if num_determined(columns[:, :3]) < 3:
        raise ProfileError(
            "the samples cannot tell attention, linear work and the fixed cost apart: measure packs of at least three "
            "different lengths"
        )
    if num_determined(columns) < columns.shape[1]:
        raise ProfileError(
            "the samples cannot tell the vision encoder from the language model, since all packs have patches in "
            "proportion to their tokens; measure the encoder with 'fcp profile', or add a run on mixed data"
        )


def _columns(terms: _Terms) -> FloatArray:
    """Return the design matrix of relative errors."""
    return np.asarray(terms.columns / terms.seconds[:, None])


def _starts(terms: _Terms, tiers: Sequence[str], prior: CostProfile, *, with_share: bool) -> list[FloatArray]:
    """Return starting points with the ring on both sides of the maximum, whose gradient vanishes on the hidden side.

    Compute coefficients start from NNLS, on samples without a ring if they suffice, and the ring from the prior.
    """
    alone = terms.hops == 0
    columns = _columns(terms)
    chosen = columns[alone] if np.unique(terms.linear[alone]).size >= 3 else columns
    solution = non_negative_least_squares(chosen, np.ones(len(chosen)))
    c = prior.coefficients
    # Coefficients at zero start slightly above it: the robust fit works in multiples of its start.
    floor = 1e-3 * np.median(terms.seconds) / np.maximum(terms.columns.max(axis=0), 1e-30)
    rates = [_ring_unit(c) / getattr(prior.bandwidth, name) for name in tiers]
    ring = [max(c.ring_hop_seconds, 1e-6), *(max(rate, 1e-15) for rate in rates)] if tiers else []
    share = [_START_SHARE] if with_share else []
    # A ring 10 or 100 times as slow outlasts attention, which puts the start on the ring's side of the maximum.
    scales = (1.0, 10.0, 100.0) if tiers else (1.0,)
    # The host starts on both sides of its maximum, too: as the prior says, and as long as the shortest sample.
    least = float((terms.seconds - terms.messages).min())
    hosts = [[host] for host in (c.host_microbatch_seconds, least) if host > 0.0] if terms.has_host else [[]]
    fixed = np.maximum(solution, floor)
    return [np.concatenate([fixed, scale * np.array(ring), share, host]) for host in hosts for scale in scales]


def _robust_fit(terms: _Terms, tiers: Sequence[str], start: FloatArray) -> tuple[FloatArray, float]:
    """Return (parameters, cost) of a bounded least-squares fit of relative error with outliers counted linearly."""
    at = terms.columns.shape[1]
    ring = slice(at, at + 1 + len(tiers)) if tiers else slice(at, at)

    host = slice(len(start) - terms.has_host, len(start))

    def residuals(parameters: FloatArray) -> FloatArray:
        error = terms.seconds_of(parameters, tiers) / terms.seconds - 1.0
        held = np.append(parameters[ring] / start[ring], parameters[host] / start[host]) - 1.0
        return np.concatenate([error, PRIOR_WEIGHT * held])

    lower, upper = np.zeros(len(start)), np.full(len(start), np.inf)
    # Bounds are multiples of the start. Ring parameters stay above zero, since a bandwidth is the inverse of one. The
    # exposed share, if fitted, is the last parameter and at most 1.
    lower[ring] = 1e-3
    upper[ring.stop : host.start] = 1.0 / _START_SHARE
    parameters = robust_least_squares(residuals, start, (lower * start, upper * start))
    error = terms.seconds_of(parameters, tiers) / terms.seconds - 1.0
    # The solver's soft-L1 loss without the prior's term, so that starts compare by the samples alone.
    soft = 2.0 * (np.sqrt(1.0 + (error / OUTLIER_RELATIVE_ERROR) ** 2) - 1.0)
    return parameters, float(soft.sum())


def _with_parameters(
    prior: CostProfile, parameters: FloatArray, tiers: Sequence[str], *, sees_patches: bool
) -> CostProfile:
    c = prior.coefficients
    alpha1, alpha2, beta1, *rest = (float(value) for value in parameters)
    windowed = alpha1
    if c.attention_seconds_per_token2:
        windowed *= c.window_seconds_per_token2 / c.attention_seconds_per_token2
    coefficients = replace(
        c,
        attention_seconds_per_token2=alpha1
        if c.attention_seconds_per_token2 or not c.window_seconds_per_token2
        else 0.0,
        window_seconds_per_token2=windowed if c.window_seconds_per_token2 else 0.0,
        linear_seconds_per_token=alpha2,
        microbatch_seconds=beta1,
        host_microbatch_seconds=rest.pop() if c.host_microbatch_seconds else 0.0,
    )
    if sees_patches:
        per_patch = rest.pop(0)
        coefficients = replace(
            coefficients,
            vision_seconds_per_patch=per_patch,
            vision_seconds_per_patch2=per_patch * c.vision_seconds_per_patch2 / c.vision_seconds_per_patch,
        )
    if not tiers:
        return replace(prior, coefficients=coefficients)
    # Measured rings already include their last hops.
    coefficients = replace(coefficients, last_hop_bytes_per_token=0.0, last_hop_seconds=0.0)
    rates = {name: _ring_unit(c) / rate for name, rate in zip(tiers, rest[1:], strict=False)}
    share = rest[-1] if len(rest) > 1 + len(tiers) else 0.0
    return replace(
        prior,
        coefficients=replace(coefficients, ring_hop_seconds=rest[0], exposed_ring_share=share),
        bandwidth=Bandwidth(
            intra_node=rates.get("intra_node", prior.bandwidth.intra_node),
            inter_node=rates.get("inter_node", prior.bandwidth.inter_node),
        ),
    )


# Fit of the Ulysses exchange: message latency, and bandwidth as a share of the ring's.
#
# The model of a sample on a group of u x r ranks, with everything else known, is
#
#     seconds = rest + x bytes / bandwidth + exchange_seconds (u - 1),   bandwidth_share = 1 / x
#
# Bytes are counted from the model. Undetermined coefficients stay near their priors: the ring's bandwidth and the
# measured message latency.

_LEAST = 1e-3  # lower bound of fitted values, as a fraction of their starting values
_LEAST_SECONDS = 1e-6  # starting latency if the prior has none
# Weight of the prior against one sample. Low: latency grows tenfold if ranks share cores.
_PRIOR_WEIGHT = 0.002


def fit_groups(samples: Sequence[Sample], prior: CostProfile, *, held_out: Sequence[Sample] = ()) -> Fit:
    """Fit samples with and without Ulysses: `fit_profile` on pure rings, then the exchange on the others.

    If there are too few pure rings, `fit_profile` uses all samples with the prior's exchange prices.
    """
    sharing = [sample for sample in samples if sample.heads_degree > 1]
    try:
        fit = fit_profile(_rings(samples), prior, held_out=_rings(held_out))
    except ProfileError:
        if not sharing:
            raise
        fit = fit_profile(samples, prior, held_out=held_out)
    if not sharing or fit.profile.heads is None:
        return fit
    profile = replace(fit.profile, heads=fit_heads(sharing, fit.profile, fit.profile.heads))
    errors = predicted_seconds(samples, profile) / np.array([sample.seconds for sample in samples]) - 1.0
    return replace(fit, profile=profile, relative_errors=errors)


def _rings(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.heads_degree == 1]


def fit_heads(samples: Sequence[Sample], profile: CostProfile, prior: Heads) -> Heads:
    """Fit `bandwidth_share` and `exchange_seconds` to samples with a Ulysses degree > 1, keeping the rest fixed."""
    measured = np.array([sample.seconds for sample in samples])

    def predicted(slowness: float, message_seconds: float) -> FloatArray:
        heads = replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)
        return predicted_seconds(samples, replace(profile, heads=heads))

    # Seconds are linear in both parameters, so two differences give the columns.
    # 1e-12 stands for 0, which would divide by zero in the bandwidth share.
    rest = predicted(1e-12, 0.0)
    columns = np.stack([predicted(1.0, 0.0) - rest, predicted(1e-12, 1.0) - rest], axis=1)
    start = np.array([1.0 / prior.bandwidth_share, max(prior.exchange_seconds, _LEAST_SECONDS)])
    weights = _PRIOR_WEIGHT * np.array([1.0, prior.exchange_seconds > 0])

    def errors(parameters: FloatArray) -> FloatArray:
        relative = (rest + columns @ parameters) / measured - 1.0
        return np.concatenate([relative, weights * (parameters / start - 1.0)])

    slowness, message_seconds = robust_least_squares(errors, start, (_LEAST * start, np.full(2, np.inf))).tolist()
    return replace(prior, bandwidth_share=1.0 / slowness, exchange_seconds=message_seconds)


# Fit of a vision encoder's cost to measured calls, on relative error and robust to outliers.
#
#     seconds = beta + a * sum over parts of patches + b * sum over parts of patches^2
#
# The encoder attends within a part: an image, a pair of frames, a tile. beta is the fixed cost of a call, which every
# micro-batch of a vision model pays once.


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionCosts:
    """Fitted coefficients beta, a and b; see the module."""

    call_seconds: float
    seconds_per_patch: float
    seconds_per_patch2: float

    def predicted_seconds(self, calls: Sequence[Sequence[int]]) -> FloatArray:
        """Predict [calls] seconds; each call is the list of patches per part."""
        coefficients = np.array([self.call_seconds, self.seconds_per_patch, self.seconds_per_patch2])
        return np.asarray(_vision_columns(calls) @ coefficients)


def fit_vision(calls: Sequence[Sequence[int]], seconds: FloatArray) -> VisionCosts:
    """Fit non-negative coefficients by robust least squares, starting from non-negative least squares.

    Args:
        calls: measured calls, each a list of patches per part.
        seconds: [calls] seconds of forward, or of forward and backward.

    Raises:
        ProfileError: there are too few calls or too few distinct part sizes.
    """
    if len(calls) < LEAST_SAMPLES:
        raise ProfileError(f"{len(calls)} measurements of the vision encoder are too few: at least {LEAST_SAMPLES}")
    columns = _vision_columns(calls)
    relative = columns / seconds[:, None]
    if num_determined(relative) < 3:
        raise ProfileError("the vision encoder was measured with parts of too few sizes; at least three are needed")
    solution = non_negative_least_squares(relative, np.ones(len(seconds)))
    # Zero coefficients start slightly above zero: the robust fit works in multiples of its start.
    start = np.maximum(solution, 1e-3 * np.median(seconds) / columns.max(axis=0))

    def relative_errors(parameters: FloatArray) -> FloatArray:
        return np.asarray(columns @ parameters / seconds - 1.0)

    bounds = np.zeros(3), np.full(3, np.inf)
    call, per_patch, per_patch2 = robust_least_squares(relative_errors, start, bounds).tolist()
    return VisionCosts(call_seconds=call, seconds_per_patch=per_patch, seconds_per_patch2=per_patch2)


def _vision_columns(calls: Sequence[Sequence[int]]) -> FloatArray:
    """Return [calls, 3] the design matrix of the three coefficients."""
    return np.array([(1.0, float(sum(parts)), float(sum(patches * patches for patches in parts))) for parts in calls])


# Least squares for cost fits: non-negative, and robust to outliers in relative error.

# Larger relative errors are outliers: they count linearly instead of squared.
OUTLIER_RELATIVE_ERROR = 0.05


def mean_absolute_percentage(relative_errors: npt.ArrayLike) -> float:
    """Return the mean absolute relative error in percent."""
    return float(np.mean(np.abs(np.asarray(relative_errors)))) * 100.0


def num_determined(columns: FloatArray) -> int:
    """Return the numerical rank of a design matrix of relative columns, none of which may be all zero."""
    return int(np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0), tol=1e-6))


def non_negative_least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimizes |columns @ x - values|; the columns may have different units."""
    from scipy.optimize import nnls  # lazy: from the extra `fit`, which analytic profiles do not need

    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    # Unscaled, the solver would drop columns of small norm, such as messages next to bytes.
    return np.asarray(nnls(columns / norms, values)[0] / norms)


def robust_least_squares(
    relative_errors: Callable[[FloatArray], FloatArray], start: FloatArray, bounds: tuple[FloatArray, FloatArray]
) -> FloatArray:
    """Return the bounded parameters that minimize the soft-L1 loss of the relative errors; `start` must be > 0."""
    from scipy.optimize import least_squares  # lazy: from the extra `fit`, which analytic profiles do not need

    # Parameters are multiples of the start, since coefficients differ by many orders of magnitude.
    found = least_squares(
        lambda scaled: relative_errors(scaled * start),
        np.ones(len(start)),
        bounds=(bounds[0] / start, bounds[1] / start),
        loss="soft_l1",
        f_scale=OUTLIER_RELATIVE_ERROR,
        x_scale="jac",
    )
    return np.asarray(found.x * start)
