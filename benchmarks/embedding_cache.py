"""What a picture costs a frozen encoder: computed and kept, and read again from the cache. On one CPU process.

    python -m benchmarks.embedding_cache

The tower is that of Qwen3-VL-2B with a few of its 24 layers, in fp32; pixels are made up.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcp_cli.runtime.layouts.layout import shard_layout
from fcp_cli.runtime.pictures.embedding_cache import EmbeddingCache
from fcp_cli.runtime.pictures.visuals import VisualPack, begin_visual_shard
from fcp_cli.vision import qwen3_vl
from fcp_cli.vision.parts import VisualPart

_GRID = (44, 80)  # patches of 720 x 1280


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = _model(arguments.layers)
    with tempfile.TemporaryDirectory() as name:
        cache = EmbeddingCache(Path(name))
        cache.bind(model)
        cold, first = zip(*(_encode(model, cache, number) for number in range(arguments.pictures)), strict=True)
        warm, again = zip(*(_encode(model, cache, number) for number in range(arguments.pictures)), strict=True)
        size = sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file()) / arguments.pictures
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    print(
        f"{_GRID[0] * _GRID[1]:,} patches, {arguments.layers} layers: "
        f"{statistics.median(cold):.3f} s encoded and kept, "
        f"{statistics.median(warm):.3f} s read again (with drawing and hashing the pixels), "
        f"{statistics.median(cold) / statistics.median(warm):.0f}x, equal bits; {size / 1e6:.1f} MB a picture"
    )


def _model(layers: int) -> nn.Module:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    config: Any = Qwen3VLVisionConfig(
        depth=layers,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_hidden_size=2048,
        deepstack_visual_indexes=[0],
    )
    holder: Any = nn.Module()
    build: Any = Qwen3VLVisionModel
    holder.visual = build(config)
    holder.language_model = nn.Identity()
    holder.config = type("Config", (), {"vision_config": config})
    module: nn.Module = holder.requires_grad_(False)
    return module


def _encode(model: nn.Module, cache: EmbeddingCache, number: int) -> tuple[float, Tensor]:
    """Return the seconds of one picture, loader and encoder together, and its embeddings."""
    patches = _GRID[0] * _GRID[1]
    part = VisualPart(
        kind="image",
        start_token=0,
        num_tokens=patches // 4,
        work=1.0,
        grid=_GRID,
        pixels=lambda: torch.randn(patches, 3 * 2 * 16 * 16, generator=torch.Generator().manual_seed(number)),
    )
    begun = time.perf_counter()
    pack = VisualPack(parts=[[part]], rows=[number], layout=shard_layout((patches // 4,), 1), ranks=(0,))
    finish = begin_visual_shard([pack], rank=0, cache=cache)
    assert finish is not None
    shard = finish()
    with torch.no_grad():
        found = shard.embeddings(qwen3_vl.encode(model, shard.parts, shard.pixels), cache)
    return time.perf_counter() - begun, found


if __name__ == "__main__":
    main()
