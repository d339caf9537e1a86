"""The data that every planner benchmark uses: three web-like families, one adversarial, one real, and clips.

Each family is a numpy `default_rng(seed)` draw, rounded up to 64 tokens and cut at 131,072. Clips are those of `fcp
manifest synth`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from fcp_cli.arrays import IntArray
from fcp_cli.cost.profile import CostProfile, parse_cost_profile
from fcp_cli.manifest.build import build_manifest
from fcp_cli.manifest.sources.detect import SourceOptions, open_source
from fcp_cli.manifest.synth import Scale, write_media_records
from fcp_cli.manifest.table import LengthTable

MAX_LENGTH = 131_072
FAMILIES = ("github", "commoncrawl", "wikipedia", "extreme")

# family -> share of the Pareto tail, median and sigma of the lognormal body, smallest value and exponent of the tail
_MIXTURES = {
    "github": (0.15, 1200.0, 1.3, 4096.0, 0.90),
    "commoncrawl": (0.08, 900.0, 1.0, 3072.0, 0.95),
    "wikipedia": (0.03, 500.0, 1.1, 2048.0, 1.20),
}

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
    """[sequences] lengths in tokens of one family."""
    generator = np.random.default_rng(seed)
    if family == "extreme":
        drawn = generator.integers(2048, 8193, sequences).astype(np.float64)
        drawn[::512] = MAX_LENGTH
    else:
        tail_share, median, sigma, smallest, exponent = _MIXTURES[family]
        in_tail = generator.random(sequences) < tail_share
        tail = smallest * (1.0 - generator.random(sequences)) ** (-1.0 / exponent)
        body = generator.lognormal(np.log(median), sigma, sequences)
        drawn = np.where(in_tail, tail, body)
    return np.minimum(np.ceil(drawn / 64.0) * 64.0, MAX_LENGTH).astype(np.int64)


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
        name: one of `fcp_cli.manifest.synth.NAMES`.
        processor: `qwen3-vl`, `internvl`, or the folder of a checkpoint of Qwen3-VL.
        rows: sequences.
        seed: of the sizes.
    """
    folder = Path(tempfile.mkdtemp())
    sizes, manifest = folder / "sizes.jsonl", folder / "lengths.parquet"
    rate = 2.0 if processor == "internvl" else None  # Qwen3-VL samples two frames per second by itself
    write_media_records(sizes, name, rows, seed=seed, scale=Scale(frames_per_second=rate), advance=lambda done: None)
    build_manifest(open_source(sizes, "media", SourceOptions(processor=processor)), manifest)
    return manifest
