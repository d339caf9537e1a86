"""Metadata of a plan: the JSON under the Parquet schema's key `fcp`."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fcp_cli.errors import PlanError, RunError
from fcp_cli.masks import MaskRows
from fcp_cli.options import MOST_ROWS
from fcp_cli.plan.metadata.masks import PlannedMasks
from fcp_cli.plan.metadata.mixture import Mixture
from fcp_cli.plan.metadata.refits import ScheduledRefit, refit_at
from fcp_cli.plan.pricing.setup import EncoderBalance as EncoderBalance
from fcp_cli.plan.pricing.setup import PlanSetup
from fcp_cli.plan.pricing.setup import Sync as Sync
from fcp_cli.plan.pricing.speeds import Speed, Speeds, speeds_of
from fcp_cli.reading.documents import kind_of
from fcp_cli.reading.parquet import FOOTER_KEY, footer_document
from fcp_cli.recipe import Phase
from fcp_cli.validation import Count, NonNegativeCount, validated

FORMAT: Final = "fcp-plan/1"
METADATA_KEY: Final = FOOTER_KEY
# Keys that change the meaning of steps, times or budgets, so readers that do not know them must reject the plan. They
# are omitted if None, so that plans without them keep the hash from before the keys existed.
_OPTIONAL_KEYS: Final = (
    *("attention", "batching", "continues", "encoder_balance", "encoder_ranks"),
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
        shuffle_kind: `index-free`: epochs are permuted by `planning.shuffling`; None: by PCG64's permutation.
        mixture: sources and weights if the manifest is a mixture, or None.
        continues: run that the plan continues; None: it begins with step 0.
        plan_hash: content hash over rows and metadata; see `hashing`.
        created: ISO time, not hashed.
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
        del document["plan_hash"], document["created"]
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
        raise PlanError(f"{name} is a Parquet file but not a plan; make one with 'fcp plan MANIFEST -o plan.parquet'")
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
        place = f"continues.trained is no mask of {rows} rows"
        if metadata.continues is not None:
            unpack_rows(metadata.continues.trained, rows)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def steps_per_epoch(sequences: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """Return the number of optimizer steps of an epoch of `sequences` sequences."""
    whole, rest = divmod(sequences, global_batch_size)
    return whole + (1 if rest and last_batch == "keep" else 0)
