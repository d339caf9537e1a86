"""Models, data sets, clusters and cost profiles of the study."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.study.published import Encoder
from benchmarks.workloads import MAX_LENGTH, family_table, media_manifest
from fcp_cli.cost.profile import CostProfile
from fcp_cli.cost.recipe import Recipe
from fcp_cli.manifest.read import read_manifest
from fcp_cli.manifest.table import LengthTable
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.plan.metadata import Sync
from fcp_cli.planning.problem import Problem
from fcp_cli.profiling.computed import analytic_profile
from fcp_cli.vision.processors import QwenVision

TEXT_MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama3.2-1b", "llama3.2-3b", "llama3-8b")
VISION_MODELS = ("internvl3-2b", "internvl2.5-4b", "internvl3-8b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b")
TEXT_DATASETS = ("github", "commoncrawl", "wikipedia")
CLIP_DATASETS = ("msrvtt", "internvid", "openvid")

RANKS, BATCH_SIZE, TOKENS_PER_RANK = 64, 512, 16_384

Source: TypeAlias = tuple[str, str]  # data set, who makes tokens of it: `text`, `internvl`, or one of these two
AS_SHIPPED = "qwen3-vl"  # at most 12,288 visual tokens a clip
LONG_CLIPS = "qwen3-vl, 128k"  # at most 122,880

# Of the 128k tokens a clip may have so many visual ones; the rest is left to its time stamps and caption.
_VISUAL_TOKENS = 120 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One cell of the study. A rank is one device: no tensor or pipeline parallelism."""

    model: str
    dataset: str
    cluster: str
    encoder: Encoder
    ranks: int = RANKS
    batch_size: int = BATCH_SIZE
    tokens_per_rank: int = TOKENS_PER_RANK

    @property
    def family(self) -> str:
        """Whose tokens its sequences are made of."""
        if self.encoder == "text":
            return "text"
        return "InternVL" if self.model.startswith("internvl") else "Qwen3-VL"

    def problem(self, sync: Sync) -> Problem:
        return Problem(
            num_ranks=self.ranks,
            ranks_per_node=load_cluster(self.cluster).devices_per_node,
            tokens_per_rank=self.tokens_per_rank,
            sync=sync,
            profile=profile_of(self.model, self.cluster, frozen=self.encoder == "frozen"),
        )


@cache
def profile_of(model: str, cluster: str, *, frozen: bool) -> CostProfile:
    """As `fcp profile --analytic --recompute full --zero 3`: with it every model holds 16,384 tokens in 64 GB."""
    return analytic_profile(
        load_model(model),
        load_cluster(cluster),
        recipe=Recipe(zero_stage=3, recompute="full", freeze_vision=frozen),
        sync="microbatch",
        ranks=RANKS,
    )


def source_of(setting: Setting) -> Source:
    """What its lengths depend on."""
    return setting.dataset, {"text": "text", "InternVL": "internvl", "Qwen3-VL": LONG_CLIPS}[setting.family]


def make_table(source: Source, rows: int) -> LengthTable:
    """A manifest of so many sequences."""
    dataset, processor = source
    if processor == "text":
        return family_table(dataset, sequences=rows, seed=0)
    folder = str(_long_clip_checkpoint()) if processor == LONG_CLIPS else processor
    return read_manifest(media_manifest(dataset, folder, rows))


@cache
def _long_clip_checkpoint() -> Path:
    """Qwen3-VL's own processor settings, but for clips of up to 128k tokens, as the papers allow them."""
    shipped, folder = QwenVision(), Path(tempfile.mkdtemp())
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": shipped.patch_size,
        "merge_size": shipped.merge_size,
        "size": {"shortest_edge": shipped.image_min_pixels, "longest_edge": shipped.image_max_pixels},
    }
    pixels = _VISUAL_TOKENS * shipped.factor**2 * shipped.temporal_patch_size
    videos = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "temporal_patch_size": shipped.temporal_patch_size,
        "size": {"shortest_edge": shipped.video_min_pixels, "longest_edge": pixels},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def extreme_table(short: int, *, seed: int) -> LengthTable:
    """One sequence of 128k tokens among so many of 2k to 8k."""
    lengths = np.random.default_rng(seed).integers(2048, 8193, short + 1)
    lengths[0] = MAX_LENGTH
    return LengthTable(name=f"128k among {short}", length_tokens=lengths)
