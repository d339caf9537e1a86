"""Full validation of a plan file: order, ranks, waves, token budget, coverage, times, totals, hash.

One pass over the file, a step at a time. Each violation is a `BrokenRule`. A file that cannot be read as a plan raises
PlanError.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.table import LengthTable
from fcp_cli.plan.file import PlanReader, list_sizes
from fcp_cli.plan.metadata import PlanMetadata, refitted, unpack_rows
from fcp_cli.plan.pricing import priced_times, step_prices
from fcp_cli.plan.rings import BrokenRule, PeerCount, check_layout, check_ranks, first_of, row_of_rank
from fcp_cli.plan.setup import Prices
from fcp_cli.plan.step import RingGroup, StepPlan
from fcp_cli.util.parquet import numpy_of
from fcp_cli.util.words import counted

_TOLERANCE = 1e-6  # relative, of predicted seconds


def check_plan(path: Path, *, manifest: LengthTable | None = None) -> Iterator[BrokenRule]:
    """Validate a plan file and yield its broken rules; a valid plan yields none.

    Args:
        manifest: manifest of the plan; without it, lengths are not compared and the times of masked or multimodal
            sequences are only checked against a lower bound.

    Raises:
        PlanError, ProfileError: the file is not a plan, is damaged, or embeds a damaged cost profile.
    """
    reader = PlanReader(path)
    metadata = reader.metadata
    profile = parse_cost_profile(metadata.cost_profile, name=f"{path}: the plan's cost profile")
    if reader.content_hash() != metadata.plan_hash:
        yield BrokenRule(message=f"its content does not have the hash {metadata.plan_hash[:16]} that it states: edited")
    if manifest is not None and manifest.content_hash() != metadata.manifest.content_hash:
        yield BrokenRule(message=f"{manifest.name} is not the manifest {metadata.manifest.name} that it was made from")
        manifest = None
    yield from _check_devices(metadata, profile)
    yield from _check_budget(metadata, profile)
    order_findings = list(_check_order(reader))
    yield from order_findings
    if order_findings:
        return  # later checks index by step and order
    coverage = _Coverage(metadata, manifest)
    groups: set[RingGroup] = set()
    steps, broken = 0, False
    yield from coverage.begin()
    for step, fault in reader.stored_steps():
        steps += 1
        yield from coverage.add(step, broken=fault is not None)
        if fault is None:
            yield from check_step(step, metadata, profile, manifest)
            groups.update(step.ring_groups())
        else:
            broken = True
            yield fault
    if steps != metadata.steps:
        yield BrokenRule(message=f"it has {counted(steps, 'step')}, its metadata states {metadata.steps}")
    if not broken:
        yield from _check_groups(groups, metadata)
    yield from coverage.finish()


def _check_groups(groups: set[RingGroup], metadata: PlanMetadata) -> Iterator[BrokenRule]:
    if len(groups) != metadata.distinct_groups:
        stated = metadata.distinct_groups
        yield BrokenRule(message=f"it has {len(groups)} distinct groups of degree > 1, its metadata states {stated}")
    largest = max((len(group.ranks) for group in groups), default=1)
    found = {"max_degree": (largest, "ranks in a ring"), "max_groups": (len(groups), "distinct groups")}
    for name, (most, noun) in found.items():
        limit = metadata.solver_options.get(name)
        if isinstance(limit, int) and most > limit:
            yield BrokenRule(message=f"it has {most} {noun}, its metadata states at most {limit} ({name})")
    yield from _check_peers(groups, metadata)


def _check_peers(groups: set[RingGroup], metadata: PlanMetadata) -> Iterator[BrokenRule]:
    limit = metadata.solver_options.get("max_peers")
    if limit is None:
        return
    peers = PeerCount(num_ranks=metadata.num_ranks, ranks_per_node=metadata.ranks_per_node)
    peers.add_groups(groups)
    if peers.most > limit:
        yield BrokenRule(message=f"a rank has {peers.most} peers, its metadata states at most {limit}")


def check_step(
    step: StepPlan, metadata: PlanMetadata, profile: CostProfile, manifest: LengthTable | None
) -> Iterator[BrokenRule]:
    """Validate one step against every rule that needs no other step."""
    findings = list(check_layout(step, metadata))
    yield from findings
    yield from _check_encoder_ranks(step, metadata)
    # Times follow from ranks; a broken budget or wave hides no wrong time.
    if not findings or next(check_ranks(step, metadata), None) is None:
        yield from _check_times(step, metadata, profile, manifest)


def _check_encoder_ranks(step: StepPlan, metadata: PlanMetadata) -> Iterator[BrokenRule]:
    """Check that encoder-only ranks hold no sequences."""
    if metadata.encoder_ranks is None:
        return
    encodes = step.ranks >= metadata.num_ranks - metadata.encoder_ranks
    busy = encodes & ~np.repeat(step.is_idle, step.degrees)
    for at in np.flatnonzero(busy)[:1].tolist():
        message = f"rank {step.ranks[at]} only encodes, but has sequences"
        yield BrokenRule(step=step.step, order=row_of_rank(step, at), message=message)


def _check_devices(metadata: PlanMetadata, profile: CostProfile) -> Iterator[BrokenRule]:
    """Check that the cost profile matches the plan's phase and devices per rank, and that `sync` suits its options."""
    if metadata.encoder_balance is not None and metadata.sync != "microbatch":
        yield BrokenRule(message=f"its encoder_balance needs sync microbatch, but sync is {metadata.sync}")
    if metadata.phase != profile.phase:
        phases = [phase or "training" for phase in (metadata.phase, profile.phase)]
        yield BrokenRule(message=f"its phase is {phases[0]}, but its times are from a cost profile of {phases[1]}")
    if metadata.devices_per_rank == 1:
        return
    if metadata.pipeline_parallel > 1 and metadata.sync != "microbatch":
        if metadata.pipeline is None:
            yield BrokenRule(
                message=f"pipeline_parallel is {metadata.pipeline_parallel}, which without the key pipeline needs sync "
                f"microbatch, but sync is {metadata.sync}"
            )
        elif metadata.pipeline.virtual_stages > 1:
            yield BrokenRule(
                message=f"virtual_stages is {metadata.pipeline.virtual_stages}, which needs sync microbatch, but sync "
                f"is {metadata.sync}"
            )
    for key in ("tensor_parallel", "pipeline_parallel"):
        planned, priced = getattr(metadata, key), profile.measurement.get(key)
        if isinstance(priced, int) and priced != planned:
            yield BrokenRule(message=f"{key} is {planned}, but its times are from a cost profile for {priced}")


def _check_budget(metadata: PlanMetadata, profile: CostProfile) -> Iterator[BrokenRule]:
    """Check the token budget against the memory of the cost profile, if it has any; it is that of training."""
    if metadata.phase == "forward":
        return
    state, capacity = profile.memory.model_state_bytes / 1e9, profile.memory.capacity_bytes / 1e9
    tokens = profile.memory.tokens_per_rank()
    if 0 < capacity <= state:
        yield BrokenRule(message=f"the model takes {state:.3g} of the {capacity:.3g} GB that its cost profile states")
    elif tokens is not None:
        # With as-needed recomputation, the memory block is of the first level, which keeps most.
        most = max([tokens, *(level.tokens for level in profile.recompute_levels)])
        if metadata.tokens_per_rank > most:
            stated = f"its token budget is {metadata.tokens_per_rank:,}"
            yield BrokenRule(message=f"{stated}, but a rank of its cost profile holds {most:,}")


def _check_order(reader: PlanReader) -> Iterator[BrokenRule]:
    """Check that rows ascend by (step, order) without gaps, and that list sizes and step totals are consistent."""
    last_step, last_order = reader.metadata.first_step - 1, -1
    totals: tuple[float, float] | None = None  # of the last row
    for table in reader.tables():
        step = numpy_of(table.column("step"))
        order = numpy_of(table.column("order"))
        before_step = np.concatenate(([last_step], step[:-1]))
        before_order = np.concatenate(([last_order], order[:-1]))
        follows = (step == before_step) & (order == before_order + 1)
        begins = (step == before_step + 1) & (order == 0)
        for row in np.flatnonzero(~(follows | begins))[:1].tolist():
            found = f"step {step[row]} order {order[row]} after step {before_step[row]} order {before_order[row]}"
            yield BrokenRule(message=f"rows out of order: {found}")
            return
        lengths = list_sizes(table, "lengths")
        for row in np.flatnonzero(list_sizes(table, "sequences") != lengths)[:1].tolist():
            yield BrokenRule(
                step=int(step[row]), order=int(order[row]), message="as many sequences as lengths are needed"
            )
            return
        for name, before in zip(("step_seconds", "step_bound_seconds"), totals or (np.nan, np.nan), strict=True):
            values = numpy_of(table.column(name))
            differs = follows & ~(values == np.concatenate(([before], values[:-1])))
            for row in np.flatnonzero(differs)[:1].tolist():
                yield BrokenRule(step=int(step[row]), order=int(order[row]), message=f"{name} is not that of its step")
                return
        last_step, last_order = int(step[-1]), int(order[-1])
        totals = (table.column("step_seconds")[-1].as_py(), table.column("step_bound_seconds")[-1].as_py())


def _check_times(
    step: StepPlan, metadata: PlanMetadata, profile: CostProfile, manifest: LengthTable | None
) -> Iterator[BrokenRule]:
    """Recompute seconds, starts and makespan from the cost profile and compare them with the step's own."""
    prices = step_prices(
        step,
        metadata,
        profile=refitted(profile, metadata.refit_at(step.step)),
        rank_speeds=metadata.speeds_at(step.step),
        manifest=manifest,
    )
    # Mask and vision columns, known from the manifest alone, only ever add time.
    # Relative, not exact: another writer may sum in a different order.
    price = prices.seconds
    wrong = ~np.isclose(step.seconds, price, rtol=_TOLERANCE) & (
        np.full(len(step), True) if manifest is not None else step.seconds < price
    )
    for order in np.flatnonzero(wrong)[:1].tolist():
        message = f"{step.seconds[order]:.6g} s, but its cost profile gives {price[order]:.6g} s"
        yield BrokenRule(step=step.step, order=order, message=message)
    if prices.encoder_seconds is not None and manifest is None:  # whatever lengths do not explain is the encoder's
        prices = prices._replace(encoder_seconds=np.maximum(step.seconds - price, 0.0))
    yield from _check_starts(step, metadata, profile, prices._replace(seconds=step.seconds), knows=manifest is not None)
    if not 0 < step.bound_seconds <= step.makespan_seconds * (1 + _TOLERANCE):
        message = f"its lower bound of {step.bound_seconds:.6g} s is not within its {step.makespan_seconds:.6g} s"
        yield BrokenRule(step=step.step, message=message)


def _check_starts(
    step: StepPlan, metadata: PlanMetadata, profile: CostProfile, prices: Prices, *, knows: bool
) -> Iterator[BrokenRule]:
    """Check starts and makespan against ranks, sync and pipelines.

    A vision encoder lengthens a pipeline's first stage by seconds that only the manifest `knows`, so pipelines with an
    encoder are skipped without it.
    """
    times = priced_times(
        metadata, prices, profile.step, wave=step.wave, rank_offsets=step.rank_offsets, ranks=step.ranks
    )
    if times.stuck:
        message = f"the pipelines of {counted(len(times.stuck), 'micro-batch')} wait for each other in a circle"
        yield BrokenRule(step=step.step, order=times.stuck[0], message=message)
        return
    costs = profile.coefficients
    if metadata.pipeline is not None and not knows and costs.vision_seconds_per_patch + costs.vision_seconds_per_patch2:
        return
    start, makespan = times.start_seconds, times.makespan_seconds
    idle = np.diff(step.sequence_offsets) == 0  # zero seconds long, so its start is arbitrary
    scale = max(makespan, 1e-300)
    for order in np.flatnonzero(~idle & (np.abs(start - step.start_seconds) > _TOLERANCE * scale))[:1].tolist():
        message = f"starts at {step.start_seconds[order]:.6g} s, but its ranks are free at {start[order]:.6g} s"
        yield BrokenRule(step=step.step, order=order, message=message)
    if not abs(step.makespan_seconds - makespan) <= _TOLERANCE * scale:  # "not <=", so that NaN is caught
        message = f"it takes {makespan:.6g} s, not the {step.makespan_seconds:.6g} s that it states"
        yield BrokenRule(step=step.step, message=message)


class _Coverage:
    """Check that every sequence of an epoch appears once, with its own length, in batches of the stated size."""

    def __init__(self, metadata: PlanMetadata, manifest: LengthTable | None) -> None:
        self._metadata = metadata
        self._manifest = manifest
        self._planned_rows = metadata.planned_rows
        self._steps_per_epoch = metadata.steps_per_epoch
        self._seen = np.zeros(metadata.manifest.rows, dtype=np.bool_)
        if metadata.continues is not None:
            self._seen |= unpack_rows(metadata.continues.trained, metadata.manifest.rows)
        self._steps = metadata.first_step

    def begin(self) -> Iterator[BrokenRule]:
        """Check that a continuation lists as many trained sequences as the epoch's earlier steps have."""
        if not self._metadata.has_equal_batches or self._metadata.mixture is not None:  # a mixture repeats rows
            return
        trained = int(self._seen.sum())
        due = self._metadata.first_step % max(self._steps_per_epoch, 1) * self._metadata.global_batch_size
        if trained != due:
            yield BrokenRule(
                message=f"it continues from step {self._metadata.first_step} with {trained} sequences of the epoch "
                f"trained, where {due} are due"
            )

    def add(self, step: StepPlan, *, broken: bool) -> Iterator[BrokenRule]:
        """Check the rows and the batch size of the next step.

        Args:
            step: the next step.
            broken: whether the step has invalid values; its rows are then only marked as seen.
        """
        self._steps += 1
        if broken:
            known = step.sequences[(step.sequences >= 0) & (step.sequences < len(self._seen))]
            self._seen[known] = True
        else:
            yield from self._check_rows(step)
        size = self._metadata.global_batch_size
        if not self._metadata.has_equal_batches and len(step.sequences) > size:
            yield BrokenRule(
                step=step.step, message=f"{counted(len(step.sequences), 'sequence')}, where {size} are the most"
            )
        index = (self._steps - 1) % max(self._steps_per_epoch, 1)
        wanted = size if self._metadata.mixture is not None else min(size, self._planned_rows - index * size)
        if self._metadata.has_equal_batches and len(step.sequences) != wanted:
            message = f"{counted(len(step.sequences), 'sequence')} instead of {wanted}"
            yield BrokenRule(step=step.step, message=message)
        if index + 1 == self._steps_per_epoch and self._metadata.has_equal_batches:
            self._seen[:] = False

    def _check_rows(self, step: StepPlan) -> Iterator[BrokenRule]:
        if (mixture := self._metadata.mixture) is not None:
            found = np.histogram(step.sequences, bins=mixture.offsets)[0]
            (due,) = mixture.counts(step.step, step.step + 1, self._metadata.global_batch_size)
            if (found != due).any():
                message = f"its sources have {found.tolist()} sequences, where their weights make {due.tolist()}"
                yield BrokenRule(step=step.step, message=message)
            yield from self._check_lengths(step)
            return
        values, counts = np.unique(step.sequences, return_counts=True)
        again = values[(counts > 1) | self._seen[values]]
        if len(again):
            yield BrokenRule(step=step.step, message=f"sequence {again[0]} appears again in its epoch")
        self._seen[values] = True
        yield from self._check_lengths(step)

    def _check_lengths(self, step: StepPlan) -> Iterator[BrokenRule]:
        if (step.lengths < 1).any():
            row = step.sequences[first_of(step.lengths < 1)]
            yield BrokenRule(step=step.step, message=f"sequence {row} has no tokens")
        overlong = self._metadata.overlong
        over = step.lengths > (overlong.max_length or np.inf)
        for at in np.flatnonzero(over)[:1].tolist():
            message = f"sequence {step.sequences[at]} has {step.lengths[at]} tokens, over {overlong.max_length}"
            yield BrokenRule(step=step.step, message=message)
        if self._manifest is None:
            return
        wanted = self._manifest.length_tokens[step.sequences]
        if overlong.policy == "truncate" and overlong.max_length is not None:
            wanted = np.minimum(wanted, overlong.max_length)
        wrong = wanted != step.lengths
        for at in np.flatnonzero(wrong)[:1].tolist():
            message = f"sequence {step.sequences[at]} has {step.lengths[at]} tokens, not the manifest's {wanted[at]}"
            yield BrokenRule(step=step.step, message=message)

    def finish(self) -> Iterator[BrokenRule]:
        """Check that the plan has all its epochs, up to the step limit, and drops only overlong sequences."""
        overlong = self._metadata.overlong
        if self._manifest is not None and overlong.max_length is not None:
            found = int((self._manifest.length_tokens > overlong.max_length).sum())
            if found != overlong.sequences:
                message = f"its metadata counts {overlong.sequences} overlong sequences, its manifest has {found}"
                yield BrokenRule(message=message)
        left = self._planned_rows - int(self._seen.sum())
        if not self._metadata.has_equal_batches and self._metadata.step_limit is None and left:
            yield BrokenRule(
                message=f"{counted(left, 'sequence')} of the manifest in no step, such as {first_of(~self._seen)}"
            )
        due = self._steps_per_epoch * self._metadata.epochs
        if self._metadata.step_limit is not None:
            due = min(due, self._metadata.step_limit)
        if self._steps != due:
            yield BrokenRule(message=f"it has {counted(self._steps, 'step')}, where its settings make {due}")
