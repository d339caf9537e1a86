"""Fits the coefficients of the cost model to measured micro-batches, on relative error and robust to outliers.

With A = sum (1 + eta) length^2 / d, T = tokens / d and hops = r - 1 (d - 1 in a ring) a sample reads

    seconds = beta1 + alpha2 T + v P + max(alpha1 A, (1 - s) ring) + s ring + exchange
    ring    = r T hops + beta2 hops,    r = alpha3 / bandwidth (one r per tier)

with s = 0 where attention may hide the whole ring, and s = `exposed_ring_share` where that predicts held-out samples
better. P = patches / d is the vision encoder's work, with pairs of patches as the patches that take as long by the
prior. If halos travel in place of rings, A has none of attention in windows: that stands outside the maximum, in
proportion to alpha1 by the prior, with the halos, which go at the ring's bandwidth. Exchanges of ranks that share heads
are as the prior has them; `heads_fitting` fits these. Bytes and bandwidth only ever appear as their quotient: alpha3 is
counted from the model, r is fitted, and the bandwidth follows. A non-negative least-squares fit without the maximum
starts a bounded, robust one with it. Coefficients that the samples do not determine, as of a ring that
always hides behind attention, stay near their priors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fcp_cli.arrays import FloatArray
from fcp_cli.cost import formula
from fcp_cli.cost.formula import PackParts
from fcp_cli.cost.least_squares import (
    OUTLIER_RELATIVE_ERROR,
    mean_absolute_percentage,
    non_negative_least_squares,
    num_determined,
    robust_least_squares,
)
from fcp_cli.cost.model import Work, causal_work, group_seconds, unit_prices, windowed_pairs
from fcp_cli.cost.profile import EXPOSED_RING, HIDDEN_RING, Bandwidth, Coefficients, CommonGround, CostProfile
from fcp_cli.errors import ProfileError

# Weight of "the ring is as its prior says" against one sample; enough to hold coefficients that no sample determines.
PRIOR_WEIGHT = 0.02
LEAST_SAMPLES = 5
# An exposed share is fitted where it takes at least this share of the held-out error away: less may be chance.
LEAST_GAIN = 0.1
_START_SHARE = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured micro-batch.

    Attributes:
        lengths: tokens of each sequence of the pack.
        degree: ranks of its group.
        seconds: the time from the moment all ranks of the group were ready to the end of its backward.
        crosses_nodes: whether the group spans nodes.
        heads_degree: ranks of a set that shares heads, inside a node.
        silent: its peers were emulated, so that nothing was communicated.
        patches: the patches of the pack's images and videos, and the work of their pairs of patches, in patches.
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
        relative_errors: [samples] predicted / measured - 1 of each sample it was fitted to.
        kept: coefficients that the samples do not determine and that stay as they were.
        held_out_percent: mean absolute error by model (HIDDEN_RING, EXPOSED_RING), where both could be tried.
    """

    profile: CostProfile
    relative_errors: FloatArray
    kept: tuple[str, ...]
    held_out_percent: Mapping[str, float] = field(default_factory=dict)


def fit_profile(samples: Sequence[Sample], prior: CostProfile, *, held_out: Sequence[Sample] = ()) -> Fit:
    """Fit alpha1, alpha2, beta1, beta2, the bandwidths and, by one factor, the encoder; all else stays as in `prior`.

    Args:
        samples: measured micro-batches of one model on one cluster.
        prior: gives bytes per token, and the ring's figures if no sample of degree > 1 determines them.
        held_out: decide whether an exposed share predicts better; without rings among them none is fitted.
    """
    _require_enough(samples, prior)
    terms = _Terms.of(samples, prior)
    tiers = [name for name, used in (("intra_node", terms.intra), ("inter_node", terms.inter)) if used.any()]
    profile = _fitted(terms, tiers, prior.on_common_ground(), with_share=False)
    held_out_percent: dict[str, float] = {}
    # No ring was measured, so the prior's exposed share stays, and the fit without one beside it.
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
    """Add the fit of the same samples without an exposed share to the one with it."""
    ground = CommonGround(coefficients=plain.coefficients, bandwidth_bytes_per_second=plain.bandwidth)
    return replace(richer, common_ground=ground)


def _fitted(terms: _Terms, tiers: Sequence[str], prior: CostProfile, *, with_share: bool) -> CostProfile:
    """Return the best of the robust fits from several starting points."""
    starts = _starts(terms, tiers, prior, with_share=with_share)
    best = min((_robust_fit(terms, tiers, start) for start in starts), key=lambda found: found[1])[0]
    return _with_parameters(prior, best, tiers, sees_patches=bool(terms.patches.any()))


def predicted_seconds(samples: Sequence[Sample], profile: CostProfile) -> FloatArray:
    """Predict the seconds of samples under the cost model, causal masks assumed."""
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
    """Return the cost without messages."""
    names = ("ring_bytes_per_token", "ring_hop_seconds", "last_hop_bytes_per_token", "last_hop_seconds")
    return replace(c, **dict.fromkeys((*names, "halo_bytes_per_token", "halo_message_seconds"), 0.0))


def error_percent(samples: Sequence[Sample], profile: CostProfile) -> float:
    """Return the mean absolute error of the predicted seconds of samples, in per cent."""
    measured = np.array([sample.seconds for sample in samples])
    return mean_absolute_percentage(predicted_seconds(samples, profile) / measured - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Terms:
    """The factors of the coefficients; every array is [samples]."""

    attention: FloatArray
    windows: FloatArray  # the part that hides no ring: of layers whose halos travel
    chunks: FloatArray  # seconds, as the prior knows them, and so are exchanges and messages of halos
    exchanges: FloatArray
    linear: FloatArray
    patches: FloatArray
    ring: FloatArray
    halo: FloatArray
    hops: FloatArray
    intra: FloatArray  # 1 if the sample has a ring inside a node
    inter: FloatArray
    seconds: FloatArray

    @classmethod
    def of(cls, samples: Sequence[Sample], prior: CostProfile) -> _Terms:
        c = prior.coefficients
        shared = np.array([s.heads_degree for s in samples], dtype=np.float64)
        degree = np.array([s.degree for s in samples], dtype=np.float64)
        tokens = np.array([sum(s.lengths) for s in samples], dtype=np.float64)
        squares = np.array([_pairs(s.lengths, c) for s in samples], dtype=np.float64)
        crosses = np.array([s.crosses_nodes for s in samples], dtype=np.float64)
        # A fit looks for the seconds in which a token travels: here one of them.
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
        moved = rings * terms.ring
        return cls(
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
        """[samples, 3 or 4] of alpha1, alpha2, beta1 and, where anything was encoded, v."""
        columns = [self.attention, self.linear, np.ones_like(self.linear)]
        return np.stack([*columns, self.patches] if self.patches.any() else columns, axis=1)

    def tier(self, name: str) -> FloatArray:
        return self.intra if name == "intra_node" else self.inter

    def seconds_of(self, parameters: FloatArray, tiers: Sequence[str]) -> FloatArray:
        """Predict [samples] seconds; parameters = [alpha1, alpha2, beta1, v?, beta2?, r per tier, s?]."""
        columns = self.columns
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
        return np.asarray(formula.overlapped_seconds(parts))


def _ring_unit(c: Coefficients) -> float:
    """Return the bytes whose seconds a fit looks for: alpha3, or those of halos where rings carry nothing."""
    return c.ring_bytes_per_token or c.halo_bytes_per_token


def _pairs(lengths: Sequence[int], prior: Coefficients) -> float:
    """Return twice the pairs of tokens of a pack; those within windows count by their price in the prior."""
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
    # Attention, linear work and the fixed cost grow with different powers of the length: three lengths tell them apart.
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
    """Return the columns divided by the seconds of each sample."""
    return np.asarray(terms.columns / terms.seconds[:, None])


def _starts(terms: _Terms, tiers: Sequence[str], prior: CostProfile, *, with_share: bool) -> list[FloatArray]:
    """Return starting points: a maximum has no slope on its hidden side, so rings begin on both sides.

    NNLS gives the computation, on the smallest degree's samples where they suffice; the prior gives the ring.
    """
    alone = terms.hops == 0
    columns = _columns(terms)
    chosen = columns[alone] if np.unique(terms.linear[alone]).size >= 3 else columns
    solution = non_negative_least_squares(chosen, np.ones(len(chosen)))
    c = prior.coefficients
    # A coefficient that NNLS put to zero starts at a small share of the time, so that the robust fit can move it.
    floor = 1e-3 * np.median(terms.seconds) / np.maximum(terms.columns.max(axis=0), 1e-30)
    rates = [_ring_unit(c) / getattr(prior.bandwidth, name) for name in tiers]
    ring = [max(c.ring_hop_seconds, 1e-6), *(max(rate, 1e-15) for rate in rates)] if tiers else []
    share = [_START_SHARE] if with_share else []
    # A ring ten or a hundred times as dear outlasts attention, so that the fit begins on its side of the maximum.
    scales = (1.0, 10.0, 100.0) if tiers else (1.0,)
    return [np.concatenate([np.maximum(solution, floor), scale * np.array(ring), share]) for scale in scales]


def _robust_fit(terms: _Terms, tiers: Sequence[str], start: FloatArray) -> tuple[FloatArray, float]:
    """Fit by bounded least squares on relative error, outliers counted linearly; return (parameters, cost)."""
    at = terms.columns.shape[1]
    ring = slice(at, at + 1 + len(tiers)) if tiers else slice(at, at)

    def residuals(parameters: FloatArray) -> FloatArray:
        error = terms.seconds_of(parameters, tiers) / terms.seconds - 1.0
        return np.concatenate([error, PRIOR_WEIGHT * (parameters[ring] / start[ring] - 1.0)])

    lower, upper = np.zeros(len(start)), np.full(len(start), np.inf)
    # Bounds are multiples of the start. A ring's figures stay above zero, since a bandwidth is the inverse of one; the
    # exposed share, the last parameter if there is one, ends at 1.
    lower[ring] = 1e-3
    upper[ring.stop :] = 1.0 / _START_SHARE
    parameters = robust_least_squares(residuals, start, (lower * start, upper * start))
    error = terms.seconds_of(parameters, tiers) / terms.seconds - 1.0
    # The solver's own loss, without the pull of the prior: starts are compared by the samples alone.
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
    # Measured rings have their last hops in them.
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
