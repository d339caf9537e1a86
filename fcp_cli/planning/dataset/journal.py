"""Journal of the finished steps of a plan in progress, from which `--resume` continues.

A folder `.NAME.journal` holds `key` (a hash of everything that determines the plan) and parts `000000.steps`, ... Each
part is written atomically with a digest, so that after a crash the folder holds a valid prefix of the plan.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from fcp_cli.errors import FcpError
from fcp_cli.files import replaced_atomically, write_text_atomically
from fcp_cli.plan.file.schema import steps_to_arrow
from fcp_cli.plan.file.stored import steps_in_order
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.metadata.refits import ScheduledRefit
from fcp_cli.plan.step import StepPlan
from fcp_cli.reading.documents import DamagedError, read_object, read_text
from fcp_cli.reading.records import read_records, table_content, table_of_content, write_record
from fcp_cli.validation import validated
from fcp_cli.words import first_sentence

_FORMAT: Final = "fcp-journal/2"
_REFIT: Final = "refit.json"
_ROWS_PER_PART = 8_192


def is_begun(plan: Path) -> bool:
    """Return whether a plan is in progress or was interrupted."""
    return (_folder(plan) / "key").is_file()


def _folder(plan: Path) -> Path:
    return plan.with_name(f".{plan.name}.journal")


class Journal:
    """Journal of one plan.

    Args:
        path: plan file in progress.
        metadata: metadata of the plan, without totals and hash.

    Attributes:
        metadata: the given metadata, plus the recorded refit.
    """

    def __init__(self, path: Path, metadata: PlanMetadata) -> None:
        self._path = path
        self.folder = _folder(path)
        asked = replace(metadata, refits=None)  # refits only arise during training
        self._key = f"{_FORMAT} {hashlib.sha256(asked.hashed_json()).hexdigest()}"
        self.metadata = metadata
        self._due = metadata.first_step
        self._parts = 0
        self._pending: list[StepPlan] = []
        self._rows = 0

    @property
    def exists(self) -> bool:
        return (self.folder / "key").is_file()

    @property
    def steps_kept(self) -> bool:
        """Whether the journal has steps to resume from.

        Checks the disk, since Ctrl-C may arrive between writing a part and counting it.
        """
        return self._part(0).exists()

    def start(self) -> None:
        """Start an empty journal, removing an older one."""
        self.remove()
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise FcpError(f"cannot write {self.folder}: {error.strerror or error}") from error
        write_text_atomically(self.folder / "key", self._key)

    def resume(self) -> Iterator[StepPlan]:
        """Return the steps of an interrupted run of the same plan; later `append` calls extend the same journal.

        Raises:
            FcpError: there is no journal, or it belongs to another plan; while iterating, a part is damaged.
        """
        if not self.exists:
            raise FcpError(f"nothing to resume: there is no {self.folder}; run without --resume")
        if read_text(self.folder / "key", error=FcpError, label="the journal ") != self._key:
            raise FcpError(
                f"cannot resume: {self.folder} was begun with another manifest, cost profile or options, or by another "
                "version of fcp; give the same ones, or run without --resume to start over"
            )
        return self._kept_steps()

    def note_refit(self, refit: ScheduledRefit) -> None:
        """Record the refit of the following steps, before any of them is planned."""
        self.metadata = replace(self.metadata, refits=(refit,))
        write_text_atomically(self.folder / _REFIT, json.dumps(asdict(refit)))

    def read_refit(self) -> None:
        """Load the refit of an interrupted run, if any, into the metadata."""
        path = self.folder / _REFIT
        if path.is_file():
            kept = validated(read_object(path, error=FcpError), ScheduledRefit, where=str(path), error=FcpError)
            self.metadata = replace(self.metadata, refits=(kept,))

    def all_steps(self) -> Iterator[StepPlan]:
        """Yield all steps from the first on: those written to parts, then pending ones."""
        yield from Journal(self._path, self.metadata).resume()
        yield from self._pending

    def _kept_steps(self) -> Iterator[StepPlan]:
        while (part := self._part(self._parts)).exists():
            try:
                steps = self._steps_of(part)
            except (OSError, DamagedError) as error:
                raise self.damaged(first_sentence(error), part) from error
            self._parts += 1
            yield from steps

    def damaged(self, reason: str, place: Path | None = None) -> FcpError:
        """Return the error of a damaged journal."""
        return FcpError(
            f"cannot resume: {place or self.folder} is damaged: {reason}; run without --resume to start over"
        )

    def _steps_of(self, part: Path) -> list[StepPlan]:
        contents = list(read_records(part))
        if len(contents) != 1:
            raise DamagedError("it does not hold one whole record")
        rows = self.metadata.manifest.rows
        steps = steps_in_order(table_of_content(contents[0]), self.metadata, rows=rows, due=self._due)
        self._due += len(steps)
        return steps

    def append(self, step: StepPlan) -> None:
        """Append the next step; it is only written to disk once its part is full."""
        self._pending.append(step)
        self._rows += len(step)
        if self._rows < _ROWS_PER_PART:
            return
        table = steps_to_arrow(self._pending)
        with replaced_atomically(self._part(self._parts)) as temporary, temporary.open("wb") as file:
            write_record(file, table_content(table))
        self._parts += 1
        self._pending, self._rows = [], 0

    def remove(self) -> None:
        """Remove the journal, ignoring errors; `start` fails if it could not be removed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:06}.steps"
