"""One rank of a job in which MindSpeed-MM's engine trains a small Qwen3-VL under a plan; leaves `RANK.pickle` in FOLDER.

Run by torchrun as `-m tests.runtime.mindspeed_mm.worker FOLDER`. The engine is MindSpeed-MM's own where it is on
PYTHONPATH, with MindSpeed; else one of the same shape.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fcp_cli.errors import FcpError
from fcp_cli.integrations.mindspeed_mm import hook_engine, hook_sharding
from fcp_cli.verification.emulation import take_gradient
from tests.patience import PATIENCE_SECONDS
from tests.runtime.vision_families import FAMILIES
from tests.runtime.vision_inputs import IMAGE, VIDEO
from tests.runtime.vision_models import VisionCase, unmodified
from tests.runtime.workers.leave import leave_job

ROWS, STEPS, PAD = 16, 2, 8
HAS_ENGINE = importlib.util.find_spec("mindspeed_mm") is not None
_LEFT_OUT = ("torch_npu", "torch_npu.npu", "torch_npu.profiler", "torch_npu.profiler.profiler", "torchair",
             "torchair.ge", "mindspeed_mm.fsdp.ops.fully_shard.fully_shard")  # fmt: skip


class ParallelApplier:
    """As MindSpeed-MM's: every layer is sharded, then the model."""

    def __call__(self, model: Any) -> Any:
        for layer in model.model.language_model.layers:
            fully_shard(layer)
        return fully_shard(model)


class TrainEngine:
    """As MindSpeed-MM's: its own batches, their mean, one update."""

    def __init__(self, args: Any, train_dataloader: Any, model: Any, optimizer: Any, scheduler: Any, **_: Any) -> None:
        self.args, self.model, self.optimizer, self.lr_scheduler = args, model, optimizer, scheduler
        self.train_dataloader, self.iteration = train_dataloader, 0

    def train_step(self, train_dataloader_iter: Any) -> dict[str, float]:
        raise AssertionError("the engine takes batches of its own")

    def evaluate(self) -> Any:
        with torch.no_grad():
            return self.model(**next(iter(self.train_dataloader)), use_cache=False).loss

    def train(self) -> None:
        batches = iter(self.train_dataloader)
        while self.iteration < self.args.training.train_iters:
            self.training_log(self.iteration + 1, 0.0, 0.0, 0, self.train_step(batches), None)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.optimizer.zero_grad()
            self.iteration += 1

    def training_log(
        self, iteration: int, elapsed: float, lr: float, consumed: int, losses: Any, norm: Any
    ) -> None: ...


def real_modules() -> tuple[ModuleType, ModuleType]:
    """Import MindSpeed-MM's modules, on a device that is not there."""
    import accelerate
    import transformers

    accelerate.utils.is_npu_available()  # both remember that there is none
    transformers.utils.import_utils.is_torch_npu_available()
    setattr(torch, "npu", MagicMock(is_available=lambda: False))  # noqa: B010
    for name in _LEFT_OUT:
        sys.modules[name] = MagicMock(__file__=__file__, __spec__=ModuleSpec(name, None))
    os.environ["NON_MEGATRON"] = "true"
    from mindspeed_mm.fsdp.utils import device

    device.IS_NPU_AVAILABLE = False  # so that models stay on the CPU
    from mindspeed_mm.fsdp.distributed import torch_parallelize
    from mindspeed_mm.fsdp.train import train_engine

    return torch_parallelize, train_engine


def stand_ins() -> tuple[ModuleType, ModuleType]:
    parallelize, engine = ModuleType("torch_parallelize"), ModuleType("train_engine")
    parallelize.ParallelApplier = ParallelApplier  # type: ignore[attr-defined]
    engine.TrainEngine = TrainEngine  # type: ignore[attr-defined]
    return parallelize, engine


def collate(items: list[int]) -> dict[str, Any]:
    """One row as a processor gives it, padded as MindSpeed-MM's collators pad."""
    (row,) = items
    inputs = FAMILIES["qwen3_vl"].inputs_of(row)
    tokens = torch.from_numpy(inputs.input_ids)
    padding = -len(tokens) % PAD
    labels = torch.nn.functional.pad(torch.from_numpy(inputs.labels), (0, padding), value=-100)
    batch = {
        "input_ids": torch.nn.functional.pad(tokens, (0, padding))[None],
        "labels": labels[None],
        "attention_mask": torch.nn.functional.pad(torch.ones_like(tokens), (0, padding))[None],
        "position_ids": torch.arange(len(labels)).expand(3, 1, -1),
    }
    batch |= inputs.visual
    return batch


def arguments(**changes: Any) -> Any:
    """The engine's settings, as far as they are read."""
    training = {
        "load": None, "save": None, "train_iters": STEPS, "global_batch_size": 8, "gradient_accumulation_steps": 4,
        "init_model_with_meta_device": False, "lora": SimpleNamespace(enable=False), "clip_grad": 0.0,
        "clip_grad_foreach": False, "log_interval": 1, "save_interval": 0, "val_interval": 0, "manual_gc_interval": 0,
    }  # fmt: skip
    plan = SimpleNamespace(param_dtype=None, pregather=False)
    parallel = {"ring_attention_size": 1, "ulysses_parallel_size": 1, "expert_parallel_size": 1, "fsdp_plan": plan}
    return SimpleNamespace(
        training=SimpleNamespace(**{**training, **changes}),
        parallel=SimpleNamespace(**parallel),
        features=SimpleNamespace(loss_cfg=SimpleNamespace(router_aux_loss_coef=0.0, loss_type="default")),
        data=None,
        tools=SimpleNamespace(profile=MagicMock(enable=False, static_param=MagicMock(start_step=10, end_step=11))),
    )


def sharded(parallelize: ModuleType, model: Any) -> Any:
    if not HAS_ENGINE:
        return parallelize.ParallelApplier()(model)
    from mindspeed_mm.fsdp.distributed.parallel_state import init_parallel_state
    from mindspeed_mm.fsdp.params.parallel_args import ParallelArguments

    layers = ["model.visual", "model.language_model.layers.{*}"]
    settings = ParallelArguments(fully_shard_parallel_size=dist.get_world_size(), fsdp_plan={"apply_modules": layers})
    init_parallel_state(**settings.to_dict())
    return parallelize.ParallelApplier(settings, MagicMock(quantization_plan=MagicMock(recipe_name=None)))(model)


def trained(parallelize: ModuleType, engines: ModuleType, **changes: Any) -> Any:
    """Gradients and losses of all steps, or the line with which the engine stops."""
    model = sharded(parallelize, unmodified(VisionCase()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(take_gradient(model)))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    losses: list[float] = []

    class Engine(engines.TrainEngine):  # type: ignore[name-defined,misc]
        def training_log(self, *args: Any, **kwargs: Any) -> None:
            losses.append(args[4]["loss"])

    loader: DataLoader[int] = DataLoader(list(range(ROWS)), batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    engine = Engine(arguments(**changes), loader, model, optimizer, schedule, checkpointer=MagicMock())
    try:
        engine.train()
    except FcpError as error:
        return str(error)
    return {"gradients": gradients, "losses": losses}


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    torch.set_num_threads(1)
    os.environ["FCP_PLAN"] = str(folder / "plan.parquet")
    parallelize, engines = real_modules() if HAS_ENGINE else stand_ins()
    hook_sharding(parallelize)
    hook_engine(engines)
    dist.init_process_group("gloo")
    assert IMAGE < VIDEO
    found = {
        "other batch": trained(parallelize, engines, global_batch_size=4),
        "planned": trained(parallelize, engines),
    }
    (folder / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps(found))
    leave_job()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
