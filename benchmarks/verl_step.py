"""A PPO step of verl's own worker on CPUs, with its own balancing and with fcp's adapter inside the loop.

    torchrun --nproc-per-node 2 -m benchmarks.verl_step

verl's trainer spreads a rollout over ranks, and its `TrainingWorker` (FSDP2, a tiny Qwen3, gloo) cuts what a rank got
into micro-batches, computes verl's PPO loss, and takes the optimizer's step. Both call sites are then answered by
`VerlBalancing`. The step must have the same loss and the same gradient norm, whoever cuts. verl has no platform for
CPUs: one is registered here by its own plug-in interface. Needs verl 0.9, which is not among fcp's extras.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.workloads import EXAMPLE_PROFILE
from fcp_cli import Planner
from fcp_cli.planning.rollouts.verl import VerlBalancing

_PROMPT, _LONGEST, _SEQUENCES, _TOKENS = 4, 60, 16, 160
_VOCABULARY = 64


def main() -> None:
    """Take the same step twice, and print what is equal."""
    os.environ.update(VERL_PLATFORM="cpu", RAY_LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    _register_cpus()
    from verl.utils import seqlen_balancing  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.engine import (  # type: ignore[import-not-found, unused-ignore]
        EngineRegistry,
        FSDPEngineWithLMHead,
    )
    from verl.workers.engine import utils as engine  # type: ignore[import-not-found, unused-ignore]

    register = EngineRegistry.register(model_type="language_model", backend=["fsdp2"], device="cpu")
    register(FSDPEngineWithLMHead)
    own = {"partitions": seqlen_balancing.get_seqlen_balanced_partitions, "rearrange": engine.rearrange_micro_batches}
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    with TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(EXAMPLE_PROFILE)
        balancing = VerlBalancing(Planner(profile, ranks=ranks, ranks_per_node=ranks, tokens_per_rank=_TOKENS))
    theirs = _step(own["partitions"], own["rearrange"])
    ours = _step(balancing.get_seqlen_balanced_partitions, balancing.rearrange_micro_batches)
    if dist.get_rank() == 0:
        for name, found in (("verl", theirs), ("fcp", ours)):
            print(f"{name:5} loss {found[0]:.9f}, gradient norm {found[1]:.9f}, sequences {found[2]}")
    dist.destroy_process_group()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        if abs(mine - other) > 1e-5 * abs(other):
            sys.exit(f"the step differs: {mine} with fcp's adapter, {other} with verl's own functions")


def _step(partitions: Any, rearrange: Any) -> tuple[float, float, list[list[int]]]:
    """Return the loss, the gradient norm, and the sequences of each micro-batch of this rank, of one step."""
    from tensordict import NonTensorData  # type: ignore[import-not-found, unused-ignore]
    from verl.utils.seqlen_balancing import calculate_workload  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.engine import utils as engine  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.utils.padding import left_right_2_no_padding  # type: ignore[import-not-found, unused-ignore]

    cuts: list[list[int]] = []

    def recorded(*args: Any, **given: Any) -> Any:
        found = rearrange(*args, **given)
        cuts.extend(found[1])
        return found

    engine.rearrange_micro_batches = recorded
    lengths = np.random.default_rng(3).integers(8, _LONGEST, _SEQUENCES)
    work = calculate_workload(torch.from_numpy(lengths)).tolist()
    mine = partitions(work, dist.get_world_size(), equal_size=True)[dist.get_rank()]
    with TemporaryDirectory() as folder:
        worker = _worker(Path(folder))
        data = left_right_2_no_padding(_rollout(lengths)[mine])
        from verl.utils import tensordict_utils as tu  # type: ignore[import-not-found, unused-ignore]

        tokens = NonTensorData(lengths.tolist())
        tu.assign_non_tensor(data, global_token_num=tokens, global_batch_size=_SEQUENCES, temperature=1.0)
        tu.assign_non_tensor(data, calculate_entropy=False, update_lr_scheduler=False)
        metrics = tu.get(worker.train_batch(data), "metrics")
    return float(metrics["loss"]), float(metrics["grad_norm"]), [[mine[at] for at in cut] for cut in cuts]


def _worker(folder: Path) -> Any:
    """Make verl's worker for a tiny Qwen3 of equal weights."""
    import transformers
    from verl.trainer.config import CheckpointConfig  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.config import (  # type: ignore[import-not-found, unused-ignore]
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker  # type: ignore[import-not-found, unused-ignore]
    from verl.workers.utils.losses import ppo_loss  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": _VOCABULARY}
    config = transformers.Qwen3Config(**sizes, **heads)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        dtype="float32",
        mixed_precision={"param_dtype": "float32", "reduce_dtype": "float32"},
        use_dynamic_bsz=True,
        max_token_len_per_gpu=_TOKENS,
        use_torch_compile=False,
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=1)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-mean")
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def _rollout(lengths: Any) -> Any:
    """Return a rollout as verl's trainer hands it on: prompts padded on the left, responses on the right."""
    from tensordict import TensorDict  # type: ignore[import-not-found, unused-ignore]

    drawn = torch.Generator().manual_seed(1)
    count, responses = len(lengths), _LONGEST - _PROMPT
    tokens = torch.randint(1, _VOCABULARY, (count, _LONGEST), generator=drawn)
    mask = torch.arange(_LONGEST)[None] < torch.from_numpy(lengths)[:, None]
    values = torch.randn(2, count, responses, generator=drawn)
    return TensorDict(
        {
            "input_ids": tokens * mask,
            "attention_mask": mask.long(),
            "position_ids": torch.arange(_LONGEST)[None].expand(count, -1) * mask,
            "prompts": tokens[:, :_PROMPT],
            "responses": (tokens * mask)[:, _PROMPT:],
            "response_mask": mask[:, _PROMPT:].long(),
            "old_log_probs": values[0] - 4.0,
            "advantages": values[1],
        },
        batch_size=count,
    )


def _register_cpus() -> None:
    """Register a platform for CPUs with verl, by its own interface."""
    from contextlib import nullcontext

    from verl.plugin.platform import platform_base, platform_manager  # type: ignore[import-not-found, unused-ignore]

    device = ModuleType("cpus")
    device.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu)})
    zeros = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    device.__dict__.update({name: lambda *_: 0 for name in zeros})
    device.__dict__.update(
        get_device_name=lambda *_: "CPU",
        empty_cache=lambda: None,
        mem_get_info=lambda *_: (0, 0),
        manual_seed=torch.manual_seed,
    )
    members: dict[str, Any] = {name: (lambda *_, **__: None) for name in platform_base.PlatformBase.__abstractmethods__}
    members |= {
        "device_name": property(lambda _: "cpu"),
        "vendor_name": property(lambda _: "cpu"),
        "device_module": property(lambda _: device),
        "is_available": lambda _: True,
        "is_platform_available": lambda _, use_smi_check=False: True,
        "current_device": lambda _: torch.device("cpu"),
        "device_count": lambda _: 1,
        "communication_backend_name": lambda _: "gloo",
        "visible_devices_envvar": lambda _: "CUDA_VISIBLE_DEVICES",
        "ray_resource_name": lambda _: "CPU",
        "ray_noset_envvars": lambda _: [],
        "nvtx_range": lambda _, msg: nullcontext(),
    }
    made = type("PlatformCpu", (platform_base.PlatformBase,), members)
    platform_manager.PlatformRegistry.register(platform="cpu")(made)


if __name__ == "__main__":
    main()
