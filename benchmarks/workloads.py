"""The lengths that every planner benchmark uses: three web-like families, one adversarial, other shapes, real, clips.

The planner was tuned on `FAMILIES`; the shapes of `HELD_OUT` are what it must not fall behind on. Each is a numpy
`default_rng(seed)` draw, rounded up to 64 tokens and cut at 131,072. Clips are those of `benchmarks.clips`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.clips import Scale, write_media_records
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.detect import SourceOptions, open_source
from fcp_cli.manifest.table import LengthTable
from fcp_cli.util.arrays import FloatArray, IntArray

MAX_LENGTH = 131_072
FAMILIES = ("github", "commoncrawl", "wikipedia", "extreme")

# family -> share of the Pareto tail, median and sigma of the lognormal body, smallest value and exponent of the tail
_MIXTURES = {
    "github": (0.15, 1200.0, 1.3, 4096.0, 0.90),
    "commoncrawl": (0.08, 900.0, 1.0, 3072.0, 0.95),
    "wikipedia": (0.03, 500.0, 1.1, 2048.0, 1.20),
}
_Draw: TypeAlias = Callable[[np.random.Generator, int], npt.NDArray[np.floating[Any]]]


def _extreme(generator: np.random.Generator, n: int) -> FloatArray:
    drawn = generator.integers(2048, 8193, n).astype(np.float64)
    drawn[::512] = MAX_LENGTH
    return drawn


def _mixture(family: str) -> _Draw:
    tail_share, median, sigma, smallest, exponent = _MIXTURES[family]

    def draw(generator: np.random.Generator, n: int) -> FloatArray:
        in_tail = generator.random(n) < tail_share
        tail = smallest * (1.0 - generator.random(n)) ** (-1.0 / exponent)
        body = generator.lognormal(np.log(median), sigma, n)
        return np.where(in_tail, tail, body)

    return draw


_DRAWS: Mapping[str, _Draw] = {
    **{family: _mixture(family) for family in _MIXTURES},
    "extreme": _extreme,
    # Clips of 8 to 128 frames of 256 tokens, and a few words.
    "video": lambda generator, n: 256.0 * generator.integers(8, 129, n) + generator.integers(20, 500, n),
    "bimodal": lambda generator, n: (
        np.where(generator.random(n) < 0.2, 40_000.0, 1000.0) * generator.uniform(0.9, 1.1, n)
    ),
    "pareto": lambda generator, n: 1024.0 * (1.0 - generator.random(n)) ** (-1.0 / 1.1),
    "two humps": lambda generator, n: np.where(
        generator.random(n) < 0.5, generator.normal(2000.0, 300.0, n), generator.normal(12_000.0, 1500.0, n)
    ).clip(64.0),
    "equal": lambda generator, n: np.full(n, 6000.0),
    "maximum": lambda generator, n: np.full(n, float(MAX_LENGTH)),
    "over a budget": lambda generator, n: np.full(n, 16_384.0 + 64.0),  # and over two of 8,192
    "giant and dust": lambda generator, n: np.append(float(MAX_LENGTH), generator.uniform(64.0, 512.0, n - 1)),
}
HELD_OUT = tuple(name for name in _DRAWS if name not in FAMILIES)

EXAMPLE_PROFILE = """\
format: fcp-cost-profile/1
model: qwen3-8b
cluster: example-8x8
origin: assumed
coefficients:
  attention_seconds_per_token2: 6.451e-9
  linear_seconds_per_token: 2.838e-4
  ring_bytes_per_token: 442368
  microbatch_seconds: 0.1
  ring_hop_seconds: 0.0
bandwidth_bytes_per_second: {intra_node: 50.0e+9, inter_node: 12.0e+9}
"""


def example_profile() -> CostProfile:
    """Qwen3-8B on nodes of eight accelerators, assumed coefficients."""
    return parse_cost_profile(EXAMPLE_PROFILE, name="the example profile")


def lengths(family: str, *, sequences: int, seed: int) -> IntArray:
    """[sequences] lengths in tokens of one of `FAMILIES` or `HELD_OUT`."""
    drawn = _DRAWS[family](np.random.default_rng(seed), sequences)
    return np.asarray(np.minimum(np.ceil(drawn / 64.0) * 64.0, MAX_LENGTH), dtype=np.int64)


def family_table(family: str, *, sequences: int, seed: int) -> LengthTable:
    """A manifest of one family."""
    return LengthTable(name=f"{family}-{seed}", length_tokens=lengths(family, sequences=sequences, seed=seed))


def real_table(path: Path) -> LengthTable:
    """A Parquet manifest with a column `length`."""
    from fcp_cli.manifest.read import read_manifest

    return read_manifest(path)


def media_manifest(name: str, processor: str, rows: int, *, seed: int = 0) -> Path:
    """A manifest of a made-up data set of clips, in a temporary folder.

    Args:
        name: one of `benchmarks.clips.NAMES`.
        processor: `qwen3-vl`, `internvl`, or the folder of a checkpoint of Qwen3-VL.
        rows: sequences.
        seed: of the sizes.
    """
    folder = Path(tempfile.mkdtemp())
    sizes, manifest = folder / "sizes.jsonl", folder / "lengths.parquet"
    rate = 2.0 if processor == "internvl" else None  # Qwen3-VL samples two frames per second by itself
    write_media_records(sizes, name, rows, seed=seed, scale=Scale(frames_per_second=rate))
    build_manifest(open_source(sizes, "media", SourceOptions(processor=processor)), manifest)
    return manifest
