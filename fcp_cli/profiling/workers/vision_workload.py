"""The timed vision encoder: a real model's blocks and projector on random pixels, called as in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fcp_cli.models.model import ModelSpec
from fcp_cli.models.transformers_config import whole_config
from fcp_cli.profiling.fits.points import VisionPoint
from fcp_cli.profiling.workers.workload import autocast_for
from fcp_cli.recipe import Recipe
from fcp_cli.runtime.gradients.weight_types import WEIGHT_DTYPES
from fcp_cli.runtime.injection.integrations import transformers_models
from fcp_cli.vision.families import FAMILIES
from fcp_cli.vision.parts import VisualPart


def build_encoder(spec: ModelSpec, blocks: int, device: torch.device, recipe: Recipe) -> nn.Module:
    """Build a vision-language base model with `blocks` encoder blocks and almost no language model.

    Weights are random, in the recipe's dtype. All deepstack mergers are kept, after the first blocks.
    """
    from transformers import AutoConfig, AutoModel

    assert spec.vision is not None
    vision = replace(
        spec.vision,
        depth=blocks,
        deepstack_layers=tuple(range(len(spec.vision.deepstack_layers))),
        full_attention_layers=tuple(layer for layer in spec.vision.full_attention_layers if layer < blocks),
    )
    # No language model layers and a minimal vocabulary, since neither runs.
    model_type, figures = whole_config(replace(spec, vision=vision, num_layers=1, vocab_size=4, ffn_size=8))
    figures["text_config"]["num_hidden_layers"] = 0
    with device:
        model = AutoModel.from_config(
            AutoConfig.for_model(model_type, **figures), dtype=WEIGHT_DTYPES[recipe.precision]
        )  # type: ignore[no-untyped-call]
    transformers_models().recompute_layers(model, recipe.recompute)
    trained: nn.Module = model.train()
    return trained


class VisionWorkload:
    """Runs an encoder call as the runtime does in each micro-batch."""

    def __init__(self, model: nn.Module, device: torch.device, recipe: Recipe) -> None:
        self.model = model
        self._device = device
        self._autocast = autocast_for(device, recipe.precision)
        self._pixels = lru_cache(maxsize=4)(self._draw_pixels)
        self._blocks = {
            name: module
            for name, module in model.named_modules()
            if name in ("visual.blocks", "vision_tower.encoder.layer")
        }

    def set_blocks(self, blocks: int) -> None:
        """Use only the first `blocks` blocks in further calls."""
        for name, layers in self._blocks.items():
            self.model.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], layers[:blocks])

    @property
    def encoder(self) -> nn.Module:
        """Modules of a trained encoder: everything but the language model."""
        return nn.ModuleList([part for name, part in self.model.named_children() if name != "language_model"])

    def call(self, point: VisionPoint) -> Callable[[], None]:
        """Return a function that runs forward and, for a trained call, backward; gradients accumulate."""
        parts, pixels = [_part(side) for side in point.sides], self._pixels(point.sides)
        family = FAMILIES[self.model.config.model_type]  # type: ignore[union-attr, index]

        def run() -> None:
            with torch.set_grad_enabled(point.trained), self._autocast():
                embeddings = family.encode(self.model, parts, pixels)
            if point.trained:
                torch.autograd.backward(embeddings, torch.ones_like(embeddings))

        return run

    def _draw_pixels(self, sides: tuple[int, ...]) -> torch.Tensor:
        config: Any = self.model.config
        vision = config.vision_config
        draw = torch.Generator(self._device).manual_seed(sum(sides))
        if config.model_type == "internvl":
            pixels = sides[0] * vision.patch_size[0]
            shape: tuple[int, ...] = (len(sides), vision.num_channels, pixels, pixels)
        else:
            values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            shape = (sum(side * side for side in sides), values)
        return torch.randn(shape, generator=draw, device=self._device)


def _part(side: int) -> VisualPart:
    return VisualPart(
        kind="image",
        start_token=0,
        num_tokens=side * side // 4,
        work=1.0,
        grid=(side, side),
        pixels=lambda: torch.empty(0),  # pixels of all parts are drawn together on the device
    )
