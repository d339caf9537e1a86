"""Which recipe is chosen where none was asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from inline_snapshot import snapshot

from fcp_cli.cost.recipe import Recipe, RecipeRequest, Recompute
from fcp_cli.memory.fitting import LEAST_TOKENS, FittedRecipe, JobRanks, all_fits, fitting_recipe
from fcp_cli.memory.items import RESERVE_FRACTION
from fcp_cli.memory.rank import rank_memory
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import ModelSpec, load_model, shipped_names
from tests.messages import raises


@cache
def spec_of(model: str) -> ModelSpec:
    return load_model(model)


def place(gigabytes: float = 73.6, **changed: Any) -> JobRanks:
    return JobRanks(**{"num_ranks": 8, "ranks_per_node": 8, "capacity_bytes": gigabytes * 1e9, **changed})


def fit(
    model: str = "qwen3-8b", where: JobRanks | None = None, *, wanted_tokens: int = LEAST_TOKENS, **asked: Any
) -> FittedRecipe:
    sync = asked.pop("sync", None)
    request = RecipeRequest(**asked)
    return fitting_recipe(spec_of(model), request, where or place(), sync=sync, wanted_tokens=wanted_tokens)


def test_with_room_enough_nothing_is_computed_twice_and_weights_are_gathered_once_a_step() -> None:
    found = fit(where=place(1_000))
    assert (found.recipe, found.sync, found.is_enough) == (Recipe(zero_stage=2), "iteration", True)


def chosen_as_room_shrinks(**where: Any) -> list[FittedRecipe]:
    """The recipes that are enough on devices from 300 GB down to 10, each once."""
    found: list[FittedRecipe] = []
    for gigabytes in range(300, 10, -1):
        one = fit(where=place(gigabytes, **where))
        if one.is_enough and (one.recipe, one.sync) not in [(other.recipe, other.sync) for other in found]:
            found.append(one)
    return found


@pytest.mark.lengthy
def test_with_less_and_less_room_computing_again_comes_before_offloading() -> None:
    found = chosen_as_room_shrinks()
    order = [
        ("none", "none", "iteration"),
        ("none", "none", "microbatch"),
        ("none", "selective", "iteration"),
        ("none", "selective", "microbatch"),
        ("none", "full", "iteration"),
        ("none", "full", "microbatch"),
        ("activations", "selective", "microbatch"),
        ("activations", "full", "microbatch"),
    ]
    kinds = [order.index((one.recipe.offload, one.recipe.recompute, one.sync)) for one in found]
    assert kinds == sorted(kinds)
    assert (found[0].recipe.zero_stage, found[-1].recipe.zero_stage) == (2, 3)
    assert {one.recipe.recompute for one in found} == {"none", "selective", "full"}
    assert found[-1].recipe.offload == "activations"


@pytest.mark.lengthy
@pytest.mark.parametrize("cluster", ["h100-8x8", "a100-8x8", "ascend910b-8x8", "h200-8x8"])
@pytest.mark.parametrize("ranks", [8, 64])
def test_every_shipped_model_has_room_for_16k_tokens_a_rank(cluster: str, ranks: int) -> None:
    capacity = load_cluster(cluster).memory_bytes * (1 - RESERVE_FRACTION)
    for name in (name for name in shipped_names("model") if load_model(name).parameters < 10e9):
        found = fit(name, place(num_ranks=ranks, capacity_bytes=capacity))
        assert found.is_enough, name
        assert found.memory.total_bytes(found.tokens) <= capacity < found.memory.total_bytes(found.tokens + 1)


def test_what_a_rank_holds_is_what_the_memory_model_says() -> None:
    found = fit()
    said = rank_memory(load_model("qwen3-8b"), found.recipe, sync=found.sync, ranks=8, peers=7)
    assert found.memory == said


def test_only_what_was_left_open_is_chosen() -> None:
    found = fit(zero="2", recompute="full", precision="bf16")
    assert (found.recipe.zero_stage, found.recipe.recompute, found.sync) == (2, "full", "iteration")
    assert fit(zero="3").sync == "microbatch"  # under iteration, it cannot run
    assert fit(sync="iteration").recipe.zero_stage == 2
    assert fit(loss="plain", freeze_vision=True, model="qwen3-vl-8b").recipe.freeze_vision


def test_two_devices_that_have_no_room_for_a_model_have_it_for_its_adapters() -> None:
    where = place(num_ranks=2, ranks_per_node=2)
    assert fit(where=where).tokens == 0
    tuned = fit(where=where, lora="r=16")
    assert (tuned.is_enough, tuned.recipe) == (True, Recipe(zero_stage=2, recompute="selective", lora="r=16"))


def test_where_nothing_is_enough_the_roomiest_recipe_is_returned() -> None:
    found = fit(wanted_tokens=10**9)
    assert not found.is_enough
    assert (found.recipe.recompute, found.recipe.offload) == ("full", "activations")
    assert fit(where=place(10)).tokens == 0


@pytest.mark.lengthy
def test_several_nodes_hold_a_copy_each_until_there_is_no_room_for_it() -> None:
    found = chosen_as_room_shrinks(num_ranks=64, most_peers=4)
    assert found[0].recipe == Recipe(zero_stage=2, shard_ranks=8)
    in_every_microbatch = [one.recipe for one in found if one.recipe.zero_stage == 3]
    far = [recipe.shard_ranks is None for recipe in in_every_microbatch if recipe.offload == "none"]
    assert far == sorted(far) and any(far) and not all(far)


def test_ranks_of_a_cpu_compute_in_fp32_and_keep_replicas() -> None:
    found = fit("qwen3-tiny", place(gigabytes=4, on_cpu=True))
    assert (found.recipe, found.sync) == (Recipe(zero_stage=0, precision="fp32"), "iteration")


def test_ranks_of_several_devices_share_out_the_optimizer() -> None:
    found = fit(where=place(tensor_parallel=4, pipeline_parallel=2))
    assert (found.recipe.zero_stage, found.sync) == (1, "iteration")
    interleaved = fit(where=place(tensor_parallel=4, pipeline_parallel=2, virtual_stages=2))
    assert (interleaved.recipe.zero_stage, interleaved.sync) == (1, "microbatch")
    assert interleaved.tokens == pytest.approx(found.tokens / 1.25, rel=0.01)  # more are in flight
    cut = place(tensor_parallel=2, pipeline_parallel=2)
    recipes = [one.recipe for one in all_fits(spec_of("qwen3-8b"), RecipeRequest(), cut)]
    assert {(recipe.zero_stage, recipe.loss) for recipe in recipes} == {(1, "plain")}
    assert {one.recipe.zero_stage for one in all_fits(spec_of("qwen3-8b"), RecipeRequest(zero="3"), cut)} == {3}


def test_logits_that_megatron_holds_are_counted() -> None:
    def tokens(**given: Any) -> int:
        return fit(where=place(tensor_parallel=2), zero="1", recompute="selective", **given).tokens

    assert tokens() == tokens(loss="plain") < 0.7 * tokens(loss="chunked")


def test_kinds_that_keep_products_are_searched_where_the_runtime_runs_the_layers() -> None:
    def kinds(**where: Any) -> set[Recompute]:
        return {one.recipe.recompute for one in all_fits(spec_of("qwen3-8b"), RecipeRequest(), place(**where))}

    assert kinds() == {"none", "activation", "elementwise", "selective", "full", "as-needed"}
    assert kinds(tensor_parallel=2) == {"none", "selective", "full"}
    with raises(
        snapshot(
            "UsageError: --recompute elementwise keeps the products of layers that fcp runs, and Megatron runs ranks of several devices; give --recompute selective"
        )
    ):
        all_fits(spec_of("qwen3-8b"), RecipeRequest(recompute="elementwise"), place(tensor_parallel=2))


def test_layers_recompute_as_needed_if_they_keep_alike() -> None:
    found = fit(recompute="as-needed", zero="3", sync="microbatch")
    assert list(found.level_tokens) == ["none", "activation", "elementwise", "selective"]
    assert list(found.level_tokens.values()) == sorted(found.level_tokens.values())
    assert found.tokens == found.level_tokens["selective"]
    # A trained encoder recomputes all layers or none.
    assert list(fit("qwen3-vl-8b", recompute="as-needed").level_tokens) == ["elementwise", "selective"]
    assert len(fit("qwen3-vl-8b", recompute="as-needed", freeze_vision=True).level_tokens) > 2
    assert "as-needed" not in {
        one.recipe.recompute for one in all_fits(spec_of("qwen3-next-80b-a3b"), RecipeRequest(), place())
    }
    with raises(
        snapshot(
            "UsageError: --recompute as-needed takes layers one by one, and those of qwen3-next-80b-a3b differ in what they keep; give --recompute selective"
        )
    ):
        fit("qwen3-next-80b-a3b", recompute="as-needed")


def test_ranks_of_several_devices_recompute_as_needed_if_asked_to() -> None:
    sharded = fit(where=place(tensor_parallel=2), recompute="as-needed")
    assert list(sharded.level_tokens) == ["none", "selective"]
    with raises(
        snapshot(
            "UsageError: --recompute as-needed has not been made to work with virtual stages, nor with ranks that share experts; give --recompute selective"
        )
    ):
        fit(where=place(pipeline_parallel=2, virtual_stages=2), recompute="as-needed")


def test_what_contradicts_itself_is_one_line() -> None:
    with raises(
        snapshot(
            "UsageError: --offload activations moves the inputs of all layers, and --recompute is as-needed; add --recompute full, or remove --offload"
        )
    ):
        fit(recompute="as-needed", offload="activations")
    with raises(
        snapshot(
            "UsageError: --zero 3 gathers weights in every micro-batch, of which ranks run different numbers under sync iteration; give --zero 2, or plan with 'fcp plan --sync microbatch'"
        )
    ):
        fit(zero="3", sync="iteration")
    with raises(
        snapshot(
            "UsageError: --offload activations moves the inputs of recomputed layers, and --recompute is none; add --recompute full"
        )
    ):
        fit(recompute="none", offload="activations")
    with raises(snapshot("UsageError: --freeze-vision: qwen3-8b has no vision encoder")):
        fit(freeze_vision=True)
    with raises(snapshot("UsageError: --shard-ranks is 3; it must divide the 8 ranks")):
        fit(shard_ranks=3)
