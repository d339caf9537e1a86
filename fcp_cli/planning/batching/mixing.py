"""Mixtures of manifests: parsing of `--mix`, reading of the sources, and the rows of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.errors import ManifestError, UsageError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table.columns import chunked, new_column
from fcp_cli.manifest.table.table import LengthTable
from fcp_cli.plan.metadata.mixture import Mixture, MixtureSource, MixtureStage
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.planning.batching.shuffling import permuted
from fcp_cli.reading.verified import content_hash_of

_FACTORS = ("eta", "vision_patches", "vision_patch_pairs")


def read_mixture(
    words: Sequence[str], *, length_column: str, before: Mixture | None = None, first_step: int = 0
) -> tuple[LengthTable, Mixture]:
    """Read the manifests of `--mix FILE:WEIGHT[@STEP]`; a weight applies from its step on.

    Args:
        words: the arguments, as typed; sources keep the order in which they are first named.
        length_column: the length column of every manifest.
        before: mixture of the run to continue, or None. Its sources come first, and its stages apply before
            `first_step`.
        first_step: default step of a weight, and the smallest allowed.

    Returns:
        The joined manifest of all sources, and the mixture.

    Raises:
        UsageError: a word is not FILE:WEIGHT[@STEP], a weight is negative or given twice, or those of a stage sum to 0.
        ManifestError: a manifest cannot be read, is given under two names, or has other columns than the first.
    """
    weights: dict[int, dict[str, float]] = {}
    for word in words:
        name, weight, step = _parsed(word, first_step)
        if name in weights.setdefault(step, {}):
            raise UsageError(f"--mix gives {name} twice from step {step} on; give each manifest one weight")
        weights[step][name] = weight
    names = list(dict.fromkeys(name for stage in weights.values() for name in stage))
    tables = [read_manifest(Path(name), length_column=length_column) for name in names]
    sources = [
        MixtureSource(name=source, rows=len(table), content_hash=table.content_hash())
        for source, table in zip(_source_names(names), tables, strict=True)
    ]
    _require_distinct(names, sources)
    if before is not None:
        names, tables, sources = _after(before, names, tables, sources)
    stages = [] if before is None else [stage for stage in before.stages if stage.first_step < first_step]
    stages = [replace(stage, weights=stage.weights + (0.0,) * (len(names) - len(stage.weights))) for stage in stages]
    now: dict[str, float] = dict.fromkeys(names, 0.0)
    for step, changed in sorted(weights.items()):
        now |= changed
        if not 0 < sum(now.values()) < np.inf:
            raise UsageError(f"the weights of --mix from step {step} on sum to {sum(now.values()):g}; give one above 0")
        stages.append(MixtureStage(first_step=step, weights=tuple(now.values())))
    if stages[0].first_step:
        raise UsageError(f"--mix gives no weight for steps 0 to {stages[0].first_step - 1}; add one without @STEP")
    mixture = Mixture(sources=tuple(sources), stages=tuple(stages))
    if fault := mixture.fault(sum(map(len, tables))):
        raise ManifestError(f"--mix: {fault}; rename one of its manifests")
    return _joined(names, tables, mixture), mixture


def planned_manifest(metadata: PlanMetadata, paths: Sequence[Path], *, length_column: str) -> LengthTable:
    """Read the manifest of a plan, or join all manifests of its mixture, given in any order.

    Raises:
        UsageError: several manifests are named, but the plan has only one.
        ManifestError: a manifest cannot be read, is not in the plan's mixture, or is missing.
    """
    if metadata.mixture is None:
        return read_manifest(one_manifest(metadata, paths), length_column=length_column)
    found = mixed_manifests(metadata.mixture, paths, length_column=length_column)
    tables = [read_manifest(path, length_column=length_column) for path in found]
    return _joined(list(map(str, found)), tables, metadata.mixture)


def one_manifest(metadata: PlanMetadata, paths: Sequence[Path]) -> Path:
    """Return the only manifest of a plan without a mixture.

    Raises:
        UsageError: several manifests are named.
    """
    if len(paths) > 1:
        raise UsageError(f"the plan is of one manifest, {metadata.manifest.name}, but --manifest names {len(paths)}")
    return paths[0]


def mixed_manifests(mixture: Mixture, paths: Sequence[Path], *, length_column: str) -> list[Path]:
    """Return the manifests of a plan's mixture in the order of its sources, identified by their content.

    Raises:
        ManifestError: a manifest cannot be read, is not in the plan's mixture, or is missing.
    """

    def hash_of(path: Path) -> str:
        return read_manifest(path, length_column=length_column).content_hash()

    found = {content_hash_of(path, partial(hash_of, path), column=length_column): path for path in paths}
    for source in mixture.sources:
        if source.content_hash not in found:
            named = ", ".join(map(str, paths))
            raise ManifestError(
                f"the plan mixes {source.name}, which is none of {named}, or was changed since; name it with --manifest"
            )
    for content_hash in found.keys() - {source.content_hash for source in mixture.sources}:
        names = ", ".join(source.name for source in mixture.sources)
        raise ManifestError(f"{found[content_hash]} is none of the manifests that the plan mixes: {names}")
    return [found[source.content_hash] for source in mixture.sources]


def _source_names(names: Sequence[str]) -> list[str]:
    """Return the names of the sources in a plan: file names, with parent folders if needed to make them unique."""
    parts = [Path(name).absolute().parts for name in names]
    for depth in count(1):
        short = ["/".join(one[-depth:]) for one in parts]
        if len(set(short)) == len(set(parts)):
            break
    # Folders only for those that share a file name.
    files = [one[-1] for one in parts]
    return [file if files.count(file) == 1 else one for file, one in zip(files, short, strict=True)]


def mixed_files(words: Sequence[str]) -> list[Path]:
    """Return the manifests named by `--mix`, each once.

    Raises:
        UsageError: a word is not FILE:WEIGHT[@STEP].
    """
    return list(dict.fromkeys(Path(_parsed(word, 0)[0]) for word in words))


def _parsed(word: str, first_step: int) -> tuple[str, float, int]:
    name, _, rest = word.rpartition(":")
    weight, _, step = rest.partition("@")
    try:
        value, begin = float(weight), int(step or first_step)
    except ValueError:
        name = ""
        value, begin = 0.0, first_step
    if not name or not 0 <= value < np.inf:
        raise UsageError(f"--mix is {word!r}; it must be FILE:WEIGHT, or FILE:WEIGHT@STEP, with a weight of at least 0")
    if begin < first_step:
        raise UsageError(f"--mix {word} begins before step {first_step}, but the run is trained up to that step")
    return name, value, begin


def _require_distinct(names: Sequence[str], sources: Sequence[MixtureSource]) -> None:
    seen: dict[str, str] = {}
    for name, source in zip(names, sources, strict=True):
        other = seen.setdefault(source.content_hash, name)
        if other != name:
            raise ManifestError(f"--mix gives {name}, which has the lengths of {other}; give each manifest once")


def _after(
    before: Mixture, names: list[str], tables: list[LengthTable], sources: list[MixtureSource]
) -> tuple[list[str], list[LengthTable], list[MixtureSource]]:
    """Put the sources of the earlier mixture first, so that their row numbers do not change."""
    hashes = [source.content_hash for source in sources]
    missing = [source.name for source in before.sources if source.content_hash not in hashes]
    if missing:
        raise ManifestError(
            f"the run trained {missing[0]}, which --mix does not name, or which was changed; add --mix "
            f"{missing[0]}:0 to train no more of it"
        )
    order = [hashes.index(source.content_hash) for source in before.sources]
    order += [place for place in range(len(names)) if place not in order]
    known = len(before.sources)  # these keep their recorded names, which training loops refer to
    return (
        [names[at] for at in order],
        [tables[at] for at in order],
        [*before.sources, *(sources[at] for at in order[known:])],
    )


def _joined(names: Sequence[str], tables: Sequence[LengthTable], mixture: Mixture) -> LengthTable:
    """Return one table with the rows of all sources, in order."""
    first = tables[0]
    for name, table in zip(names, tables, strict=True):
        if table.column != first.column:
            raise ManifestError(
                f"{name} has its lengths in the column {table.column!r}, {names[0]} in {first.column!r}; "
                "name one that both have with --length-column"
            )
        if table.masks is not None:
            raise ManifestError(f"{name} was built with masks, which a mixture cannot carry; plan it alone")
    columns: dict[str, Any] = {}
    rows = sum(map(len, tables))
    for column in ("length_tokens", *_FACTORS):
        given = [getattr(table, column) for table in tables]
        if all(values is None for values in given):
            continue
        whole = new_column(rows, np.float64 if column == "eta" else np.int64)
        start = 0
        for table, values in zip(tables, given, strict=True):
            for at, part in () if values is None else chunked(values):
                whole[start + at : start + at + len(part)] = part
            start += len(table)
        columns[column] = whole
    return LengthTable(name="+".join(source.name for source in mixture.sources), column=first.column, **columns)


class MixedRows:
    """The rows of a mixture's steps, as positions among the kept rows of all sources.

    A source is repeated as often as needed, with another permutation in each of its epochs.

    Args:
        mixture: sources and stages.
        kept: [sources] number of rows of each source after overlong ones are dropped.
        batch_size: sequences per step.
        seed: seed of the permutations; None: rows in their own order.

    Raises:
        ManifestError: a source with a positive weight has no row left.
    """

    def __init__(self, mixture: Mixture, kept: IntArray, *, batch_size: int, seed: int | None) -> None:
        self._mixture, self._kept, self._batch_size, self._seed = mixture, kept, batch_size, seed
        self._begins = np.zeros((1, len(kept)), dtype=np.int64)  # [steps + 1, sources] sequences before each step
        for source, left in enumerate(kept.tolist()):
            if not left and any(stage.weights[source] for stage in mixture.stages):
                name = mixture.sources[source].name
                raise ManifestError(f"{name}: all its sequences are overlong; remove it from --mix")

    def places(self, step: int) -> IntArray:
        """Return [batch_size] the positions of a step's sequences, source by source."""
        if step + 1 >= len(self._begins):
            end = max(step + 1, 2 * len(self._begins))
            counts = self._mixture.counts(0, end, self._batch_size)
            self._begins = np.concatenate((self._begins[:1], np.cumsum(counts, axis=0)))
        before = np.concatenate(([0], np.cumsum(self._kept)))
        found = []
        for source in range(len(self._kept)):
            begin, end = self._begins[step : step + 2, source].tolist()
            if begin < end:
                found.append(before[source] + self._of_source(source, np.arange(begin, end, dtype=np.int64)))
        return np.concatenate(found)

    def _of_source(self, source: int, positions: IntArray) -> IntArray:
        rows = int(self._kept[source])
        epochs, places = np.divmod(positions, rows)
        if self._seed is None:
            return places
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            places[here] = permuted(places[here], rows, (self._seed, epoch, source))
        return places
