"""What is counted as trained is what the real model trains."""

from __future__ import annotations

import pytest
import torch

from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.rank import rank_memory
from fcp_cli.memory.state import trained_parameters
from fcp_cli.models.model import load_model

pytestmark = pytest.mark.torch

RECIPES = {
    "usual adapters": Recipe(lora="r=4"),
    "adapters everywhere": Recipe(lora="r=4,target=all-linear"),
    "adapters of the language model": Recipe(lora="r=4,target=q_proj+v_proj", freeze_vision=True),
    "layers": Recipe(freeze="layers.0.*,embed_tokens.*"),
    "a kind of matrix": Recipe(freeze="*_proj.weight"),
    "an encoder": Recipe(freeze="visual.*"),
}


@pytest.mark.hf
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", ["qwen3-tiny", "qwen3-vl-tiny"])
def test_counted_parameters_are_those_of_the_model(model: str, name: str) -> None:
    from fcp_cli.training.weights import build_model, choose_trained

    recipe = RECIPES[name]
    if model == "qwen3-tiny" and name == "an encoder":
        return
    built = build_model(model, seed=0, device=torch.device("cpu"), freeze_vision=recipe.freeze_vision)
    choose_trained(built, recipe, seed=0)
    real = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
    counted = trained_parameters(load_model(model), recipe)
    assert counted is not None
    assert counted.total == real


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_take_next_to_nothing_beside_the_weights(stage: int) -> None:
    spec = load_model("qwen3-8b")

    def items(recipe: Recipe) -> dict[str, float]:
        return rank_memory(spec, recipe, sync="microbatch", ranks=8).items(1024)

    whole = items(Recipe(zero_stage=stage, reduce="step"))  # type: ignore[arg-type]
    tuned = items(Recipe(zero_stage=stage, reduce="step", lora="r=16"))  # type: ignore[arg-type]
    assert tuned["gradients"] < 0.01 * whole["gradients"]
    assert tuned["optimizer"] < 0.01 * whole["optimizer"]
    # Frozen weights are in bf16 alone, whole or as shards.
    assert tuned["weights"] == pytest.approx(2 * spec.parameters / (8 if stage > 1 else 1), rel=0.02)
