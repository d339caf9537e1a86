"""Metadata of a plan: the JSON under the Parquet schema's key `fcp`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Meta

from fcp_cli.cost.recipe import Phase
from fcp_cli.errors import PlanError, RunError
from fcp_cli.plan.setup import EncoderBalance as EncoderBalance
from fcp_cli.plan.setup import PlanSetup, Speed, Speeds, speeds_of, speeds_text
from fcp_cli.plan.setup import Sync as Sync
from fcp_cli.util.arrays import IntArray
from fcp_cli.util.files import as_word, unused
from fcp_cli.util.inputs import kind_of, read_json, require_input
from fcp_cli.util.masks import MaskKind, MaskRows
from fcp_cli.util.options import MOST_ROWS
from fcp_cli.util.parquet import FOOTER_KEY, footer_document, numpy_of
from fcp_cli.util.validation import Count, NonNegativeCount, Positive, validated
from fcp_cli.util.words import first_sentence

if TYPE_CHECKING:
    from fcp_cli.cost.profile import CostProfile


FORMAT: Final = "fcp-plan/1"
METADATA_KEY: Final = FOOTER_KEY
# Keys that change the meaning of steps, times or budgets, so readers that do not know them must reject the plan. They
# are omitted if None, so that plans without them keep the hash from before the keys existed.
_OPTIONAL_KEYS: Final = (
    *("attention", "baselines", "batching", "continues", "encoder_balance", "encoder_ranks"),
    *("masked_sequences", "masks", "mixture", "padding_multiple", "phase", "pipeline", "rank_speeds"),
    *("recipe", "refits", "shuffle_kind"),
)
_OPTIONAL_RECIPE_KEYS: Final = ("lora", "freeze")

RowCount = Annotated[int, Meta(ge=0, le=MOST_ROWS, description="a whole number of at least 0")]
LastBatch = Literal["keep", "drop"]
ShuffleKind = Literal["index-free"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestReference:
    """Manifest of a plan, which the plan's sequences are row numbers of."""

    name: str
    rows: RowCount
    content_hash: str

    @property
    def argument(self) -> str:
        """Command-line argument for the manifest; `-` if it came from a pipe."""
        return "-" if self.name == "stdin" else self.name

    def require_rows(self, found: int) -> None:
        """Raise RunError if a data set has another number of rows."""
        if found != self.rows:
            raise RunError(
                f"the data set has {found} rows, but the plan's manifest {self.name} has {self.rows}; build the "
                "manifest from this data set with 'fcp manifest build', and plan again with 'fcp plan'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongReport:
    """Policy for sequences longer than `max_length` tokens, and the number of such `sequences`."""

    policy: Literal["error", "drop", "truncate"] = "error"
    max_length: Count | None = None
    sequences: NonNegativeCount = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Run that a plan continues from `first_step` on.

    Attributes:
        plan_hash, num_ranks: of the plan that the run followed until then.
        first_step: first optimizer step of the plan; all earlier ones are trained.
        trained: mask of the rows already trained in the epoch of `first_step`, encoded by `pack_rows`.
    """

    plan_hash: str
    num_ranks: Count
    first_step: Count
    trained: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """Batching rule of a plan whose global batches are not simply `global_batch_size` sequences each.

    Attributes:
        by: consecutive sequences up to a limit of `tokens`, at least one; or batches as `given` by the stream; or a
            fixed number of `sequences`.
        tokens: token limit of a batch under `tokens`, else None.
        reorder_window: batches of a stream whose sequences were redistributed; only in plans of earlier versions.
    """

    by: Literal["sequences", "tokens", "given"] = "sequences"
    tokens: Count | None = None
    reorder_window: Count | None = None


def pack_rows(mask: npt.NDArray[np.bool_]) -> str:
    """Encode a mask over the manifest's rows as text: base64 of zlib of one bit per row."""
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode()


def unpack_rows(text: str, rows: int) -> npt.NDArray[np.bool_]:
    """Decode the mask [rows] of `pack_rows`; raise ValueError if it is damaged."""
    try:
        # Bounded to detect excess by one byte: damaged data may unpack to any size.
        unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), -(-rows // 8) + 1)
        packed = np.frombuffer(unpacked, dtype=np.uint8)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(packed) != -(-rows // 8):
        raise ValueError(f"{8 * len(packed)} bits for {rows} rows")
    return np.unpackbits(packed, count=rows).astype(np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A strategy that can be used without a plan, under the recipe and sync that suit it best.

    Attributes:
        name: solver name.
        label: display name.
        seconds: predicted seconds of each step of `Baselines.steps`.
    """

    name: str
    label: str
    seconds: tuple[Positive, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baselines:
    """Baselines that a plan was compared with when it was made, on a few of its steps."""

    steps: tuple[NonNegativeCount, ...]
    strategies: tuple[Baseline, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMetadata(PlanSetup):
    """Everything needed to follow, check and reproduce a plan; `num_ranks` counts all ranks of the job.

    Attributes:
        phase: `forward` if times and token budget are of micro-batches without backward; None: training.
        global_batch_size: sequences of a global batch; the most of any batch unless `has_equal_batches`.
        masked_sequences: number of manifest rows with a non-causal mask factor, or None.
        masks: masks of the manifest's rows; None if it has none or they exceed the size limit.
        rank_speeds: speeds of the ranks that deviate from the cost profile, by rank, or None; see `speeds`.
        refits: refits during online planning, ascending by step, or None.
        epochs: passes over the data.
        last_batch: policy for a partial last batch: `keep` plans it, `drop` drops its sequences.
        step_limit: number of steps that planning stopped after; None: no limit.
        batching: batching rule, or None for `global_batch_size` sequences in order.
        solver_options: settings of the solver besides the common ones.
        cost_profile: full text of the YAML file.
        shuffle_kind: `index-free`: epochs are permuted by `planning.batches`; None: by PCG64's permutation.
        mixture: sources and weights if the manifest is a mixture, or None.
        continues: run that the plan continues; None: it begins with step 0.
        plan_hash: content hash over rows and metadata; see `hashing`.
        created: ISO time, not hashed.
        baselines: step times of other strategies, or None if they were not priced; not hashed.
    """

    fcp_version: str
    phase: Phase | None = None
    global_batch_size: Count
    masked_sequences: Count | None = None
    masks: PlannedMasks | None = None
    rank_speeds: Mapping[str, Speed] | None = None
    refits: tuple[ScheduledRefit, ...] | None = None
    seed: NonNegativeCount
    shuffle: bool
    epochs: Count = 1
    last_batch: LastBatch = "keep"
    step_limit: Count | None = None
    batching: Batching | None = None
    overlong: OverlongReport = field(default_factory=OverlongReport)
    solver: str
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    manifest: ManifestReference
    cost_profile: str
    shuffle_kind: ShuffleKind | None = None
    mixture: Mixture | None = None
    continues: Continuation | None = None
    steps: NonNegativeCount = 0
    distinct_groups: NonNegativeCount = 0
    plan_hash: str = ""
    created: str = ""
    baselines: Baselines | None = None

    @property
    def mask_rows(self) -> MaskRows | None:
        """Unpacked masks of the manifest's rows, or None if the plan stores none."""
        return None if self.masks is None else self.masks.of_rows(self.manifest.rows)

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.num_ranks * self.devices_per_rank

    def refit_at(self, step: int) -> ScheduledRefit | None:
        """Return the refit that applied to a step, or None."""
        return refit_at(self.refits, step)

    def speeds_at(self, step: int) -> Speeds | None:
        """Return [ranks] the rank speeds that a step was planned with; None if all match the cost profile."""
        refit = self.refit_at(step)
        named = {**(self.rank_speeds or {}), **(refit.rank_speeds if refit is not None else {})}
        return speeds_of(named, self.num_ranks)

    @property
    def first_step(self) -> int:
        """First step of the plan; not 0 if it continues a run."""
        return 0 if self.continues is None else self.continues.first_step

    @property
    def end_step(self) -> int:
        """End of the plan's steps, exclusive: optimizer steps of the whole run."""
        return self.first_step + self.steps

    @property
    def has_equal_batches(self) -> bool:
        """Whether every global batch but an epoch's last has `global_batch_size` sequences."""
        return self.batching is None or self.batching.by == "sequences"

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a full epoch, even if only part of it is planned."""
        if not self.has_equal_batches:  # such plans have one epoch and plan all of it
            return self.end_step
        return steps_per_epoch(self.planned_rows, self.global_batch_size, self.last_batch)

    @property
    def planned_rows(self) -> int:
        """Manifest rows of an epoch: all but overlong ones that are dropped; includes a dropped last batch."""
        dropped = self.overlong.sequences if self.overlong.policy == "drop" else 0
        return self.manifest.rows - dropped

    def hashed_json(self) -> bytes:
        """Return the hashed part of the metadata as canonical JSON."""
        document = self._document()
        for key in ("plan_hash", "created", "baselines"):
            document.pop(key, None)
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> str:
        """Return the metadata as JSON text, as stored in the file."""
        return json.dumps(self._document())

    def _document(self) -> dict[str, Any]:
        document = {"format": FORMAT, **asdict(self)}
        for key in _OPTIONAL_RECIPE_KEYS if self.recipe is not None else ():
            if document["recipe"][key] is None:
                del document["recipe"][key]
        if self.pipeline is not None and not self.pipeline.recompute_seconds_per_token:
            del document["pipeline"]["recompute_seconds_per_token"]
        return {key: value for key, value in document.items() if key not in _OPTIONAL_KEYS or value is not None}


def parse_metadata(raw: Mapping[bytes, bytes] | None, *, name: str) -> PlanMetadata:
    """Parse the metadata of a Parquet schema; `name` identifies the file in messages.

    Raises:
        PlanError: the metadata is missing, damaged, of another format, or inconsistent.
    """
    try:
        document = footer_document(raw)
    except ValueError as error:
        raise PlanError(f"{name}: the plan's metadata is damaged: {error}") from error
    if document is None:
        make = f"fcp plan {as_word(name)} -o {unused('plan.parquet')}"
        raise PlanError(f"{name} is a Parquet file but not a plan; make one with '{make}'")
    if not isinstance(document, dict):
        raise PlanError(f"{name}: the plan's metadata is damaged: it is {kind_of(document)}, not a mapping")
    found = document.pop("format", None)
    if found != FORMAT:
        raise PlanError(f"{name} has format {found!r}; this fcp reads {FORMAT}; make it again with 'fcp plan'")
    metadata = validated(
        document,
        PlanMetadata,
        where=f"{name}: the plan's metadata cannot be used",
        error=PlanError,
        remedy="use the fcp that made the plan, or make it again with 'fcp plan'",
    )
    try:
        _require_sound(metadata)
    except ValueError as error:
        raise PlanError(f"{name}: the plan's metadata is damaged: {error}") from error
    return metadata


def _require_sound(metadata: PlanMetadata) -> None:
    """Raise ValueError if rank speeds, masks, stages, mixture or trained rows do not fit the job and its manifest."""
    rows = metadata.manifest.rows
    again = () if metadata.pipeline is None else metadata.pipeline.recompute_seconds_per_token
    place = "rank_speeds"
    try:
        for named in (metadata.rank_speeds, *(refit.rank_speeds for refit in metadata.refits or ())):
            speeds_of(named, metadata.num_ranks)
        place = "masks"
        if metadata.masks is not None:
            metadata.masks.of_rows(rows)
        place = "pipeline"
        if again and len(again) != metadata.pipeline_parallel:
            raise ValueError(f"{len(again)} times of recomputation for {metadata.pipeline_parallel} stages")
        place = "mixture"
        if metadata.mixture is not None and (fault := metadata.mixture.fault(rows)):
            raise ValueError(fault)
        place = "baselines"
        if metadata.baselines is not None:
            steps = len(metadata.baselines.steps)
            if not steps or any(len(one.seconds) != steps for one in metadata.baselines.strategies):
                raise ValueError(f"not one time for each of {steps} steps")
        place = f"continues.trained is no mask of {rows} rows"
        if metadata.continues is not None:
            unpack_rows(metadata.continues.trained, rows)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def steps_per_epoch(sequences: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """Return the number of optimizer steps of an epoch of `sequences` sequences."""
    whole, rest = divmod(sequences, global_batch_size)
    return whole + (1 if rest and last_batch == "keep" else 0)


# Plan hash: equal content has an equal hash, independent of the writer and of the split into row groups.
#
# One running SHA-256 per column over little-endian values (a list column has two: list lengths and values), then one
# over the column digests and the canonical metadata. Streaming, so a plan of any size is hashed in constant memory.

_SCALARS = {
    "step": "<i8",
    "order": "<i4",
    "wave": "<i4",
    "start_seconds": "<f8",
    "seconds": "<f8",
    "step_seconds": "<f8",
    "step_bound_seconds": "<f8",
}
_HEADS_DEGREE = (
    "heads_degree",
    "<i4",
)  # optional column, so that plans without it keep their hash from before it existed
_LISTS = {"ranks": "<i4", "sequences": "<i8", "lengths": "<i4"}


class PlanHasher:
    """Streaming hasher of plan rows, which must arrive in order, in pieces of any size."""

    def __init__(self) -> None:
        names = [*_SCALARS, *(f"{name}.{part}" for name in _LISTS for part in ("length", "values"))]
        self._digests: dict[str, Any] = {name: hashlib.sha256() for name in names}

    def update(self, rows: pa.RecordBatch | pa.Table) -> None:
        """Hash the next rows."""
        for batch in rows.to_batches() if isinstance(rows, pa.Table) else (rows,):
            for name, dtype in self._scalars_of(batch):
                self._feed(name, numpy_of(batch.column(name)), dtype)
            for name, dtype in _LISTS.items():
                column = batch.column(name)
                # Sizes instead of offsets: offsets depend on where a row group begins.
                self._feed(f"{name}.length", np.diff(numpy_of(column.offsets)), "<i4")
                self._feed(f"{name}.values", numpy_of(column.flatten()), dtype)

    def _scalars_of(self, batch: pa.RecordBatch) -> list[tuple[str, str]]:
        scalars = list(_SCALARS.items())
        if _HEADS_DEGREE[0] in batch.schema.names:
            self._digests.setdefault(_HEADS_DEGREE[0], hashlib.sha256())
            scalars.append(_HEADS_DEGREE)
        return scalars

    def _feed(self, name: str, values: Any, dtype: str) -> None:
        # Fixed width and byte order: the hash depends neither on the writer's types nor on the machine.
        self._digests[name].update(np.ascontiguousarray(values, dtype=dtype).tobytes())

    def hexdigest(self, metadata: PlanMetadata) -> str:
        """Return the plan hash, 64 hexadecimal digits."""
        total = hashlib.sha256(metadata.hashed_json())
        for name, digest in self._digests.items():
            total.update(name.encode())
            total.update(digest.digest())
        return total.hexdigest()


# Rules that cut a stream of sequences into global batches.

T = TypeVar("T")


def cut_by_count(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yield batches of `count` items; the last may have fewer."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == count:  # yield before fetching the next item, which may block
            yield batch
            batch = []
    if batch:
        yield batch


def cut_by_tokens(items: Iterable[T], most_tokens: int, tokens_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield batches of at most `most_tokens` tokens; an item that exceeds them is a batch by itself."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        length = tokens_of(item)
        if batch and tokens + length > most_tokens:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += length
        if tokens >= most_tokens:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def offsets_by_tokens(length_tokens: IntArray, most_tokens: int) -> IntArray:
    """Return [batches + 1] the offsets of the batches of `cut_by_tokens`."""
    batches = cut_by_tokens(length_tokens.tolist(), most_tokens, int)
    return np.cumsum([0, *(len(batch) for batch in batches)], dtype=np.int64)


# Attention masks of a manifest's rows, stored in the plan's metadata so that the runtime needs no manifest.

MOST_CHARACTERS = 1 << 22
"""Of the text of packed masks; a plan of more keeps none, and loops give them with their sequences."""
_MOST_NUMBERS = 1 << 27
_NUMBER = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMasks:
    """Masks of all rows of the manifest.

    Attributes:
        count: total count of numbers over all rows.
        packed: base64 of zlib of int32: the count of each row, then all numbers; "" for `full`, which has none.
    """

    kind: MaskKind
    count: NonNegativeCount = 0
    packed: str = ""

    def of_rows(self, rows: int) -> MaskRows:
        """Unpack the masks of a manifest of `rows` rows.

        Raises:
            ValueError: the packed text is damaged or too large.
        """
        if self.kind == "full":
            return MaskRows("full", np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
        if rows + self.count > _MOST_NUMBERS:
            raise ValueError(f"{rows} rows with {self.count} numbers")
        size = (rows + self.count) * _NUMBER.itemsize
        try:
            # Bounded to detect excess by one byte: damaged data may unpack to any size.
            found = zlib.decompressobj().decompress(base64.b64decode(self.packed, validate=True), size + 1)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(str(error)) from error
        if len(found) != size:
            raise ValueError(f"{len(found)} bytes for {rows} rows with {self.count} numbers")
        values = np.frombuffer(found, dtype=_NUMBER).astype(np.int64)
        sizes, numbers = values[:rows], values[rows:]
        if (sizes < 0).any() or int(sizes.sum()) != self.count:
            raise ValueError(f"rows of {int(sizes.sum())} numbers, not of {self.count}")
        return MaskRows(self.kind, np.concatenate(([0], np.cumsum(sizes))), numbers)


def planned_masks(masks: MaskRows | None) -> PlannedMasks | None:
    """Pack masks for a plan; None if there are none, or if they exceed the size limit."""
    if masks is None or masks.kind == "full":
        return None if masks is None else PlannedMasks(kind="full")
    values = np.concatenate((np.diff(masks.offsets), masks.numbers)).astype(_NUMBER)
    packed = base64.b64encode(zlib.compress(values.tobytes(), 6)).decode()
    if len(packed) > MOST_CHARACTERS or len(values) > _MOST_NUMBERS:
        return None
    return PlannedMasks(kind=masks.kind, count=len(masks.numbers), packed=packed)


# Mixtures of manifests: sequences per source in each step, and the source of each row.
#
# The concatenated sources form one virtual manifest, whose row numbers a plan's column `sequences` holds.

# The golden ratio as a 64-bit fraction: its multiples modulo 1 have the lowest discrepancy.
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_GRID: Final = 2.0**20  # shares are rounded to this grid, so that integer shares survive rounding errors


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSource:
    """A manifest of a mixture."""

    name: str
    rows: NonNegativeCount
    content_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureStage:
    """Source weights from `first_step` until the next stage; they need not sum to 1."""

    first_step: NonNegativeCount
    weights: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Sources in virtual row order, and stages ascending by first step, beginning with step 0."""

    sources: tuple[MixtureSource, ...]
    stages: tuple[MixtureStage, ...]

    def fault(self, rows: int) -> str:
        """Return the reason why the mixture is invalid for a virtual manifest of `rows` rows, or ""."""
        begins = [stage.first_step for stage in self.stages]
        if not self.sources or sum(source.rows for source in self.sources) != rows:
            return f"its sources do not have {rows} rows together"
        names = [source.name for source in self.sources]
        if twice := next((name for name in names if names.count(name) > 1), None):
            return f"two of its sources are named {twice}"
        if begins[:1] != [0] or any(after <= before for before, after in pairwise(begins)):
            return "its stages do not ascend from step 0"
        for stage in self.stages:
            finite = all(0 <= weight < np.inf for weight in stage.weights)
            if len(stage.weights) != len(self.sources) or not finite or not 0 < sum(stage.weights) < np.inf:
                return f"the weights from step {stage.first_step} on are not one finite number of at least 0 per source"
        return ""

    @property
    def offsets(self) -> IntArray:
        """[sources + 1] first virtual row of each source, then the total number of rows."""
        return np.cumsum([0, *(source.rows for source in self.sources)], dtype=np.int64)

    def locate(self, row: int) -> tuple[int, int]:
        """Return (source, row in the source) of a virtual row."""
        offsets = self.offsets
        source = int(np.searchsorted(offsets, row, side="right")) - 1
        return source, row - int(offsets[source])

    def counts(self, first: int, end: int, batch_size: int) -> IntArray:
        """Return [end - first, sources] the number of sequences of each source in steps `first` to `end` - 1.

        Each count is the source's exact share of the batch, rounded down or up, and each row sums to `batch_size`.
        Systematic sampling at multiples of the golden ratio makes the mean count converge to the exact share.
        """
        steps = np.arange(first, end, dtype=np.uint64)
        turns = (steps * _GOLDEN >> np.uint64(11)).astype(np.float64) / 2.0**53
        found = np.empty((len(steps), len(self.sources)), dtype=np.int64)
        ends = [*(stage.first_step for stage in self.stages[1:]), max(end, 1)]
        for stage, stage_end in zip(self.stages, ends, strict=True):
            here = slice(max(stage.first_step - first, 0), max(stage_end - first, 0))
            bounds = np.cumsum([0.0, *stage.weights]) / sum(stage.weights) * batch_size
            bounds = np.rint(bounds * _GRID) / _GRID
            bounds[-1] = batch_size
            found[here] = np.diff(np.floor(bounds + turns[here, None]), axis=1)
        return found


# Settings of a job that plans while it trains, shared by its ranks and its planner process.


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineOptions:
    """Options of online planning.

    Attributes:
        ahead: steps planned ahead of the training step; 0 if a batch depends on the previous step.
        stream_begins: position of the data stream after a restart: `over` at its first sequence, or `here` at the
            current step, as for rollouts.
        refit_every: steps between refits of the profile to measured micro-batches; None: never.
    """

    ahead: NonNegativeCount = 2
    stream_begins: Literal["over", "here"] = "over"
    refit_every: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineSettings:
    """Settings of an online plan: plan metadata without totals, and planning options."""

    metadata: PlanMetadata
    options: OnlineOptions

    def to_json(self) -> str:
        return json.dumps({"metadata": json.loads(self.metadata.to_json()), "options": asdict(self.options)})


def settings_of_json(document: Mapping[str, Any], *, name: str) -> OnlineSettings:
    """Parse the document of `OnlineSettings.to_json`; `name` identifies the file in messages."""
    where = f"{name}: it does not say what to plan for"
    if not isinstance(document, Mapping) or set(document) != {"metadata", "options"}:
        raise RunError(where)
    metadata = parse_metadata({METADATA_KEY: json.dumps(document["metadata"]).encode()}, name=name)
    return OnlineSettings(
        metadata=metadata, options=validated(document["options"], OnlineOptions, where=where, error=RunError)
    )


def read_online_settings(path: Path) -> OnlineSettings:
    """Read the settings that `fcp launch --online` wrote."""
    try:
        require_input(path, seekable=True)
    except OSError as error:
        raise RunError(f"cannot read {path}: {first_sentence(error)}") from error
    return settings_of_json(read_json(path, error=RunError), name=str(path))


def manifest_of(plan: Path) -> Path:
    """Return the path of the manifest that an online plan records its lengths in."""
    return plan.with_name(f"{plan.stem}.lengths.parquet")


# Refits of the cost profile during online planning, stored in the plan's metadata by step.

MOST_FACTOR: Final = 10.0
"""By which a coefficient may leave the cost profile, up or down: beyond, something is broken that no plan mends."""

Factor = Annotated[
    float, Meta(ge=1 / MOST_FACTOR, le=MOST_FACTOR, description=f"from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """Factors on the coefficients of a cost profile.

    Attributes:
        microbatch: factor on the fixed seconds of a micro-batch.
        linear: factor on the linear layers, recomputation and the vision encoder.
        attention: factor on attention, including windows and chunked states.
        ring: factor on communication: ring hops, halo messages, head exchange and inverse bandwidth.
    """

    microbatch: Factor = 1.0
    linear: Factor = 1.0
    attention: Factor = 1.0
    ring: Factor = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRefit:
    """Refit that applies from a step on, replacing the previous one.

    Attributes:
        first_step: first step planned with it.
        factors: factors on the cost profile's coefficients.
        rank_speeds: speeds of persistent stragglers; all other ranks keep the plan's speeds.
    """

    first_step: NonNegativeCount
    factors: Factors = field(default_factory=Factors)
    rank_speeds: Mapping[str, Speed] = field(default_factory=dict)


def refit_at(refits: Sequence[ScheduledRefit] | None, step: int) -> ScheduledRefit | None:
    """Return the last refit that begins at or before a step, or None."""
    return next((refit for refit in reversed(refits or ()) if refit.first_step <= step), None)


def refit_text(refit: ScheduledRefit) -> str:
    """Return a short description of a refit."""
    changed = [f"{name} x {factor:.3g}" for name, factor in asdict(refit.factors).items() if factor != 1.0]
    slow = [speeds_text(refit.rank_speeds)] if refit.rank_speeds else []
    return ", ".join([*changed, *slow]) or "as the profile says"


def refitted(profile: CostProfile, refit: ScheduledRefit | None) -> CostProfile:
    """Return the profile with a refit's factors applied."""
    if refit is None:
        return profile
    c, by = profile.coefficients, refit.factors
    bandwidth, heads = profile.bandwidth, profile.heads
    return replace(
        profile,
        heads=heads
        and replace(
            heads,
            exchange_seconds=heads.exchange_seconds * by.ring,
            host_exchange_seconds=heads.host_exchange_seconds * by.microbatch,
        ),
        recompute_levels=tuple(
            replace(level, seconds_per_token=level.seconds_per_token * by.linear) for level in profile.recompute_levels
        ),
        coefficients=replace(
            c,
            microbatch_seconds=c.microbatch_seconds * by.microbatch,
            host_microbatch_seconds=c.host_microbatch_seconds * by.microbatch,
            host_hop_seconds=c.host_hop_seconds * by.microbatch,
            host_last_hop_seconds=c.host_last_hop_seconds * by.microbatch,
            host_halo_message_seconds=c.host_halo_message_seconds * by.microbatch,
            linear_seconds_per_token=c.linear_seconds_per_token * by.linear,
            attention_seconds_per_token2=c.attention_seconds_per_token2 * by.attention,
            window_seconds_per_token2=c.window_seconds_per_token2 * by.attention,
            chunk_seconds_per_token=c.chunk_seconds_per_token * by.attention,
            vision_seconds_per_patch=c.vision_seconds_per_patch * by.linear,
            vision_seconds_per_patch2=c.vision_seconds_per_patch2 * by.linear,
            ring_hop_seconds=c.ring_hop_seconds * by.ring,
            last_hop_seconds=c.last_hop_seconds * by.ring,
            halo_message_seconds=c.halo_message_seconds * by.ring,
        ),
        bandwidth=replace(
            bandwidth, intra_node=bandwidth.intra_node / by.ring, inter_node=bandwidth.inter_node / by.ring
        ),
    )


# Facts of a training job that its ranks report to the planning process.

PLANNING_VARIABLE: Final = "FCP_PLANNING"
"""Names the file of a `PlanningWish` in a job without a plan, which its training loop has made at FCP_PLAN."""
OTHER_BATCHES_VARIABLE: Final = "FCP_ACCEPT_OTHER_BATCHES"
"""Set if a script may train on other batches than its own (packing, rows grouped by length)."""
PLANNED_BY_ITSELF: Final = (
    "transformers' Trainer, TRL's SFTTrainer and DPOTrainer, Lightning's Trainer, and loops around accelerate and "
    "DeepSpeed's engines"
)
"""Loops whose data and settings fcp reads when training begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningWish:
    """Command-line options for the plan of a job that starts without one.

    Attributes:
        model: name of a shipped model or path of a description, overriding the loop's own model.
        profile: path of a cost profile.
    """

    model: str | None = None
    profile: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """Settings of a training loop that its plan depends on.

    Attributes:
        loop: class name of the loop, for messages.
        device: device type of the ranks.
        rows_per_pass: per-device batch size of the loop without a plan.
        global_batch_size: rows of an optimizer step, over all ranks.
        packs_to: pack length in tokens of the loop without a plan; 0 if it is the longest sequence, None if the loop
            pads instead of packing.
        groups_by_length: whether the loop without a plan sorts rows by length, in blocks of 50 batches.
        concatenates: whether its collator joins the rows of a batch to one row instead of padding them.
        masks_all_pairs: whether its attention then computes all pairs of tokens of that row.
        epochs: passes over the data; None if only the loop knows when it ends.
        steps: optimizer steps to train; None: until the epochs end.
        recipe: settings of a `RecipeRequest`.
        config: contents of the model's config.json.
    """

    loop: str
    device: Literal["cpu", "cuda", "npu"]
    ranks: Count
    ranks_per_node: Count
    rows_per_pass: Count
    global_batch_size: Count
    epochs: Count | None
    steps: Count | None
    seed: NonNegativeCount
    shuffle: bool
    last_batch: LastBatch
    sync: Sync
    recipe: Mapping[str, Any]
    config: Mapping[str, Any]
    packs_to: NonNegativeCount | None = None
    groups_by_length: bool = False
    concatenates: bool = False
    masks_all_pairs: bool = False


def is_launched_without_plan() -> bool:
    """Return whether this process belongs to a job that was launched without a plan."""
    return PLANNING_VARIABLE in os.environ and bool(os.environ.get("FCP_PLAN"))


def has_no_plan() -> bool:
    """Return whether this process belongs to a job that was launched without a plan and has not made one yet."""
    return is_launched_without_plan() and not Path(os.environ["FCP_PLAN"]).exists()
