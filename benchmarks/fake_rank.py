"""One rank of a job of any size, without its devices: the bundled trainer follows a plan on tensors without memory.

The model, its sharding, the session's gradients, the loss and the optimizer are those of a real run; only their tensors
are fake (shapes and types, no numbers), the process group answers at once, and numbers that the host reads are zero.
`tracked_peaks` counts the bytes that would be alive.

Fake tensors are on the CPU here, since those of a device need a PyTorch that was built for it. Differences
of CPU operators are corrected: attention runs the CUDA flash operators, whose shapes hold without a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.live_memory import LiveMemory
from fcp_cli import __version__
from fcp_cli.cost.recipe import Recipe
from fcp_cli.models.model import load_model
from fcp_cli.plan.file import PlanReader, plan_writer
from fcp_cli.plan.metadata import ManifestReference, PlanMetadata, Sync
from fcp_cli.plan.step import StepPlan, offsets_of
from fcp_cli.runtime.kernels.cuda import CudaFlashKernel
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.session import Session
from fcp_cli.runtime.stop_request import StopRequest
from fcp_cli.runtime.transport import ProcessWorld
from fcp_cli.training.settings import TrainSettings
from fcp_cli.training.trainer import Trainer
from fcp_cli.vision import grids as tower
from fcp_cli.vision.families import FAMILIES

_SEQUENCES = 4  # of a pack
_WARM_UP, _MEASURED = 1, 2  # micro-batches of the two steps


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeJob:
    """A job whose rank 0 is run.

    Attributes:
        model: a name that the trainer takes.
        recipe: of the rank.
        tokens: of the rank in each micro-batch.
        ranks: of the job.
        degree: members of the groups.
        heads_degree: of them, those of a set that shares the heads.
        on_cpu: ranks run on hosts, whose attention has another kernel.
        cost_profile: of the plan; it has the levels of layers that recompute as needed.
    """

    model: str
    recipe: Recipe
    sync: Sync
    tokens: int
    ranks: int = 8
    degree: int = 2
    heads_degree: int = 1
    on_cpu: bool = False
    cost_profile: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedStep:
    """Bytes of one step.

    Attributes:
        held_bytes: before the step.
        peak_bytes: most that was alive in it.
        makers: bytes at the peak by maker, where `maker` was given.
    """

    held_bytes: int
    peak_bytes: int
    makers: dict[str, int] = field(default_factory=dict)


def tracked_step(job: FakeJob, *, maker: Callable[[str], str] | None = None) -> TrackedStep:
    """Run two steps of one rank, the first of which makes the optimizer's state; return the bytes of the second."""
    memory = LiveMemory(maker)
    with TemporaryDirectory() as folder, _fake_ranks(job), memory.counting():
        trainer = _trainer(job, Path(folder))
        held = 0
        for step in trainer._steps():
            held = memory.live_bytes
            memory.reset_peak()
            trainer._train_step(step, StopRequest())
        trainer.close()
        return TrackedStep(held_bytes=held, peak_bytes=memory.peak_bytes, makers=dict(memory.peak_makers.most_common()))


def _trainer(job: FakeJob, folder: Path) -> Trainer:
    path = folder / "plan.parquet"
    metadata = _write_plan(path, job)
    recipe = {f.name: getattr(job.recipe, f.name) for f in fields(job.recipe) if f.name != "zero_stage"}
    asked: dict[str, Any] = {**recipe, "zero": str(job.recipe.zero_stage)}
    settings = TrainSettings(plan=path, model=job.model, run_dir=folder, device="cpu", quiet=True, **asked)
    vocabulary = load_model(job.model).vocab_size
    session = Session(
        plan=path,
        metadata=metadata,
        fetch=lambda row: np.arange(metadata.tokens_per_rank * job.degree) % vocabulary,
        world=ProcessWorld(),
        transport=_SilentTransport(),
        device=torch.device("cpu"),
    )
    trainer = Trainer(settings, session)
    assert trainer.recipe == job.recipe, trainer.recipe
    return trainer


def _write_plan(path: Path, job: FakeJob) -> PlanMetadata:
    """Write two steps in which every rank runs the same micro-batches, in groups of neighbours."""
    metadata = PlanMetadata(
        fcp_version=__version__,
        num_ranks=job.ranks,
        ranks_per_node=min(8, job.ranks),
        sync=job.sync,
        global_batch_size=_SEQUENCES,
        tokens_per_rank=job.tokens,
        seed=0,
        shuffle=False,
        solver="by hand",
        manifest=ManifestReference(name="lengths.parquet", rows=1 << 20, content_hash="0" * 64),
        cost_profile=job.cost_profile,
        recipe=job.recipe if job.cost_profile else None,
        attention="2d" if job.heads_degree > 1 else None,
    )
    with plan_writer(path, metadata) as writer:
        for number, microbatches in enumerate((_WARM_UP, _MEASURED)):
            writer.append(_step(number, microbatches, job))
    return PlanReader(path).metadata


def _step(number: int, microbatches: int, job: FakeJob) -> StepPlan:
    groups = job.ranks // job.degree
    rows = microbatches * groups
    lengths = np.full(rows * _SEQUENCES, job.tokens * job.degree // _SEQUENCES)
    waves = np.repeat(np.arange(microbatches), groups) if job.sync == "microbatch" else np.full(rows, -1)
    return StepPlan(
        step=number,
        wave=waves.astype(np.int32),
        rank_offsets=offsets_of([job.degree] * rows),
        ranks=np.tile(np.arange(job.ranks, dtype=np.int32), microbatches),
        sequence_offsets=offsets_of([_SEQUENCES] * rows),
        sequences=np.arange(len(lengths)),
        lengths=lengths.astype(np.int32),
        start_seconds=np.zeros(rows),
        seconds=np.ones(rows),
        makespan_seconds=float(microbatches),
        bound_seconds=float(microbatches),
        heads_degree=None if job.heads_degree == 1 else np.full(rows, job.heads_degree, dtype=np.int32),
    )


class _SilentTransport:
    """Takes every message and delivers nothing."""

    def start(self, kind: str, send: Any, to: int, receive: Any, source: int) -> _SilentTransport:
        return self

    def wait(self) -> None:
        pass


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers host reads of a fake tensor's values: zero, true, and an empty selection for masks.

    Masks choose visual tokens, of which these sequences have none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not args or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs or {})
        tensor = args[0]
        if func is torch.ops.aten._local_scalar_dense.default and tensor.constant is None:
            return True if tensor.dtype == torch.bool else 0.0 if tensor.dtype.is_floating_point else 0
        if func in _INDEXING:
            args = (tensor, [part for index in args[1] for part in self._chosen(index)], *args[2:])
        return func(*args, **kwargs or {})

    def _chosen(self, index: Any) -> list[Any]:
        """Return an index unchanged, a mask as one empty list of places for each of its dimensions."""
        if index is None or index.dtype != torch.bool:
            return [index]
        return [index.new_empty(0, dtype=torch.int64)] * index.dim()


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


@contextmanager
def _fake_ranks(job: FakeJob) -> Iterator[None]:
    """Be rank 0 of a job of fake ranks, with tensors that have no memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shard_layout.cache_clear()  # layouts keep tensors
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=job.ranks)
    try:
        with ExitStack() as stack:
            for target, name, value in _replacements(job):
                stack.enter_context(patch.object(target, name, value))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Numbers())  # type: ignore[no-untyped-call]
            yield
    finally:
        dist.destroy_process_group()
        shard_layout.cache_clear()


def _replacements(job: FakeJob) -> list[tuple[Any, str, Any]]:
    from fcp_cli.runtime import ring_passes
    from fcp_cli.runtime.guards import Guards
    from fcp_cli.training import sharding, trainer

    make_mesh = device_mesh.init_device_mesh

    def mesh_of_numbers(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make_mesh(*args, **kwargs)

    found: list[tuple[Any, str, Any]] = [
        (sharding, "init_device_mesh", mesh_of_numbers),
        # The host reads messages between ranks.
        (trainer, "reduce_flags", lambda world, **_: (False, False)),
        # One rank stands for all, so that there is nobody whose data could differ.
        (Guards, "same_data", lambda *_: None),
        # Fake parameters cannot be swapped, and are where they should be.
        (torch.nn.Module, "to", lambda module, *args, **kwargs: module),
    ]
    if not job.on_cpu:
        found.append((ring_passes, "select_kernel", lambda device, dtype: CudaFlashKernel()))
    architecture = load_model(job.model).architecture
    if architecture in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_vl"):
        found += _replacements_of_qwen(architecture)
    return found


def _replacements_of_qwen(architecture: str) -> list[tuple[Any, str, Any]]:
    """Return a context in which its encoder runs, which reads picture sizes from a tensor without values here."""
    modeling: Any = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    family: Any = FAMILIES[architecture]
    run_tower, grids = tower.run_tower, list[tuple[int, int, int]]()

    def remember(model: Any, parts: Any, pixels: Any) -> Any:
        merge = model.visual.spatial_merge_size
        grids[:] = [(1, *part.grid) for part in parts] or [(1, merge, merge)]
        return run_tower(model, parts, pixels)

    def of_numbers(function: Any) -> Any:
        def called(grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(torch.tensor(grids), *args, **kwargs)

        return called

    def attention_lengths(grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = [frames * height * width for frames, height, width in grids]
        return offsets_of(lengths), max(lengths)  # of numpy, whose differences are numbers here, too

    found = [(family, "run_tower", remember), (modeling, "get_vision_attention_seqlens", attention_lengths)]
    sizes = ("get_vision_interpolation_indices_and_weights", "get_vision_position_ids")
    found += [(modeling, name, of_numbers(getattr(modeling, name))) for name in sizes if hasattr(modeling, name)]
    if architecture == "qwen2_5_vl":
        found.append((modeling, "get_vision_window_index", _windows(modeling.get_vision_window_index, grids)))
    return found


def _windows(function: Any, grids: list[tuple[int, int, int]]) -> Any:
    """Return a stand-in for the encoder's windows, by recorded sizes: the order of patches, and ends as numbers."""

    def called(grid_thw: Any, *args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            order, ends = function(torch.tensor(grids), *args, **kwargs)
            return order, np.array(ends.tolist())

    return called
