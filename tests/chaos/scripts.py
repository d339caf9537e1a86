"""Jobs of users' scripts that plan while they train: one of Trainer, and one of a stream."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.chaos.jobs import Job
from tests.chaos.scene import RUN_DIR, Ground, Scene, layouts_of

_WORKERS = Path(__file__).parent / "workers"
_EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script on two ranks, without a plan.

    Attributes:
        files: it and what it imports, which lie in the folder of every run.
        options: of `fcp launch`.
        may_lose: see `checker.Reference`.
    """

    files: tuple[Path, ...]
    options: tuple[str, ...] = ()
    may_lose: int = 0

    @property
    def words(self) -> tuple[str, ...]:
        """Words of `fcp launch` that start it, and start it again: it finds its checkpoint itself."""
        where = ("--ranks", "2", "--run-dir", RUN_DIR)
        return (*self.options, *where, "--", self.files[0].name, f"{RUN_DIR}/checkpoints")

    def take(self, scene: Scene) -> None:
        """Make it the job of a run."""
        scene.ground = self.undisturbed(scene.ground.folder.parent)
        scene.first_words = scene.next_words = self.words
        for planned in scene.folder.glob("*.parquet"):  # of the bundled trainer's jobs
            planned.unlink()
        self.copy_to(scene.folder)

    def copy_to(self, folder: Path) -> None:
        for file in self.files:
            shutil.copy(file, folder)

    @cache  # noqa: B019 -- scripts are constants
    def undisturbed(self, parent: Path) -> Ground:
        """Return what its runs share, from one that goes straight to its end."""
        folder = parent / f"straight-{self.files[0].stem}"
        folder.mkdir()
        self.copy_to(folder)
        job = Job(*self.words, folder=folder, run_dir=folder / RUN_DIR, mark=f"{os.getpid()}-{folder.name}")
        return Ground.of(job, folder, lambda: layouts_of(job.run_dir / "plan.parquet"), may_lose=self.may_lose)


TRAINER = Script(files=(_WORKERS / "trainer_script.py", _EXAMPLES / "hugging_face" / "train.py"))
STREAM = Script(
    files=(_WORKERS / "online_script.py",),
    options=("--online", "--model", "qwen3-tiny", "--global-batch-size", "6"),
    may_lose=1,
)
