"""What a plan says about itself: the JSON under the Parquet schema's key `fcp`."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fcp_cli.errors import PlanError

FORMAT = "fcp-plan/1"
CONTINUED_FORMAT = "fcp-plan/2"  # as 1, but its steps are numbered on from another plan's
PADDED_FORMAT = "fcp-plan/3"  # as 1 or 2, but seconds and token budget are those of padded lengths
_FORMATS = (FORMAT, CONTINUED_FORMAT, PADDED_FORMAT)
_LATER_KEYS = ("continues", "padding_multiple")  # left out where None: plans that are older than they keep their hash
METADATA_KEY = b"fcp"

Sync = Literal["iteration", "microbatch"]

# Least values of the numbers that everything else divides by or counts with.
_WHOLE_NUMBERS = {
    "num_ranks": 1,
    "ranks_per_node": 1,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "global_batch_size": 1,
    "tokens_per_rank": 1,
    "epochs": 1,
    "seed": 0,
    "steps": 0,
    "distinct_groups": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestReference:
    """The manifest a plan was made from: its sequences are row numbers into it."""

    name: str
    rows: int
    content_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongReport:
    """What was done with sequences longer than `max_length`; `sequences` of them were met."""

    policy: Literal["error", "drop", "truncate"] = "error"
    max_length: int | None = None
    sequences: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """What went before a plan for the rest of a run; its steps are numbered on.

    Attributes:
        plan_hash, num_ranks: of the plan that the run followed until then.
        first_step: optimizer step that the plan begins with; all before it are trained.
        trained: the rows that the epoch of `first_step` has trained before; see `pack_rows`.
    """

    plan_hash: str
    num_ranks: int
    first_step: int
    trained: str


def pack_rows(mask: npt.NDArray[np.bool_]) -> str:
    """A mask over the manifest's rows as text: base64 of zlib of one bit per row."""
    return base64.b64encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode()


def unpack_rows(text: str, rows: int) -> npt.NDArray[np.bool_]:
    """[rows] the mask that `pack_rows` made.

    Raises:
        ValueError: it is damaged, or of another number of rows.
    """
    try:
        packed = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), dtype=np.uint8)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if len(packed) != -(-rows // 8):
        raise ValueError(f"{8 * len(packed)} bits for {rows} rows")
    return np.unpackbits(packed, count=rows).astype(np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMetadata:
    """Everything needed to follow, check and reproduce a plan.

    Attributes:
        tokens_per_rank: the token budget, after head-room.
        padding_multiple: sequences count as `padding.padded_tokens` makes them; None: as they are.
        last_batch: what a last, partial batch did: `keep` plans it, `drop` leaves its sequences out.
        epochs: how often every sequence appears.
        step_limit: only that many first steps were planned; None: all.
        solver_options: whatever the solver was given beside the common settings.
        cost_profile: the whole text of the YAML.
        continues: what the plan goes on from; None: it begins with step 0.
        plan_hash: content hash over rows and metadata; see `hashing`.
        created: ISO time, outside the hash.
    """

    fcp_version: str
    num_ranks: int
    ranks_per_node: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sync: Sync
    global_batch_size: int
    tokens_per_rank: int
    padding_multiple: int | None = None
    seed: int
    shuffle: bool
    epochs: int = 1
    last_batch: Literal["keep", "drop"] = "keep"
    step_limit: int | None = None
    overlong: OverlongReport = field(default_factory=OverlongReport)
    solver: str
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    manifest: ManifestReference
    cost_profile: str
    continues: Continuation | None = None
    steps: int = 0
    distinct_groups: int = 0
    plan_hash: str = ""
    created: str = ""

    @property
    def devices_per_rank(self) -> int:
        """Devices, and processes, that hold one model replica together."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_devices(self) -> int:
        """Devices of the whole job."""
        return self.num_ranks * self.devices_per_rank

    @property
    def first_step(self) -> int:
        """The number of its first step."""
        return 0 if self.continues is None else self.continues.first_step

    @property
    def end_step(self) -> int:
        """One more than the number of its last step: optimizer steps of the whole run."""
        return self.first_step + self.steps

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch, whatever part of it is planned."""
        return steps_per_epoch(self.planned_rows, self.global_batch_size, self.last_batch)

    @property
    def planned_rows(self) -> int:
        """Rows of the manifest that an epoch goes over, before a last batch is dropped."""
        dropped = self.overlong.sequences if self.overlong.policy == "drop" else 0
        return self.manifest.rows - dropped

    @property
    def format(self) -> str:
        if self.padding_multiple is not None:
            return PADDED_FORMAT
        return FORMAT if self.continues is None else CONTINUED_FORMAT

    def hashed_json(self) -> bytes:
        """The part of the metadata that the plan hash covers, in one canonical form."""
        document = self._document()
        del document["plan_hash"], document["created"]
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    def to_json(self) -> str:
        return json.dumps(self._document())

    def _document(self) -> dict[str, Any]:
        document = {"format": self.format, **asdict(self)}
        return {key: value for key, value in document.items() if key not in _LATER_KEYS or value is not None}

    def with_totals(self, *, steps: int, distinct_groups: int) -> PlanMetadata:
        return replace(self, steps=steps, distinct_groups=distinct_groups)


def parse_metadata(raw: Mapping[bytes, bytes] | None, *, name: str) -> PlanMetadata:
    """Read the metadata of a Parquet schema.

    Raises:
        PlanError: the file is not a plan, of another format version, or its metadata is damaged.
    """
    if not raw or METADATA_KEY not in raw:
        raise PlanError(f"{name} is a Parquet file but not a plan; make one with 'fcp plan MANIFEST -o plan.parquet'")
    try:
        document = json.loads(raw[METADATA_KEY])
        found = document.pop("format", None)
    except (ValueError, AttributeError) as error:
        raise PlanError(f"{name}: the plan's metadata is damaged: {error}") from error
    if str(found).startswith("fcp-manifest/"):
        raise PlanError(f"{name} is a manifest, not a plan; make one with 'fcp plan {name} -o plan.parquet'")
    if found not in _FORMATS:
        raise PlanError(f"{name} has format {found!r}; this fcp reads {', '.join(_FORMATS)}")
    known = {f.name for f in fields(PlanMetadata)}
    try:
        document["manifest"] = ManifestReference(**document["manifest"])
        document["overlong"] = OverlongReport(**document.get("overlong", {}))
        if document.get("continues") is not None:
            document["continues"] = Continuation(**document["continues"])
        metadata = PlanMetadata(**{key: value for key, value in document.items() if key in known})
    except (KeyError, TypeError) as error:
        raise PlanError(f"{name}: the plan's metadata is damaged: {error}") from error
    if found != metadata.format:
        given = [key for key in _LATER_KEYS if getattr(metadata, key) is not None]
        keys = f"key {' and '.join(given)}" if given else f"none of the keys {', '.join(_LATER_KEYS)}"
        raise PlanError(f"{name}: the plan's metadata is damaged: format {found!r} with {keys}")
    for key, value, wanted in _wrong_values(metadata):
        raise PlanError(f"{name}: the plan's metadata is damaged: {key} is {value!r}, not {wanted}")
    return metadata


def _wrong_values(metadata: PlanMetadata) -> Iterator[tuple[str, Any, str]]:
    """Key, value and what it should be, of every value that nothing could work with."""
    for key, least in _WHOLE_NUMBERS.items():
        value = getattr(metadata, key)
        if not _is_whole(value, least):
            yield key, value, f"a whole number of at least {least}"
    for key, value, choices in (
        ("sync", metadata.sync, get_args(Sync)),
        ("last_batch", metadata.last_batch, ("keep", "drop")),
        ("overlong.policy", metadata.overlong.policy, ("error", "drop", "truncate")),
    ):
        if value not in choices:
            yield key, value, f"one of {', '.join(choices)}"
    for key, value in (
        ("step_limit", metadata.step_limit),
        ("overlong.max_length", metadata.overlong.max_length),
        ("padding_multiple", metadata.padding_multiple),
    ):
        if value is not None and not _is_whole(value, 1):
            yield key, value, "absent or a whole number of at least 1"
    for key, value in (("manifest.rows", metadata.manifest.rows), ("overlong.sequences", metadata.overlong.sequences)):
        if not _is_whole(value, 0):
            yield key, value, "a whole number of at least 0"
    if metadata.continues is not None:
        yield from _wrong_continuation(metadata.continues, metadata.manifest.rows)
    for key in ("solver", "cost_profile", "plan_hash"):
        if not isinstance(getattr(metadata, key), str):
            yield key, getattr(metadata, key), "a text"


def _wrong_continuation(continues: Continuation, rows: int) -> Iterator[tuple[str, Any, str]]:
    for key in ("num_ranks", "first_step"):
        if not _is_whole(getattr(continues, key), 1):
            yield f"continues.{key}", getattr(continues, key), "a whole number of at least 1"
    for key in ("plan_hash", "trained"):
        if not isinstance(getattr(continues, key), str):
            yield f"continues.{key}", getattr(continues, key), "a text"
            return
    try:
        unpack_rows(continues.trained, rows)
    except ValueError as error:
        yield "continues.trained", str(error), f"a mask of {rows} rows"


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def steps_per_epoch(sequences: int, global_batch_size: int, last_batch: Literal["keep", "drop"]) -> int:
    """Optimizer steps that one epoch of so many sequences takes."""
    whole, rest = divmod(sequences, global_batch_size)
    return whole + (1 if rest and last_batch == "keep" else 0)
