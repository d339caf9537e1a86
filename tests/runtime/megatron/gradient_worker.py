"""One rank of a job that runs many plans through Megatron's own schedule and DDP; leaves `CASE-RANK.pickle` for each.

Run by torchrun as `-m tests.runtime.megatron.gradient_worker FOLDER`, which holds the plans.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import tests.runtime.megatron.tiny as tiny  # isort: skip  first: it lets megatron run on the CPU

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from fcp_cli.errors import FcpError
from fcp_cli.integrations.base import Refusals, refuse
from fcp_cli.integrations.megatron import checks, transformer_engine
from fcp_cli.integrations.megatron import model as hooks
from fcp_cli.integrations.megatron.data import current_microbatch
from fcp_cli.integrations.megatron.follow import Follower
from fcp_cli.integrations.megatron.model import MegatronStack
from fcp_cli.plan.file import PlanReader
from tests.patience import PATIENCE_SECONDS
from tests.runtime.workers.groups import own_groups
from tests.runtime.workers.leave import leave_job

Result = TypeVar("Result")
finalize: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]  # the package has a function of its name

SWITCHING, EQUAL_SHAPES, WAVES = "switching.parquet", "equal_shapes.parquet", "waves.parquet"
SHARING_HEADS, TENSOR, PIPELINE = "sharing_heads.parquet", "tensor.parquet", "pipeline.parquet"
UNEQUAL, STAGES = "unequal.parquet", "stages.parquet"
AS_NEEDED, TENSOR_AS_NEEDED = "as_needed.parquet", "tensor_as_needed.parquet"
STAGES_AS_NEEDED = "stages_as_needed.parquet"
VIRTUAL, VIRTUAL_STAGES, VIRTUAL_ALONE, PLANNED_VIRTUAL = (
    "virtual.parquet",
    "virtual_stages.parquet",
    "virtual_alone.parquet",
    "planned_virtual.parquet",
)
PLANNED, PLANNED_STAGES = "planned.parquet", "planned_stages.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to run a plan.

    Attributes:
        plan: file name.
        settings: of the transformer.
        ddp: of Megatron's DDP.
        rope: kind of position embedding.
        two_forwards: run one forward ahead of the backwards, as pipelines do; only waves allow that.
        broken: what the integration is left without.
        probes: although it is broken.
        tensor_parallel, pipeline_parallel: processes per rank of the plan.
        expert_parallel: ranks that share the experts.
        engine: Transformer Engine attends (Megatron's wrapper, over a fake of what it wraps).
        hybrid: a HybridModel, which newer versions have, in place of a GPTModel.
        packed: each item of the data set is several sequences.
        masked: what tokens of an item see of each other is drawn.
        sharded: Megatron-FSDP's strategy, in place of Megatron's DDP.
    """

    plan: str = SWITCHING
    settings: Mapping[str, Any] = field(default_factory=dict)
    ddp: Mapping[str, Any] = field(default_factory=dict)
    rope: str = "rope"
    two_forwards: bool = False
    broken: str = ""
    probes: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    engine: bool = False
    hybrid: bool = False
    packed: bool = False
    masked: bool = False
    sharded: str = ""


GATHERING = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LATENT = {"multi_latent_attention": True}
# So much that they matter.
SEVERAL = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.8}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
CASES: Mapping[str, Case] = {
    "plain": Case(),
    "recomputed": Case(settings=FULL),
    "core attention recomputed": Case(settings={"recompute_granularity": "selective"}),
    "two forwards": Case(plan=WAVES, two_forwards=True),
    "two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL),
    "overlapped": Case(ddp={"overlap_grad_reduce": True, "bucket_size": 1000}),
    "gathering": Case(ddp={**GATHERING, "bucket_size": 1000}),
    "gathering in waves": Case(plan=WAVES, ddp={**GATHERING, "bucket_size": 1000}, settings=FULL),
    "distributed optimizer": Case(ddp={"use_distributed_optimizer": True, "bucket_size": 1000}),
    "waves": Case(plan=WAVES),
    "yarn": Case(rope="yarn"),
    "mrope": Case(rope="mrope", settings={"mrope_section": [2, 1, 1]}),
    "engine": Case(engine=True),
    "engine two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL, engine=True),
    "engine core attention recomputed": Case(settings={"recompute_granularity": "selective"}, engine=True),
    "sharing heads": Case(plan=SHARING_HEADS, two_forwards=True, settings=FULL, engine=True),
    "packed": Case(packed=True),
    "packed in waves recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL, packed=True),
    "engine packed": Case(engine=True, packed=True),
    "latent": Case(plan=WAVES, two_forwards=True, settings={**LATENT, **FULL}),
    "latent with YaRN": Case(settings={**LATENT, "rope_type": "yarn", "original_max_position_embeddings": 16}),
    "latent without a query rank": Case(settings={**LATENT, "q_lora_rank": None, "qk_layernorm": False}),
    "latent, sharing heads": Case(plan=SHARING_HEADS, settings=LATENT, engine=True),
    "latent without positions": Case(settings=LATENT, broken="latent positions"),
    "hybrid": Case(hybrid=True),
    "hybrid two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL, hybrid=True),
    "several tokens": Case(settings=SEVERAL),
    "several tokens, two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings={**SEVERAL, **FULL}),
    "several tokens, sharing heads": Case(plan=SHARING_HEADS, settings=SEVERAL),
    "several tokens of packs": Case(settings=SEVERAL, packed=True),
    "several tokens on the engine": Case(settings=SEVERAL, engine=True),
    "masked": Case(masked=True),
    "masked, two forwards recomputed": Case(plan=WAVES, two_forwards=True, settings=FULL, masked=True),
    "masked, sharing heads": Case(plan=SHARING_HEADS, settings=SEVERAL, masked=True, engine=True),
    "as needed": Case(plan=AS_NEEDED, two_forwards=True),
    "as needed, experts": Case(plan=AS_NEEDED, settings=EXPERTS),
    "as needed, gathering": Case(plan=AS_NEEDED, ddp={**GATHERING, "bucket_size": 1000}),
    "as needed on the engine": Case(plan=AS_NEEDED, two_forwards=True, engine=True),
    "sharded": Case(plan=WAVES, sharded="optim_grads_params"),
    "sharded, recomputed": Case(plan=WAVES, sharded="optim_grads_params", settings=FULL),
    "sharded gradients": Case(plan=WAVES, sharded="optim_grads"),
    "without what follows": Case(settings=SEVERAL, broken="ahead"),
    "without rotary": Case(plan=EQUAL_SHAPES, broken="rotary"),
    "without binding": Case(plan=EQUAL_SHAPES, two_forwards=True, settings=FULL, broken="binding"),
    "without positions": Case(rope="mrope", settings={"mrope_section": [2, 1, 1]}, broken="positions"),
}  # fmt: skip


# Two virtual stages on each of two stages, and on each of four; one direction at a time, as Megatron-LM has it.
VIRTUAL_SETTINGS = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}
FOUR_STAGES = {**VIRTUAL_SETTINGS, "num_layers": 8, "pipeline_model_parallel_size": 4}
TOGETHER = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
# Balanced without a loss: after every step each expert's bias moves by the tokens that it had. So far that it matters.
BALANCED = {
    **EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}
# Large, so that they matter.
SEQUENCE_LOSS = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.1,
}
PACK_LOSS = {**SEQUENCE_LOSS, "moe_router_load_balancing_type": "aux_loss"}
# What must stop with one line: it is left in place of gradients.
REFUSED: Mapping[str, Case] = {
    "probe": Case(rope="mrope", settings={"mrope_section": [2, 1, 1]}, broken="positions", probes=True),
    "probe of rotary tables": Case(broken="rotary rows", probes=True),
    "probe of a pipeline": Case(
        plan=PIPELINE,
        pipeline_parallel=2,
        settings={"pipeline_model_parallel_size": 2},
        broken="rotary rows",
        probes=True,
    ),
    "probe with experts": Case(
        plan=WAVES,
        expert_parallel=2,
        settings={**EXPERTS, "expert_model_parallel_size": 2, "hidden_dropout": 0.1},
        broken="rotary rows",
        probes=True,
    ),
    "dropout": Case(settings={"hidden_dropout": 0.1}),
    "as needed, and by the job": Case(plan=AS_NEEDED, settings=FULL),
    "as needed with dropout": Case(plan=AS_NEEDED, settings={"hidden_dropout": 0.1}),
    "as needed, several tokens": Case(plan=AS_NEEDED, settings=SEVERAL),
    "as needed, router losses": Case(plan=AS_NEEDED, settings={**EXPERTS, **PACK_LOSS}),
    "too many groups": Case(engine=True, broken="few groups"),
    "per-token loss": Case(settings={"calculate_per_token_loss": False}),
    "other parallelism": Case(plan=TENSOR),
    "virtual stages of another plan": Case(plan=PIPELINE, pipeline_parallel=2, settings=VIRTUAL_SETTINGS),
    "loss pair": Case(broken="loss pair"),
    "loss count": Case(broken="loss count"),
    "other batch": Case(plan=EQUAL_SHAPES, broken="other batch"),
    "half a batch": Case(plan=EQUAL_SHAPES, broken="half a batch"),
}
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# Three layers on the first of two stages; a first virtual stage of the embedding alone.
UNEVEN = {"num_layers": 4, "pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3}
UNEVEN_VIRTUAL = {"pipeline_model_parallel_layout": "E|tt|t|tL"}
# On two ranks of the plan, with two processes each.
PARALLEL_CASES: Mapping[str, Case] = {
    "tensor": Case(plan=TENSOR, tensor_parallel=2, settings={"tensor_model_parallel_size": 2}),
    "tensor recomputed": Case(plan=TENSOR, tensor_parallel=2, settings={"tensor_model_parallel_size": 2, **FULL}),
    "latent in a pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, **LATENT}
    ),
    "several tokens in a pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, **SEVERAL, **FULL}
    ),
    "several tokens in sequence": Case(plan=TENSOR, tensor_parallel=2, settings={**SEVERAL, **SEQUENCE_PARALLEL}),
    "several tokens with experts": Case(settings={**EXPERTS, **SEQUENCE_LOSS, **SEVERAL}),
    "masked in a pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2}, masked=True
    ),
    "tensor as needed": Case(plan=TENSOR_AS_NEEDED, tensor_parallel=2, settings={"tensor_model_parallel_size": 2}),
    "sequence as needed": Case(plan=TENSOR_AS_NEEDED, tensor_parallel=2, settings=SEQUENCE_PARALLEL),
    "pipelines as needed": Case(
        plan=STAGES_AS_NEEDED, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, "num_layers": 4}
    ),
    "sequence": Case(plan=TENSOR, tensor_parallel=2, settings=SEQUENCE_PARALLEL),
    "pipeline": Case(plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2}),
    "pipeline recomputed": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, **FULL}
    ),
    "unequal pipelines": Case(plan=UNEQUAL, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2}),
    "unequal pipelines recomputed": Case(
        plan=UNEQUAL, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, **FULL}
    ),
    "four stages": Case(
        plan=STAGES, pipeline_parallel=4, settings={"pipeline_model_parallel_size": 4, "num_layers": 4}
    ),
    "planned pipelines": Case(plan=PLANNED, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2}),
    "planned stages recomputed": Case(
        plan=PLANNED_STAGES, pipeline_parallel=4, settings={"pipeline_model_parallel_size": 4, "num_layers": 4, **FULL}
    ),
    "virtual stages": Case(plan=VIRTUAL, pipeline_parallel=2, settings=VIRTUAL_SETTINGS),
    "virtual stages recomputed": Case(plan=VIRTUAL, pipeline_parallel=2, settings={**VIRTUAL_SETTINGS, **FULL}),
    "planned virtual stages": Case(plan=PLANNED_VIRTUAL, pipeline_parallel=2, settings=VIRTUAL_SETTINGS),
    "virtual stages on four": Case(plan=VIRTUAL_STAGES, pipeline_parallel=4, settings=FOUR_STAGES),
    "virtual stages receiving ahead": Case(
        plan=VIRTUAL_STAGES, pipeline_parallel=4, settings={**FOUR_STAGES, "overlap_p2p_comm_warmup_flush": True}
    ),
    "virtual stages, overlapped": Case(
        plan=VIRTUAL,
        pipeline_parallel=2,
        settings=VIRTUAL_SETTINGS,
        ddp={"overlap_grad_reduce": True, "bucket_size": 1000},
    ),
    "virtual stages in sequence": Case(
        plan=VIRTUAL_ALONE, tensor_parallel=2, pipeline_parallel=2, settings={**VIRTUAL_SETTINGS, **SEQUENCE_PARALLEL}
    ),
    "engine virtual stages": Case(
        plan=VIRTUAL, pipeline_parallel=2, settings={**VIRTUAL_SETTINGS, **FULL}, engine=True
    ),
    "balanced experts in virtual stages": Case(
        plan=VIRTUAL, pipeline_parallel=2, settings={**BALANCED, **VIRTUAL_SETTINGS}
    ),
    "uneven stages": Case(plan=PIPELINE, pipeline_parallel=2, settings=UNEVEN),
    "uneven virtual stages": Case(plan=VIRTUAL, pipeline_parallel=2, settings={**VIRTUAL_SETTINGS, **UNEVEN_VIRTUAL}),
    "engine pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={"pipeline_model_parallel_size": 2, **FULL}, engine=True
    ),
    "engine sequence": Case(plan=TENSOR, tensor_parallel=2, settings=SEQUENCE_PARALLEL, engine=True),
    "experts": Case(settings=EXPERTS),
    "balanced experts": Case(settings=BALANCED),
    "balanced experts recomputed": Case(plan=WAVES, settings={**BALANCED, **FULL}),
    "balanced experts in sequence": Case(plan=TENSOR, tensor_parallel=2, settings={**BALANCED, **SEQUENCE_PARALLEL}),
    "balanced experts in a pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={**BALANCED, "pipeline_model_parallel_size": 2}
    ),
    "balanced experts in a hybrid pipeline": Case(
        plan=PIPELINE, pipeline_parallel=2, settings={**BALANCED, "pipeline_model_parallel_size": 2}, hybrid=True
    ),
    "losses of sequences": Case(settings={**EXPERTS, **SEQUENCE_LOSS}),
    "losses of sequences, sharing heads": Case(plan=SHARING_HEADS, settings={**EXPERTS, **SEQUENCE_LOSS, **FULL}),
    "losses of sequences in sequence": Case(
        plan=TENSOR, tensor_parallel=2, settings={**EXPERTS, **SEQUENCE_LOSS, **SEQUENCE_PARALLEL}
    ),
    "losses of sequences in a pipeline": Case(
        plan=PIPELINE,
        pipeline_parallel=2,
        settings={**EXPERTS, **SEQUENCE_LOSS, "pipeline_model_parallel_size": 2, **FULL},
    ),
    "losses of packs": Case(settings={**EXPERTS, **PACK_LOSS}),
    "losses of packs, recomputed": Case(plan=WAVES, settings={**EXPERTS, **PACK_LOSS, **FULL}),
    "losses of packs in sequence": Case(
        plan=TENSOR, tensor_parallel=2, settings={**EXPERTS, **PACK_LOSS, **SEQUENCE_PARALLEL}
    ),
    "losses of packs, expert parallel": Case(
        plan=WAVES, expert_parallel=2, settings={**EXPERTS, **PACK_LOSS, "expert_model_parallel_size": 2}
    ),
    "expert parallel": Case(plan=WAVES, expert_parallel=2, settings={**BALANCED, "expert_model_parallel_size": 2}),
}
# What only a share of the processes has, and one process has not.
SHARED = (
    *SEQUENCE_PARALLEL,
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "pipeline_model_parallel_layout",
    "expert_model_parallel_size",
)


RAN: Counter[str] = Counter()  # how often parts of layers ran in the latest case, in forward or again
COMPILED = "plain"  # the one case for which Megatron may compile what it fuses


def lengths_of(plan: Path) -> list[int]:
    found: dict[int, int] = {}
    for step in PlanReader(plan).steps():
        found.update(zip(step.sequences.tolist(), step.lengths.tolist(), strict=True))
    return [found[row] for row in range(len(found))]


def packs_of(plan: Path) -> Iterator[list[list[int]]]:
    for step in PlanReader(plan).steps():
        yield [list(row.sequences) for row in step.microbatches() if row.sequences]


def global_batches(plan: Path) -> Iterator[list[int]]:
    for step in PlanReader(plan).steps():
        yield sorted(step.sequences.tolist())


def is_of_packs(case: Case) -> bool:
    """Whether the loss of the case's router looks at a pack as a whole."""
    return bool(case.settings.get("moe_router_load_balancing_type") == "aux_loss")


Named = Mapping[str, Tensor]


def whole_gradients(plan: Path, case: Case) -> tuple[Named, list[Named]]:
    """The weights of a model that one process holds whole, and its gradient of each step, without recomputation."""
    dataset = dataset_of(plan, case)
    alone = tiny.config(**{name: value for name, value in case.settings.items() if name not in (*SHARED, *FULL)})
    whole = tiny.build(alone, rope=case.rope, hybrid=case.hybrid)
    expected: list[Named] = []
    for rows, packs in zip(global_batches(plan), packs_of(plan), strict=True):
        gradient_alone(whole, dataset, rows, packs if is_of_packs(case) else None)
        expected.append({name: gradient(parameter).clone() for name, parameter in whole.named_parameters()})
        if alone.moe_router_enable_expert_bias:  # by the counts of all processes, which are equal
            finalize._update_router_expert_bias([whole], alone)
            finalize.reset_model_temporary_tensors(alone, [whole])
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}, expected


def worst_share_error(plan: Path, case: Case, weights: Named, expected: list[Named]) -> float:
    """Largest difference of this process's share of the gradient from one process's, relative to its largest entry."""
    models = wrapped(case, weights=weights)
    count_runs(models)
    found = steps_planned(plan, case, dataset_of(plan, case), models, lambda: own_gradients(models))
    return max(
        share_error(gradients, named, case.tensor_parallel) for named, gradients in zip(expected, found, strict=True)
    )


def share_error(found: Mapping[str, tuple[Tensor, Tensor]], whole: Named, tensor_parallel: int) -> float:
    """Largest difference of a process's gradients from its share of a whole model's, relative to the largest."""
    errors = [
        float((own - share(whole[name], parameter, tensor_parallel)).abs().max())
        for name, (parameter, own) in found.items()
    ]
    return max(errors) / max(float(gradient.abs().max()) for gradient in whole.values())


def pack_alone(model: Any, items: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], AbstractContextManager[None]]:
    """The batch of a pack that one process runs, and what its forward runs in."""
    names = [name for name in items[0] if name != "attention_mask"]
    batch = {name: torch.cat([item[name] for item in items], dim=-1).unsqueeze(0) for name in names}
    owners = torch.cat([torch.full((len(item["tokens"]),), at) for at, item in enumerate(items)])
    batch["attention_mask"] = ~(owners[:, None] == owners).tril()[None, None]
    return batch, rotary_of(model, batch["position_ids"][0])


def own_rotary_of(model: Any, batch: dict[str, Tensor], dataset: tiny.Sequences) -> AbstractContextManager[None]:
    """Positions of masked sequences may be given twice."""
    return rotary_of(model, batch["position_ids"][0]) if dataset.masked else nullcontext()


@contextmanager
def rotary_of(model: Any, positions: Tensor) -> Iterator[None]:
    """Within it, a model rotates the tokens of a pack by these positions [tokens]."""
    handle = model.rotary_pos_emb.register_forward_hook(lambda module, args, table: table[positions])
    try:
        yield
    finally:
        handle.remove()


def gradient(parameter: Any) -> Tensor:
    """An expert that no token was routed to has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def own_gradients(models: list[DistributedDataParallel]) -> dict[str, tuple[Tensor, Tensor]]:
    """By the name in the whole model: this process's parameter and its gradient."""
    return {
        name: (parameter, parameter.main_grad.clone())
        for model in models
        for name, parameter in tiny.whole_names(hooks.unwrapped(model)).items()
    }


def share(whole: Tensor, parameter: Any, tensor_parallel: int) -> Tensor:
    """What tensor parallelism leaves of a whole parameter, or its gradient, to this process."""
    if tensor_parallel == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    return whole.chunk(tensor_parallel, dim=parameter.partition_dim)[dist.get_rank() % tensor_parallel]


def layout_of(case: Case) -> tuple[int, ...]:
    """How a case joins processes to ranks: cases of one layout may share its process groups."""
    virtual_stages = case.settings.get("virtual_pipeline_model_parallel_size") or 1
    return case.tensor_parallel, case.pipeline_parallel, virtual_stages, case.expert_parallel


@contextmanager
def joined(case: Case = Case()) -> Iterator[None]:
    """Within it, processes are joined to ranks as the case says, in process groups of its own. Collective."""
    with own_groups():
        parallel_state.initialize_model_parallel(
            case.tensor_parallel,
            case.pipeline_parallel,
            case.settings.get("virtual_pipeline_model_parallel_size"),
            expert_model_parallel_size=case.expert_parallel,
            create_gloo_process_groups=False,
            order="tp-cp-ep-dp-pp",
        )
        if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):  # sized by the layers of the case before
            moe_utils.get_moe_layer_wise_logging_tracker().clear()
        yield
        parallel_state.destroy_model_parallel()


def dataset_of(plan: Path, case: Case) -> tiny.Sequences:
    axes = 3 if case.rope == "mrope" else 1
    return tiny.Sequences(lengths_of(plan), axes=axes, packed=case.packed, masked=case.masked)


def gradients_alone(plan: Path, case: Case) -> np.ndarray:
    """[steps, parameters] of one process that runs sequence by sequence with Megatron's own attention."""
    dataset = dataset_of(plan, case)
    settings = tiny.config(**{name: value for name, value in case.settings.items() if name not in FULL})
    model = tiny.build(settings, rope=case.rope, hybrid=case.hybrid)
    return np.stack([gradient_alone(model, dataset, rows) for rows in global_batches(plan)])


def gradient_alone(
    model: Any, dataset: tiny.Sequences, rows: list[int], packs: list[list[int]] | None = None
) -> np.ndarray:
    """Of each sequence on its own, or of each pack."""
    model.zero_grad()
    tokens = sum(float(dataset[row]["loss_mask"].sum()) for row in rows)
    set_loss_scales(torch.ones(1) / tokens)
    batches: list[tuple[dict[str, Tensor], AbstractContextManager[None]]]
    if packs is None:
        batches = [(batch, own_rotary_of(model, batch, dataset)) for row in rows for batch in dataset.alone(row)]
    else:
        batches = [pack_alone(model, [dataset[row] for row in pack]) for pack in packs]
    for batch, context in batches:
        with context:
            output, loss = tiny.forward_step(iter([batch]), model)
            (loss(output)[0] / tokens).backward()
    set_loss_scales(torch.ones(1))
    return torch.cat([gradient(parameter).flatten() for parameter in model.parameters()]).numpy()


def set_loss_scales(scale: Tensor) -> None:
    """Of the losses that are attached to activations, as Megatron's schedule does."""
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    MTPLossAutoScaler.set_loss_scale(scale)


def gradients_planned(plan: Path, case: Case) -> np.ndarray:
    """[steps, parameters] of this rank, with groups that change with every micro-batch."""
    with mock.patch.object(torch.cuda, "current_device", lambda: 0) if case.sharded else nullcontext():
        return _gradients_planned(plan, case)


def _gradients_planned(plan: Path, case: Case) -> np.ndarray:
    dataset = dataset_of(plan, case)
    models = wrapped(case)
    count_runs(models)
    return np.stack(steps_planned(plan, case, dataset, models, lambda: _reduced_gradient(models[0])))


def count_runs(models: list[DistributedDataParallel]) -> None:
    RAN.clear()
    for model in models:
        for name, module in hooks.unwrapped(model).named_modules():
            part = name.rpartition(".")[2]
            if part in ("input_layernorm", "linear_fc1"):
                module.register_forward_hook(partial(_count_run, part))


def _count_run(part: str, *_: Any) -> None:
    RAN[part] += 1


def wrapped(case: Case, *, weights: Named | None = None) -> list[DistributedDataParallel]:
    """A model in Megatron's DDP, with these weights of a whole model: its chunks, where stages have virtual ones."""
    settings = tiny.config(**case.settings)
    chunks = range(settings.virtual_pipeline_model_parallel_size or 1)
    core = _engine_core() if case.engine else None
    ddp_config = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": False, **case.ddp})
    models = []
    for chunk in chunks:
        place = chunk if len(chunks) > 1 else None
        gpt = tiny.build(settings, rope=case.rope, core=core, hybrid=case.hybrid, chunk=place)
        if weights is not None:
            with torch.no_grad():
                for name, parameter in tiny.whole_names(gpt).items():
                    parameter.copy_(share(weights[name], parameter, case.tensor_parallel))
        models.append(
            sharded(settings, case, gpt) if case.sharded else DistributedDataParallel(settings, ddp_config, gpt)
        )
    settings.finalize_model_grads_func = finalize_model_grads
    no_syncs = [model.no_sync for model in models]
    settings.no_sync_func = no_syncs if len(models) > 1 else no_syncs[0]
    return models


def sharded(settings: Any, case: Case, gpt: Any) -> Any:
    """In Megatron-FSDP, which is told that it runs on a GPU."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=case.sharded,
        grad_reduce_in_fp32=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    if hasattr(config, "megatron_fsdp_main_params_dtype"):
        config.megatron_fsdp_main_params_dtype = torch.float64
    return FullyShardedDataParallel(settings, config, gpt, device=torch.device("cpu"))


def _engine_core() -> Any:
    """Imported here: Megatron's wrapper of an engine that is not there is not to be had before 0.16."""
    from tests.runtime.megatron.fake_transformer_engine import megatron_wrapper

    return megatron_wrapper()


def steps_planned(
    plan: Path,
    case: Case,
    dataset: tiny.Sequences,
    models: list[DistributedDataParallel],
    take: Callable[[], Result],
) -> list[Result]:
    """What `take` finds after each step of the plan."""
    batches = list(global_batches(plan))
    model = models[0]
    iterators = [tiny.data_iterator(dataset) for _ in models]
    arguments = {
        "forward_step_func": _FORWARD_STEPS.get(case.broken, tiny.forward_step),
        "data_iterator": iterators if len(models) > 1 else iterators[0],
        "model": models,
        "num_microbatches": len(batches[0])
        // parallel_state.get_data_parallel_world_size()
        // (2 if case.broken == "half a batch" else 1),
        "micro_batch_size": 1,
        "seq_length": 128,
        "forward_only": False,
    }
    # What is broken on purpose must come through to the gradients; that the probe sees it is tested on its own.
    os.environ["FCP_PROBE"] = "0" if case.broken and not case.probes else "1"
    most_groups = 1 if case.broken == "few groups" else transformer_engine.MOST_GROUPS
    with mock.patch.object(transformer_engine, "MOST_GROUPS", most_groups):
        follower = Follower(plan, arguments, MegatronStack())
    _break(case.broken, model)
    run = two_forwards if case.two_forwards else schedules.get_forward_backward_func()
    gathers = model.ddp_config.overlap_param_gather and not case.sharded
    if gathers:  # Megatron's own loop has its gathers on from the second step
        model.disable_forward_pre_hook(param_sync=False)
    found = []
    for step in range(len(batches)):
        for each in models:
            each.zero_grad_buffer()
        with mock.patch.object(follower.watch, "begin", wraps=follower.watch.begin) as begun:
            follower.run(run, arguments)
        assert {call.args[0] for call in begun.call_args_list} == {step}, "each micro-batch is watched"
        found.append(take())
        if gathers and not step:
            model.enable_forward_pre_hook()
    for each in models:
        let_go_of_groups(each)
    return found


def let_go_of_groups(model: DistributedDataParallel) -> None:
    """Drop what keeps a finished case's process groups alive.

    Rotary tables are cached with their group; an expert layer's dispatcher keeps the graph of its last forward, which
    leads back to the model through C++, where Python's collector cannot see the cycle.
    """
    for module in hooks.unwrapped(model).modules():
        if hasattr(module.forward, "cache_clear"):
            module.forward.cache_clear()
        if hasattr(module, "token_dispatcher"):
            vars(module.token_dispatcher).clear()
    if model.ddp_config.use_megatron_fsdp:
        forget_sharded(model)


def forget_sharded(model: Any) -> None:
    """Megatron-FSDP hangs itself into hooks of modules and attributes of parameters, which lead back to its groups."""
    for module in model.modules():
        for name, hooked in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooked, dict):
                hooked.clear()
    for parameter in [*hooks.unwrapped(model).parameters(), *model.param_and_grad_buffer.param_to_name]:
        vars(parameter).clear()
    vars(model.param_and_grad_buffer).clear()
    vars(model.module).clear()


def two_forwards(
    *, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int, **_: Any
) -> None:
    """Forward, forward, backward, backward: what pipelines do."""
    (chunk,), (batches,) = model, data_iterator if isinstance(data_iterator, list) else [data_iterator]
    losses, tokens = [], torch.zeros((), dtype=torch.int)
    with chunk.no_sync():
        for number in range(num_microbatches):
            output, loss_function = forward_step_func(batches, chunk)
            loss, count, _report = loss_function(output)
            losses.append(loss)
            tokens += count
            if len(losses) == 2:
                losses.pop(0).backward()
            del number
        for loss in losses:
            loss.backward()
    finalize_model_grads([chunk], tokens)


def _reduced_gradient(model: DistributedDataParallel) -> np.ndarray:
    """Of all parameters; under a distributed optimizer each rank has reduced only its part of each bucket."""
    if model.ddp_config.use_megatron_fsdp:
        return _gathered_gradient(model)
    if model.ddp_config.use_distributed_optimizer:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for buffer in model.buffers:
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather(list(bucket.grad_data.chunk(group.size())), own, group=group)
    found: np.ndarray = torch.cat([parameter.main_grad.flatten() for parameter in model.parameters()]).numpy().copy()
    return found


def _gathered_gradient(model: Any) -> np.ndarray:
    """Of parameters of which each rank holds some rows."""
    own = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        own[name] = np.empty(0) if grad is None else getattr(grad, "_local_tensor", grad).flatten().numpy()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return np.concatenate([rank[name] for name in own for rank in everyone])


def _break(what: str, model: DistributedDataParallel) -> None:
    """Take one hook away."""
    gpt = hooks.unwrapped(model)
    if what == "rotary":
        gpt.rotary_pos_emb._forward_hooks.clear()
    elif what == "rotary rows":
        gpt.rotary_pos_emb._forward_hooks.clear()
        gpt.rotary_pos_emb.register_forward_hook(_first_rows)
    elif what == "latent positions":
        for layer in gpt.decoder.layers:
            layer.self_attention.rotary_pos_emb._forward_hooks.clear()
            layer.self_attention.rotary_pos_emb.register_forward_hook(_first_rows)
    elif what == "binding":  # the group of the latest forward, wherever a forward is recomputed
        for layer in gpt.decoder.layers:
            core = layer.self_attention.core_attention
            core.forward = partial(_latest_group, core.forward)
        gpt.register_forward_pre_hook(_remember)
    elif what == "ahead":  # as if the shard were the sequence
        gpt.decoder.register_forward_pre_hook(_without_what_follows, with_kwargs=True)
    elif what == "positions":
        gpt.register_forward_pre_hook(_contiguous_positions, with_kwargs=True)


def _forward_step_of_pairs(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    output, loss = tiny.forward_step(data_iterator, model)
    return output, lambda tensor: loss(tensor)[::2]


def _forward_step_that_miscounts(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    output, loss = tiny.forward_step(data_iterator, model)

    def miscounted(tensor: Tensor) -> Any:
        total, _, report = loss(tensor)
        return total, torch.tensor(tensor.numel() + 1, dtype=torch.int), report

    return output, miscounted


def _forward_step_of_another_batch(data_iterator: Any, model: Any) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    return tiny.forward_step(iter([{name: tensor[..., :1] for name, tensor in batch.items()}]), model)


_FORWARD_STEPS = {
    "loss pair": _forward_step_of_pairs,
    "loss count": _forward_step_that_miscounts,
    "other batch": _forward_step_of_another_batch,
}
_latest: list[Any] = []


def _remember(*_: Any) -> None:
    microbatch = current_microbatch.get()
    assert microbatch is not None
    _latest[:] = [microbatch.ring]


def _latest_group(original: Callable[..., Tensor], *args: Any, packed_seq_params: Any, **kwargs: Any) -> Tensor:
    swapped = hooks.RingSequences(qkv_format="sbhd", ring=_latest[0])
    return original(*args, packed_seq_params=swapped, **kwargs)


def _first_rows(module: Any, args: tuple[Any, ...], table: Tensor) -> Tensor | None:
    """Of the rotary table: as many as the shard has tokens."""
    microbatch = current_microbatch.get()
    if microbatch is None:
        return None
    return table[torch.arange(microbatch.tokens) % len(table)]


def _without_what_follows(decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    kwargs["packed_seq_params"].ahead = TokensOfShard()


class TokensOfShard:
    def after(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        moved = tensor.roll(-1, dims=-1)
        moved[..., -1] = 0
        return moved, moved.sum()


def _contiguous_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multi-axis positions of the pack's first tokens instead of the shard's."""
    tokens, positions, *rest = args
    return (tokens, positions.sort(dim=-1).values, *rest), kwargs


def refused_settings(settings: Mapping[str, Any]) -> str:
    """What is said of a configuration with these settings; Megatron's own checks of them are not asked."""
    config = tiny.config()
    for name, value in settings.items():
        setattr(config, name, value)
    return refusal(checks.config_refusals(config))


def refused_models() -> dict[str, str]:
    """What is said of models that a plan cannot drive."""
    bidirectional = tiny.build(tiny.config())
    bidirectional.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask
    no_attention = torch.nn.Linear(1, 1)
    fsdp = type("FullyShardedDataParallel", (torch.nn.Module,), {})()
    mixed_in = torch.nn.Sequential(type("Sharded", (type("FsdpModule", (), {}), torch.nn.Linear), {})(1, 1))
    mamba = type("MambaMixer", (torch.nn.Module,), {})()
    return {
        "other virtual stages": refusal(checks.interleaving_refusals(interleaved(), 2, 1, stages=2)),
        "no virtual stages": refusal(checks.interleaving_refusals(interleaved(), 1, 2, stages=2)),
        "groups of micro-batches": refusal(
            checks.interleaving_refusals(interleaved(microbatch_group_size_per_vp_stage=4), 2, 2, stages=2)
        ),
        "both directions at once": refusal(checks.interleaving_refusals(interleaved(**TOGETHER), 2, 2, stages=2)),
        "MTP in virtual stages": refusal(checks.interleaving_refusals(interleaved(mtp_num_layers=1), 2, 2, stages=2)),
        "Megatron-FSDP in virtual stages": refusal(
            checks.interleaving_refusals(interleaved(), 2, 2, stages=2, is_sharded=True)
        ),
        "router losses in virtual stages": refusal(
            checks.interleaving_refusals(interleaved(**EXPERTS, moe_z_loss_coeff=1e-3), 2, 2, stages=2)
        ),
        "expert parallel in virtual stages": refusal(
            checks.interleaving_refusals(interleaved(**EXPERTS, expert_model_parallel_size=2), 2, 2, stages=2)
        ),
        "FSDP": refusal(checks.sharding_refusals([no_attention, fsdp])),
        "FSDP in iterations": refusal(checks.wave_refusals(1, 1, "iteration", sharded=True)),
        "FSDP by a mixin": refusal(checks.sharding_refusals([mixed_in])),
        "another model": message_of(lambda: hooks.unwrapped(no_attention)),
        "no attention": refusal(checks.layer_refusals(no_attention)),
        "state": refusal(checks.layer_refusals(torch.nn.Sequential(mamba))),
        "bidirectional": refusal(checks.layer_refusals(bidirectional)),
        "pipeline in iterations": refusal(checks.wave_refusals(2, 1, "iteration")),
        "experts in iterations": refusal(checks.wave_refusals(1, 2, "iteration")),
    }


def interleaved(**changes: Any) -> Any:
    return tiny.config(**{**VIRTUAL_SETTINGS, **changes})


def refusal(table: Refusals) -> str:
    return message_of(lambda: refuse(table))


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except FcpError as error:
        return str(error)
    return "no error"


def main(folder: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # else Megatron divides by the number of tokens in fp32
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))
    torch.compiler.set_stance("force_eager")  # Megatron compiles what it fuses, for longer than all cases take
    cases = {**PARALLEL_CASES, **CASES, **REFUSED}
    cases = {name: case for name, case in cases.items() if name in names or not names}
    with joined():
        if dist.get_rank() == 0:
            leave_refusals(folder)
        whole = whole_models(folder, cases)
        leave_alone(folder, cases)
    gc.freeze()  # the end of each case collects its groups, and need not walk all modules for them
    layouts: dict[tuple[int, ...], list[str]] = {}
    for name, case in cases.items():
        layouts.setdefault(layout_of(case), []).append(name)
    for together in layouts.values():
        with joined(cases[together[0]]):  # once for all of them: making process groups takes as long as many cases
            for name in together:
                torch.compiler.set_stance("default" if name == COMPILED else "force_eager")
                with own_groups():
                    leave_case(folder, name, cases[name], whole)
    leave_job()


def leave_refusals(folder: Path) -> None:
    """What is said of settings and models that no job is started for, and how many groups a device has room for."""
    wanted = json.loads((folder / "settings.json").read_text())
    refused = {name: refused_settings(settings) for name, settings in wanted.items()}
    (folder / "refused.json").write_text(json.dumps({**refused, **refused_models()}))
    with mock.patch.object(torch.cuda, "mem_get_info", lambda device: (7 << 30, 80 << 30)):
        (folder / "most_groups.json").write_text(json.dumps(transformer_engine.most_groups(torch.device("cuda"))))


def whole_models(folder: Path, cases: Mapping[str, Case]) -> dict[str, tuple[Named, list[Named]]]:
    """The `whole_gradients` of all cases with shares, of which each rank makes some. Collective."""
    wanted = alike(folder, {name: case for name, case in PARALLEL_CASES.items() if name in cases})
    biased = [names for names in wanted if cases[names[0]].settings.get("moe_router_enable_expert_bias")]
    own = [names for names in wanted if names not in biased][dist.get_rank() :: dist.get_world_size()]
    made = {
        names: whole_gradients(folder / cases[names[0]].plan, cases[names[0]])
        for names in wanted
        if names in own or names in biased  # whose update is collective
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, made)
    return {name: whole for of_rank in everyone for names, whole in of_rank.items() for name in names}


def leave_alone(folder: Path, cases: Mapping[str, Case]) -> None:
    """The gradients of one process in all cases without shares, of which each rank makes some."""
    wanted = alike(folder, {name: case for name, case in CASES.items() if name in cases})
    for names in wanted[dist.get_rank() :: dist.get_world_size()]:
        found = pickle.dumps(gradients_alone(folder / cases[names[0]].plan, cases[names[0]]))
        for name in names:
            (folder / f"{name}-alone.pickle").write_bytes(found)


def alike(folder: Path, cases: Mapping[str, Case]) -> list[tuple[str, ...]]:
    """Names of cases that one process computes alike, together: the same model on the same rows."""
    found: dict[str, list[str]] = {}
    for name, case in cases.items():
        plan = folder / case.plan
        packs = list(packs_of(plan)) if is_of_packs(case) else None
        kept = {setting: value for setting, value in case.settings.items() if setting not in (*SHARED, *FULL)}
        model = (sorted(kept.items()), case.rope, case.hybrid, case.packed, case.masked)
        found.setdefault(repr((lengths_of(plan), list(global_batches(plan)), packs, model)), []).append(name)
    return [tuple(names) for names in found.values()]


def leave_case(folder: Path, name: str, case: Case, whole: Mapping[str, tuple[Named, list[Named]]]) -> None:
    """What this rank finds under the plan: its gradients, the error of its share of them, or why it is refused."""
    left, plan = folder / f"{name}-{dist.get_rank()}", folder / case.plan
    if name in REFUSED:
        left.with_suffix(".refused").write_text(message_of(partial(gradients_planned, plan, case)))
        return
    found = worst_share_error(plan, case, *whole[name]) if name in PARALLEL_CASES else gradients_planned(plan, case)
    left.with_suffix(".pickle").write_bytes(pickle.dumps(found))
    left.with_suffix(".json").write_text(json.dumps(RAN))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
