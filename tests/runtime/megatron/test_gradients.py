"""Real megatron-core on four gloo ranks: its GPTModel, DDP, schedule and finalize_model_grads, on changing groups."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcp_cli.cost.recipe import Recipe
from fcp_cli.plan.setup import Pipeline
from fcp_cli.planning.batches import BatchSettings
from fcp_cli.planning.make_plan import make_plan
from fcp_cli.planning.settings import PlanInputs
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.recompute import LayerLevels
from tests.planning.examples import example_problem, table_of
from tests.runtime.launch import torchrun
from tests.runtime.models import LEVELS
from tests.runtime.plans import Row, levels_profile, write_plan

pytest.importorskip("megatron.core.package_info", reason="needs megatron-core: pip install megatron-core")
pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

NUM_RANKS = 4
# Eight sequences a step. Groups of three and one become two and two; all four; each alone; any ranks, with unequal
# numbers of micro-batches; an idle rank. Lengths that no degree divides, single tokens.
SWITCHING = (
    (Row([0, 1, 2], [7, 30]), Row([3], [5, 1]), Row([0, 1], [13]), Row([2, 3], [41, 2, 3])),
    (Row([0, 1, 2, 3], [41, 2, 9, 30]), Row([0], [3]), Row([1], [8]), Row([2], [1]), Row([3], [19])),
    (Row([0, 2], [17, 4]), Row([1, 3], [9]), Row([1], [5]), Row([0, 1, 3], [20, 1]), Row([3], [6]), Row([0], [8])),
    (Row([0, 1, 2], [10, 11, 12, 13, 14, 15, 16, 17]), Row([3])),
)
# Other groups, same shapes: what a mistake changes is only the numbers.
EQUAL_SHAPES = ((Row([0, 1], [8, 8]), Row([2, 3], [8, 8]), Row([0, 2], [8, 8]), Row([1, 3], [8, 8])),)
WAVES = (
    (Row([0, 1, 2], [7, 30], 0), Row([3], [5, 1], 0), Row([0, 3], [13], 1), Row([1, 2], [41, 2, 3], 1)),
    (Row([0, 1, 2, 3], [9, 8, 7, 6, 5], 0), Row([0, 2], [1, 2], 1), Row([1], [4], 1), Row([3], (), 1)),
)
AS_NEEDED = (*WAVES, (*(Row([rank], [4 * rank + 3], 0) for rank in range(4)), Row([0, 1, 2, 3], [131, 1, 1, 1], 1)))
SHARING_HEADS = tuple(
    tuple(row._replace(heads_degree=1 if len(row.ranks) % 2 else 2) for row in step) for step in WAVES
)
# On two ranks, each of which is two processes.
TENSOR = (
    (Row([0, 1], [7, 30]), Row([0], [5]), Row([1], [13])),
    (Row([0, 1], [9]), Row([1], [21]), Row([0, 1], [1, 6])),
    (Row([0], [9, 3, 4, 11]), Row([1])),
)
PIPELINE = (
    (Row([0, 1], [7, 30], 0), Row([0], [5], 1), Row([1], [13], 1)),
    (Row([0], [9], 0), Row([1], [21], 0), Row([0, 1], [1, 6], 1), Row([0], (), 2), Row([1], (), 2)),
)
# Two pipelines of two stages that meet in rings, with unequal numbers of micro-batches, in an order without a circle.
UNEQUAL = (
    (Row([0, 1], [7, 30]), Row([0], [5]), Row([1], [13]), Row([1], [2]), Row([1], [9, 1]), Row([1], [4])),
    (Row([0], [9]), Row([0, 1], [21]), Row([0, 1], [1, 6]), Row([1], [3]), Row([1], [8]), Row([0], [2]), Row([0], [5])),
    (Row([0], [9, 3]), Row([0], [4]), Row([0], [11, 2, 1]), Row([0], [6]), Row([0], [7]), Row([1])),
)
# One pipeline of four stages.
STAGES = (
    tuple(Row([0], lengths) for lengths in ([2], [30, 5], [17], [9, 1], [12], [3])),
    (Row([0], [9, 8, 7]), Row([0], [6, 5, 4, 3, 2])),
)
# Equally many micro-batches on both pipelines, in whole rounds of as many as there are stages, idle ones among them.
VIRTUAL = (
    (Row([0, 1], [7, 30], 0), Row([0], [5, 2], 1), Row([1], [13, 4], 1)),
    (
        *(Row([0], [9, 2], 0), Row([1], [21], 0), Row([0, 1], [1, 6], 1), Row([0], [3], 2), Row([1], (), 2)),
        *(Row([0], (), 3), Row([1], (), 3)),
    ),
    tuple(Row([0, 1], [9 + 3 * wave], wave) for wave in range(6)),
)
VIRTUAL_STAGES = (
    tuple(Row([0], lengths, wave) for wave, lengths in enumerate(([2], [30, 5], [17], [9, 1], [12], [3], (), ()))),
    tuple(Row([0], lengths, wave) for wave, lengths in enumerate(([9, 8, 7], [6, 5, 4, 3, 2], (), ()))),
)
_EXPERTS = {"num_moe_experts": 4}
EQUAL = ("plain", "core attention recomputed", "two forwards recomputed", "gathering in waves", "mrope",
         "engine two forwards recomputed", "sharing heads", "packed", "latent",
         "several tokens, two forwards recomputed", "masked, two forwards recomputed",
         "as needed", "as needed on the engine")  # fmt: skip
SHARES = (
    "sequence as needed",
    "pipelines as needed",
    "pipeline recomputed",
    "unequal pipelines recomputed",
    "planned pipelines",
    "planned stages recomputed",
    "virtual stages recomputed",
    "planned virtual stages",
    "virtual stages on four",
    "engine sequence",
    "balanced experts in a pipeline",
    "losses of sequences",
    "losses of packs in sequence",
    "expert parallel",
    "several tokens in a pipeline",
)
# Of the HybridModel that newer versions have: make test-megatron-next.
HAS_HYBRID_MODEL = tuple(int(part) for part in version("megatron-core").split(".")[:2]) >= (0, 19)
HYBRID = ("hybrid", "hybrid two forwards recomputed") if HAS_HYBRID_MODEL else ()
HYBRID_SHARES = ("balanced experts in a hybrid pipeline",) if HAS_HYBRID_MODEL else ()
# Megatron-FSDP needs it.
HAS_EINOPS = find_spec("einops") is not None
SHARDED = ("sharded, recomputed",) if HAS_EINOPS else ()
# What other cases cover by example, or test_rendezvous.py with one hardware queue.
MORE_EQUAL = ("recomputed", "two forwards", "overlapped", "distributed optimizer", "gathering", "waves", "yarn", "engine",
              "engine core attention recomputed", "packed in waves recomputed", "engine packed", "latent with YaRN",
              "latent without a query rank", "latent, sharing heads", "several tokens", "several tokens, sharing heads",
              "several tokens of packs", "several tokens on the engine", "masked", "masked, sharing heads",
              "as needed, experts", "as needed, gathering",
              *(("sharded", "sharded gradients") if HAS_EINOPS else ()))  # fmt: skip
MORE_SHARES = ("sequence", "tensor", "tensor recomputed", "tensor as needed", "pipeline", "unequal pipelines", "four stages", "engine pipeline",
               "experts", "balanced experts",
               "balanced experts recomputed", "balanced experts in sequence", "latent in a pipeline",
               "virtual stages", "virtual stages, overlapped", "virtual stages receiving ahead",
               "virtual stages in sequence", "engine virtual stages", "balanced experts in virtual stages",
               "uneven stages", "uneven virtual stages",
               "losses of sequences in sequence", "losses of sequences in a pipeline", "losses of packs",
               "losses of packs, recomputed", "losses of packs, expert parallel",
               "several tokens in sequence", "several tokens with experts", "masked in a pipeline")  # fmt: skip
WRONG = ("without rotary", "without binding", "without positions", "latent without positions", "without what follows")
# Name: settings of the transformer, and what is said of them.
SETTINGS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "static groups": ({"context_parallel_size": 2}, "the job has context parallel 2; a plan makes the groups itself: "
                      "start with --context-parallel-size 1, all other ranks as data parallel"),
    "hybrid groups": ({"hybrid_context_parallel": True}, "the job has context parallel 1 (hybrid); a plan makes"),
    "mean losses": ({"calculate_per_token_loss": False}, "the loss is averaged per micro-batch, which weighs tokens by "
                    "how the plan packs them; add --calculate-per-token-loss"),
    "attention dropout": ({"attention_dropout": 0.1}, "attention dropout is 0.1, which a ring cannot repeat; add "
                          "--attention-dropout 0"),
    "fused MLA": ({"multi_latent_attention": True, "apply_rope_fusion": True}, "multi-latent attention (MLA) with "
                  "fused rotary embeddings rotates by its own idea of who holds which tokens; add --no-rope-fusion"),
    "repeated layers": ({**_EXPERTS, "moe_z_loss_coeff": 1e-3, "mtp_use_repeated_layer": True}, "a layer of multi-token "
                        "prediction (MTP) that is repeated counts its router's loss once per repetition"),
    "global loss": ({**_EXPERTS, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
                     "moe_aux_loss_coeff": [0.0, 0.1]}, "the router's global auxiliary loss weighs experts by the mean of "
                    "the step's micro-batches up to its own, on all ranks, and so by the plan's order; set "),
    "recomputed router": ({**_EXPERTS, "moe_z_loss_coeff": 1e-3, "recompute_granularity": "selective",
                           "recompute_modules": ["moe"]}, "a router with a loss is computed again without the rest of "
                          "its layer, where its micro-batch is not known; drop moe from --recompute-modules"),
    "capacity": ({**_EXPERTS, "moe_expert_capacity_factor": 1.0}, "experts of limited capacity drop tokens by the "
                 "rest of the micro-batch, which the plan chooses; drop --moe-expert-capacity-factor"),
    "sinkhorn": ({**_EXPERTS, "moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn routing depends on the rest of "
                 "the micro-batch"),
    "replay": ({**_EXPERTS, "moe_enable_routing_replay": True}, "routing replay gives each token the experts of the one"),
    "jitter": ({**_EXPERTS, "moe_input_jitter_eps": 0.1}, "experts are routed to at random, which no plan repeats"),
    "allgather": ({**_EXPERTS, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}, "expert "
                  "parallel with the token dispatcher allgather needs equally many tokens on all ranks; set "
                  "--moe-token-dispatcher-type alltoall"),
    "flex": ({**_EXPERTS, "moe_token_dispatcher_type": "flex"}, "the token dispatcher flex, which needs DeepEP or "
             "HybridEP, has not been tried under a plan; set --moe-token-dispatcher-type alltoall"),
    "overlapped experts": ({**_EXPERTS, "overlap_moe_expert_parallel_comm": True}, "overlapped expert communication "
                           "runs forwards and backwards by another schedule, which is not hooked"),
    "variant": ({"experimental_attention_variant": "dsa"}, "the attention variant dsa cannot follow a plan"),
    "CUDA graphs": ({"cuda_graph_impl": "local"}, "CUDA graphs need the same shapes in every micro-batch, which a plan "
                    "does not have; leave them off"),
    "sliding window": ({"window_size": (8, 0)}, "sliding-window attention ([8, 0]) cannot follow a plan"),
    "sinks": ({"softmax_type": "learnable"}, "the softmax type learnable cannot follow a plan; only vanilla can"),
    "QK clipping": ({"qk_clip": True}, "QK clipping needs the scores of an attention that a plan replaces"),
    "FP8": ({"fp8": "e4m3"}, "FP8 and FP4 have not been tried under a plan; train in bf16"),
}  # fmt: skip
# Name: what every rank says as it stops.
STOPPED: Mapping[str, str] = {
    "probe": "the probe before the first step failed: on the plan's groups attention differs by ",
    "probe of rotary tables": "the probe before the first step failed: on the plan's groups attention differs by ",
    "probe of a pipeline": "the probe before the first step failed: on the plan's groups attention differs by ",
    "probe with experts": "the probe before the first step failed: on the plan's groups attention differs by ",
    "per-token loss": "the loss is averaged per micro-batch, which weighs tokens by how the plan packs them; add ",
    "as needed, and by the job": "the plan recomputes layers as needed, but the job recomputes them by itself; drop "
    "--recompute-granularity full, or plan with --recompute selective",
    "as needed with dropout": "the plan recomputes layers as needed, but hidden dropout is 0.1; add --hidden-dropout 0",
    "as needed, several tokens": "but the model has layers of multi-token prediction, too; drop --mtp-num-layers",
    "as needed, router losses": "but the router has a loss; drop --moe-aux-loss-coeff and --moe-z-loss-coeff",
    "too many groups": "distinct groups, and Transformer Engine needs a communicator for each, of several hundred MB on its ",
    "other parallelism": "has tensor parallel 2 and pipeline parallel 1, but this job 1 and 1; plan with the job's",
    "virtual stages of another plan": "the model has 2 virtual pipeline stages, but the plan was made for 1; plan with "
    "--virtual-stages 2, or build the model with the plan's",
    "loss pair": "the script's loss function returns (loss, report), a mean over its micro-batch; under a plan it ",
    "loss count": "the script's loss function counts ",
    "other batch": "the model was given input_ids of shape (1, 1), but the micro-batch is (1, 8); the script must ",
    "half a batch": "step 0 of the plan has 8 sequences, but the script trains on 4 (4 ranks x 1 micro-batches of 1); give "
    "it --global-batch-size 8, or plan with the script's",
}
MODELS: Mapping[str, str] = {
    "other virtual stages": "the model has 2 virtual pipeline stages, but the plan was made for 1; plan with "
    "--virtual-stages 2, or build the model with the plan's",
    "no virtual stages": "the model has 1 virtual pipeline stage, but the plan was made for 2; plan with "
    "--virtual-stages 1, or build the model with the plan's",
    "groups of micro-batches": "4 micro-batches pass a virtual stage together, but a plan is made for as many as there "
    "are stages (2); drop --microbatch-group-size-per-virtual-pipeline-stage",
    "both directions at once": "stages of virtual stages that exchange both directions in one batch wait for each "
    "other's lengths in a circle in short steps; set overlap_p2p_comm and unset batch_p2p_comm (drop "
    "--no-overlap-p2p-communication)",
    "MTP in virtual stages": "multi-token prediction in virtual stages has not been made to follow a plan; drop "
    "--mtp-num-layers or the virtual stages",
    "Megatron-FSDP in virtual stages": "Megatron-FSDP with virtual stages has not been made to follow a plan; drop "
    "--use-megatron-fsdp or the virtual stages",
    "router losses in virtual stages": "a router with a loss in virtual stages has not been made to follow a plan; drop "
    "--moe-aux-loss-coeff, --moe-z-loss-coeff or the virtual stages",
    "expert parallel in virtual stages": "expert parallelism in virtual stages has not been made to follow a plan; drop "
    "--expert-model-parallel-size or the virtual stages",
    "FSDP": "the model is sharded with FSDP (FullyShardedDataParallel), which has not been made to work under Megatron; "
    "use Megatron-FSDP (--use-megatron-fsdp), or DistributedDataParallel with the distributed optimizer",
    "FSDP by a mixin": "the model is sharded with FSDP (FsdpModule), which has not",
    "FSDP in iterations": "the model is sharded with Megatron-FSDP, whose ranks must run equally many micro-batches, but the "
    "plan has sync iteration; plan with 'fcp plan --sync microbatch'",
    "another model": "the model is a Linear, not a GPTModel or HybridModel of megatron-core; a plan cannot drive it",
    "no attention": "the model has no attention layer that a plan can drive",
    "state": "the model has a MambaMixer, whose state would have to pass along the ring; a plan cannot follow it",
    "bidirectional": "the model attends with a no_mask mask; a plan is for causal attention",
    "pipeline in iterations": "the job has pipeline parallel 2, whose ranks must run equally many micro-batches, but "
    "the plan has sync iteration; plan with 'fcp plan --sync microbatch'",
    "experts in iterations": "the job has expert parallel 2, whose ranks must run equally many micro-batches, but "
    "the plan has sync iteration; plan with 'fcp plan --sync microbatch'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one job of four ranks left the gradients of the examples."""
    return run(
        tmp_path_factory.mktemp("megatron"),
        *EQUAL,
        *SHARDED,
        *SHARES,
        *HYBRID,
        *HYBRID_SHARES,
        *WRONG,
        *STOPPED,
        "dropout",
    )


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("megatron"), *MORE_EQUAL, *MORE_SHARES)


def write_plans(folder: Path) -> None:
    write_plan(folder / "switching.parquet", SWITCHING, num_ranks=NUM_RANKS, rows=32)
    write_plan(folder / "equal_shapes.parquet", EQUAL_SHAPES, num_ranks=NUM_RANKS, rows=8)
    write_plan(folder / "waves.parquet", WAVES, num_ranks=NUM_RANKS, sync="microbatch", rows=16)
    write_plan(folder / "sharing_heads.parquet", SHARING_HEADS, num_ranks=NUM_RANKS, sync="microbatch", rows=16)
    write_plan(folder / "tensor.parquet", TENSOR, num_ranks=2, rows=12, tensor_parallel=2)
    recipe = Recipe(zero_stage=1, recompute="as-needed")
    needed: dict[str, Any] = {"recipe": recipe, "cost_profile": levels_profile(*LEVELS)}
    write_plan(folder / "as_needed.parquet", AS_NEEDED, num_ranks=NUM_RANKS, sync="microbatch", rows=24, **needed)
    needed["cost_profile"] = levels_profile(LEVELS[0], LEVELS[-1])
    write_plan(folder / "tensor_as_needed.parquet", TENSOR, num_ranks=2, rows=12, tensor_parallel=2, **needed)
    staged = Pipeline(forward_share=1 / 3, recompute_seconds_per_token=(LEVELS[-1].seconds_per_token, 8e-6))
    write_plan(
        folder / "stages_as_needed.parquet",
        UNEQUAL,
        num_ranks=2,
        rows=24,
        pipeline_parallel=2,
        pipeline=staged,
        **needed,
    )
    write_plan(folder / "pipeline.parquet", PIPELINE, num_ranks=2, rows=8, sync="microbatch", pipeline_parallel=2)
    timed = Pipeline(forward_share=1 / 3)
    write_plan(folder / "unequal.parquet", UNEQUAL, num_ranks=2, rows=24, pipeline_parallel=2, pipeline=timed)
    write_plan(folder / "stages.parquet", STAGES, num_ranks=1, rows=16, pipeline_parallel=4, pipeline=timed)
    blocks = replace(timed, virtual_stages=2)
    waves: dict[str, Any] = {"sync": "microbatch", "pipeline": blocks, "rows": 16}
    write_plan(folder / "virtual.parquet", VIRTUAL, num_ranks=2, pipeline_parallel=2, **{**waves, "rows": 18})
    write_plan(folder / "virtual_stages.parquet", VIRTUAL_STAGES, num_ranks=1, pipeline_parallel=4, **waves)
    alone: dict[str, Any] = {"num_ranks": 1, "tensor_parallel": 2, "pipeline_parallel": 2}
    write_plan(folder / "virtual_alone.parquet", VIRTUAL_STAGES, **alone, **waves)


def run(folder: Path, *cases: str) -> Path:
    write_plans(folder)
    write_planned(folder / "planned.parquet", num_ranks=2, stages=2, tokens_per_rank=16)
    write_planned(folder / "planned_stages.parquet", num_ranks=1, stages=4, tokens_per_rank=32)
    write_planned(folder / "planned_virtual.parquet", num_ranks=2, stages=2, tokens_per_rank=16, virtual_stages=2)
    (folder / "settings.json").write_text(json.dumps({name: given for name, (given, _) in SETTINGS.items()}))
    torchrun("-m", "tests.runtime.megatron.gradient_worker", str(folder), *cases, num_ranks=NUM_RANKS)
    return folder


def write_planned(path: Path, *, num_ranks: int, stages: int, tokens_per_rank: int, virtual_stages: int = 1) -> None:
    """What the planner makes of three steps for pipelines: its micro-batches, in its order."""
    plain = example_problem(num_ranks=num_ranks, ranks_per_node=num_ranks, tokens_per_rank=tokens_per_rank)
    pipeline = Pipeline(forward_share=1 / 3, virtual_stages=virtual_stages)
    sync: Any = "iteration" if virtual_stages == 1 else "microbatch"
    problem = replace(plain, pipeline_parallel=stages, pipeline=pipeline, sync=sync)
    table = table_of([7, 30, 5, 13, 2, 9, 1, 4, 9, 21, 29, 1, 6, 3, 8, 2, 9, 3, 4, 11, 2, 1, 31, 7])
    batches = BatchSettings(global_batch_size=8, shuffle=False)
    make_plan(path, PlanInputs(table=table, problem=problem, settings=batches))


def worst_error(folder: Path, case: str) -> float:
    """Largest difference from one process, over all ranks and steps, relative to the gradient's largest entry."""
    alone: np.ndarray = pickle.loads((folder / f"{case}-alone.pickle").read_bytes())
    errors = [
        float(np.abs(pickle.loads((folder / f"{case}-{rank}.pickle").read_bytes()) - alone).max())
        for rank in range(NUM_RANKS)
    ]
    return max(errors) / float(np.abs(alone).max())


def worst_share_error(folder: Path, case: str) -> float:
    """Largest difference of a process's share of the gradient, relative to the gradient's largest entry."""
    return max(float(pickle.loads((folder / f"{case}-{process}.pickle").read_bytes())) for process in range(NUM_RANKS))


@pytest.mark.parametrize("case", [*EQUAL, *SHARDED, *HYBRID])
def test_every_rank_ends_with_the_gradient_of_one_process(folder: Path, case: str) -> None:
    assert worst_error(folder, case) <= 1e-12


@pytest.mark.parametrize("case", [*SHARES, *HYBRID_SHARES])
def test_every_process_of_a_rank_ends_with_its_share_of_the_gradient_of_one_process(folder: Path, case: str) -> None:
    assert worst_share_error(folder, case) <= 1e-12


@pytest.mark.full
@pytest.mark.parametrize("case", [*MORE_EQUAL, *MORE_SHARES])
def test_so_they_do_in_every_other_setting(more: Path, case: str) -> None:
    assert (worst_error if case in MORE_EQUAL else worst_share_error)(more, case) <= 1e-12


@pytest.mark.parametrize("case", ["as needed", "as needed on the engine"])
def test_each_micro_batch_recomputes_as_many_layers_as_the_tokens_of_its_rank_need(folder: Path, case: str) -> None:
    """A layer runs its norm again under `elementwise` and `selective`, its first matrix's module under `activation`."""
    rows = [(row, rank) for step in AS_NEEDED for row in step for rank in row.ranks]
    chosen = LayerLevels(LEVELS, layers=2)
    tokens = [_held(row, rank, even=case != "as needed") for row, rank in rows]
    levels = Counter(chosen.level(layer, held) for held in tokens for layer in range(2))
    assert set(levels) == {"none", "activation", "elementwise", "selective"}
    again = levels["elementwise"] + levels["selective"]
    ran = sum(
        (Counter(json.loads((folder / f"{case}-{rank}.json").read_text())) for rank in range(NUM_RANKS)), Counter()
    )
    assert ran["input_layernorm"] == 2 * len(rows) + again
    assert ran["linear_fc1"] == 2 * len(rows) + again + levels["activation"]


def test_each_stage_recomputes_its_share_of_layers_in_every_micro_batch(folder: Path) -> None:
    """Two layers a stage, of which the first stage recomputes both, and the last two fifths."""
    for process in range(NUM_RANKS):
        rank, stage = process % 2, process // 2  # as Megatron orders processes: stages lie all ranks apart
        microbatches = sum(rank in row.ranks for step in UNEQUAL for row in step)
        ran = json.loads((folder / f"pipelines as needed-{process}.json").read_text())
        assert ran["input_layernorm"] == microbatches * (2 + (2 if stage == 0 else 1))


def _held(row: Row, rank: int, *, even: bool) -> int:
    """Tokens of a rank in a micro-batch; with equal chunks, those of padded sequences, and one where it has none."""
    degree = len(row.ranks)
    unit = 2 * degree if even else 1
    lengths = tuple(-(-length // unit) * unit for length in row.lengths)
    return shard_layout(lengths, degree).tokens(row.ranks.index(rank)) if lengths else 1


@pytest.mark.parametrize("case", WRONG)
def test_without_its_hook_the_gradient_is_wrong_in_silence(folder: Path, case: str) -> None:
    """Rotary tables of the pack instead of the shard; the latest group in a recomputed forward; mRoPE's positions; what
    follows a token in the shard instead of its sequence."""
    assert worst_error(folder, case) > 1e-4


@pytest.mark.parametrize(("case", "message"), STOPPED.items())
def test_what_goes_wrong_in_a_job_stops_every_rank_with_one_line(folder: Path, case: str, message: str) -> None:
    for rank in range(NUM_RANKS):
        found = (folder / f"{case}-{rank}.refused").read_text()
        assert message in found and "\n" not in found


def test_transformer_engines_groups_may_take_half_of_a_devices_free_memory(folder: Path) -> None:
    assert json.loads((folder / "most_groups.json").read_text()) == 5  # of 688 MB, in half of 7 GB


def test_dropout_outside_of_attention_does_not_disturb_the_probe(folder: Path) -> None:
    assert (folder / "dropout-0.refused").read_text() == "no error"


@pytest.mark.parametrize(
    ("case", "message"), [*((name, said) for name, (_, said) in SETTINGS.items()), *MODELS.items()]
)
def test_what_a_plan_cannot_drive_is_refused_with_one_line(folder: Path, case: str, message: str) -> None:
    found = json.loads((folder / "refused.json").read_text())[case]
    assert found.startswith(message)
    assert "\n" not in found
