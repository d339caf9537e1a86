"""Data type of the weights that a model computes with, by the recipe's precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fcp_cli.recipe import PrecisionName

WEIGHT_DTYPES: Mapping[PrecisionName, torch.dtype] = {
    "bf16": torch.bfloat16,  # a copy: the optimizer updates fp32 weights
    "amp": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
