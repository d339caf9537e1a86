from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.state import backward_of
from fcp_cli.models.model import load_model
from fcp_cli.runtime.metrics import peak_memory_bytes
from fcp_cli.training.progress import model_flops, peak_of

pytestmark = [pytest.mark.torch, pytest.mark.hf]


@pytest.mark.parametrize(
    ("recipe", "tolerance"),
    [
        (Recipe(), 1e-9),
        (Recipe(lora="r=4"), 0.04),  # beside the first layer's frozen matrices, of two, no input has a gradient
        (Recipe(freeze="layers.0.*,embed_tokens.*"), 1e-9),
        (Recipe(freeze="*_proj.weight"), 1e-9),
        (Recipe(freeze="embed_tokens.*,layers.*"), 1e-9),
    ],
    ids=["everything", "adapters", "the last layer", "no matrix of a layer", "the last norm"],
)
def test_the_arithmetic_of_a_step_is_what_pytorch_counts(recipe: Recipe, tolerance: float) -> None:
    """But for attention, which eager kernels compute for all pairs of tokens, and rings for those that see each other."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    from fcp_cli.training.weights import choose_trained, model_config

    if recipe.lora is not None:
        pytest.importorskip("peft")
    family: Any = AutoModelForCausalLM
    model = family.from_config(model_config("qwen3-tiny"), attn_implementation="eager")
    choose_trained(model, recipe, seed=0)
    lengths = np.array([37, 64])
    with FlopCounterMode(display=False) as counter:
        for length in lengths.tolist():
            model(input_ids=torch.ones(1, length, dtype=torch.int64)).logits.sum().backward()
    spec = load_model("qwen3-tiny")
    of_pairs = 4 * spec.num_layers * spec.num_heads * spec.head_dim * float((lengths**2).sum()) / 2
    attention = (1 + 2 * backward_of(spec, recipe).layers) * of_pairs
    assert model_flops(spec, recipe, lengths) + attention == pytest.approx(counter.get_total_flops(), rel=tolerance)


def test_only_a_known_device_in_16_bits_has_a_peak() -> None:
    peak = peak_of("NVIDIA H100 80GB HBM3", Recipe())
    assert peak is not None
    assert peak.source == "h100-8x8"
    assert peak.flops == pytest.approx(989e12, rel=0.01)
    assert peak_of("NVIDIA H100 80GB HBM3", Recipe(precision="fp32")) is None
    assert peak_of("x86_64", Recipe()) is None


def test_a_host_tells_what_the_process_has_had() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    assert before > 50e6
    block = np.ones(30_000_000)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    del block
