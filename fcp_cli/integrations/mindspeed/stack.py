"""The stack of megatron-core patched by MindSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from fcp_cli.errors import RunError
from fcp_cli.integrations.base import refuse
from fcp_cli.integrations.megatron.checks import layer_refusals
from fcp_cli.integrations.megatron.model import MegatronStack, hook_model
from fcp_cli.integrations.mindspeed import checks
from fcp_cli.integrations.mindspeed.attention import (
    Placement,
    attend_on_mindspeed,
    attend_on_own,
    hook_layer,
    hook_parallel_state,
    hook_rotary,
    placed,
    plain_attention,
    replace_unflatten,
    ring_settings,
    scale_of,
)
from fcp_cli.runtime.transport import ProcessTransport

# Megatron's groups that may have a single process, over which a script's sums are unchanged.
_SMALL_GROUPS = ("pipeline_model_parallel", "tensor_model_parallel", "expert_model_parallel")


class MindSpeedStack(MegatronStack):
    """megatron-core under MindSpeed.

    MindSpeed's ring attention is used if the job has a static context-parallel group, and the ring has all features of
    the job. Otherwise fcp's own is used, without padding.

    The script's own code sees a context-parallel group of one rank, so it slices, scales and sums nothing for the
    static group. Data-parallel sums run over all ranks; megatron-core 0.12 would exclude other members of a
    context-parallel group, since it expects each to have counted for all of them.

    Args:
        config: transformer config, into which MindSpeed copies its own settings.
    """

    engine_rings = False
    follows_masks = False
    recomputes_as_needed = False

    def __init__(self, config: Any) -> None:
        self._why_own_ring = checks.why_own_ring(config) if config.context_parallel_size > 1 else ""
        self.even_chunks = config.context_parallel_size > 1 and not self._why_own_ring

    @property
    def name(self) -> str:
        return f"{checks.stack_name()}, {'its' if self.even_chunks else 'own'} ring attention{self._why_own_ring}"

    def check(self, config: Any, model: Any) -> None:
        checks.require(checks.MODELS)
        if self.even_chunks:
            checks.require(checks.RING)
        refuse(checks.config_refusals(config), layer_refusals(model), checks.core_refusals(model))

    def hook(self, model: Any, transport: ProcessTransport) -> int:
        self._all = parallel_state.get_data_parallel_group(with_context_parallel=True)
        alone = _group_of_one()
        self._alone = Placement(ranks=(dist.get_rank(),), group=alone, data=alone)
        hook_parallel_state()
        if self.even_chunks:
            replace_unflatten()
        layers = hook_model(model, partial(self._hook_layer, group=transport.group))
        if getattr(model, "rotary_pos_emb", None) is not None and model.position_embedding_type != "mrope":
            hook_rotary(model.rotary_pos_emb)
        return layers

    def _hook_layer(self, layer: Any, *, group: dist.ProcessGroup) -> None:
        scale = scale_of(layer.core_attention, layer.config)
        if not self.even_chunks:
            hook_layer(layer, partial(attend_on_own, scale=scale))
            return
        settings = ring_settings(layer.config, layer.layer_number)
        hook_layer(layer, partial(attend_on_mindspeed, scale=scale, group=group, settings=settings))

    def around_step(self) -> AbstractContextManager[None]:
        return _told(Placement(data=self._all))

    @contextmanager
    def around_script(self) -> Iterator[None]:
        from mindspeed.args_utils import get_full_args

        settings = get_full_args()
        static = settings.context_parallel_size
        settings.context_parallel_size = 1
        try:
            with _told(self._alone):
                yield
        finally:
            settings.context_parallel_size = static

    @contextmanager
    def without_ring(self, model: Any, layer: Any) -> Iterator[None]:
        """Replace MindSpeed's attention, which needs at least two ranks, with a plain implementation."""
        static, ring = model.config.context_parallel_size, layer.core_attention.forward
        model.config.context_parallel_size = 1  # else the rotary table would have the length of the whole static group
        layer.core_attention.forward = partial(plain_attention, scale_of(layer.core_attention, layer.config))
        try:
            with self.around_script():
                yield
        finally:
            model.config.context_parallel_size, layer.core_attention.forward = static, ring

    def totals(self, reports: Any) -> Any:
        """Sum the (loss, tokens) reports over micro-batches and ranks, since each call of the script sees only its own.

        Other values are averaged over this rank's micro-batches.
        """
        if not reports or not all(isinstance(report, dict) for report in reports):
            return reports
        columns = {key: [report[key] for report in reports] for key in reports[0]}
        pairs = {
            key: torch.stack([_pair(value) for value in values]).sum(0)
            for key, values in columns.items()
            if _is_pair(values[0])
        }
        if pairs:
            totals = torch.stack(list(pairs.values()))
            dist.all_reduce(totals, group=self._all)
            pairs = dict(zip(pairs, totals, strict=True))
        means = {key: sum(values) / len(values) for key, values in columns.items() if key not in pairs}
        return [{**means, **{key: (total[0], total[1]) for key, total in pairs.items()}}]


@contextmanager
def _told(placement: Placement) -> Iterator[None]:
    """Use a placement; raise RunError if the hooks are gone, e.g. because of MindSpeed's `repatch`."""
    with placed(placement):
        if parallel_state.get_data_parallel_group() is not placement.data:
            raise RunError(
                "something has taken away the hooks that inform Megatron of the plan's groups (MindSpeed's repatch?); "
                "it must not be called after the first training step"
            )
        yield


def _group_of_one() -> dist.ProcessGroup:
    """Return a Megatron group that contains only this process."""
    for name in _SMALL_GROUPS:
        group: dist.ProcessGroup = getattr(parallel_state, f"get_{name}_group")()
        if dist.get_world_size(group) == 1:
            return group
    raise RunError(
        "the job has pipeline, tensor and expert parallel at once, which has not been made to follow a plan under "
        "MindSpeed; leave one of them at 1"
    )


def _is_pair(value: Any) -> bool:
    """Return whether a report is a pair of loss sum and token count, as in Megatron's training loop."""
    return len(value) == 2 if isinstance(value, (tuple, list)) else isinstance(value, Tensor) and value.numel() == 2


def _pair(value: Any) -> Tensor:
    total, count = value
    total = torch.as_tensor(total)
    return torch.stack([total, torch.as_tensor(count).to(total)]).detach()
