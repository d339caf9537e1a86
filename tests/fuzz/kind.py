"""Kinds of input: how a changed one is drawn, and which commands or functions read it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import mutations

Change = Callable[[random.Random, bytes], bytes]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input.

    Attributes:
        name: for reports, as somebody would type it.
        words: of the command line; none if `call` reads the input.
        call: a function that gets the folder of seeds, for readers that only run inside a training job.
        files: contents that replace those of seeds, or new files.
        environment: variables that are set while the command runs.
        writes: globs of paths below the folder that the command may write or remove.
        starts: whether the command may start processes; it is stopped there, and counts as answered.
    """

    name: str
    words: tuple[str, ...] = ()
    call: Callable[[Path], object] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    starts: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Inputs of one kind.

    Attributes:
        draw: an input from a generator and the sound contents of the seeds.
        sound: inputs as people write them, all of which succeed.
        share: of the inputs of a campaign, relative to the other kinds; less for slow ones.
    """

    draw: Callable[[random.Random, Mapping[str, bytes]], Input]
    sound: tuple[Input, ...]
    share: float = 1.0


PLAN_OPTIONS = ("--ranks", "4", "--ranks-per-node", "2", "--tokens-per-rank", "8192", "--global-batch-size", "16")


def words_of(command: str, file: str = "") -> tuple[str, ...]:
    """Return the words of a command; FILE stands for the file, PLAN for the options of a small plan."""
    return tuple(command.replace("PLAN", " ".join(PLAN_OPTIONS)).replace("FILE", file).split())


def of_files(
    files: Mapping[str, Change] | str,
    *commands: str,
    change: Change | None = None,
    share: float = 1.0,
    writes: tuple[str, ...] = (),
    starts: bool = False,
) -> Kind:
    """Return the kind of files that commands read.

    Args:
        files: the sound ones, with the way each is changed; or one, which `change` changes.
        commands: of which one is drawn; FILE stands for the first file.
        change: see `files`.
        share, writes, starts: see `Kind` and `Input`.
    """
    if isinstance(files, str):
        assert change is not None
        files = {files: change}
    first = next(iter(files))
    sound = tuple(
        Input(name=f"fcp {' '.join(words_of(one, first))}", words=words_of(one, first), writes=writes, starts=starts)
        for one in commands
    )

    def draw(generator: random.Random, contents: Mapping[str, bytes]) -> Input:
        name = generator.choice(list(files))
        changed = files[name](generator, contents[name])
        one = generator.choice(sound)
        return Input(
            name=f"{one.name} [{name}]", words=one.words, files={name: changed}, writes=writes, starts=one.starts
        )

    return Kind(draw=draw, sound=sound, share=share)


def of_calls(files: Mapping[str, Change], *calls: Callable[[Path], object], share: float = 1.0) -> Kind:
    """Return the kind of files that functions read."""
    sound = tuple(Input(name=call.__name__, call=call) for call in calls)

    def draw(generator: random.Random, contents: Mapping[str, bytes]) -> Input:
        name = generator.choice(list(files))
        one = generator.choice(sound)
        return Input(name=f"{one.name} [{name}]", call=one.call, files={name: files[name](generator, contents[name])})

    return Kind(draw=draw, sound=sound, share=share)


def parquet(draw: random.Random, content: bytes) -> bytes:
    """Change a Parquet file."""
    with tempfile.NamedTemporaryFile(suffix=".parquet") as scratch:
        return mutations.of_parquet(draw, content, Path(scratch.name))
