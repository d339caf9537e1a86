"""Small vision-language models under a plan, and what one process computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fcp_cli.plan.file import PlanReader
from fcp_cli.runtime.loss import next_token_labels, token_loss_sum
from fcp_cli.runtime.step import LocalMicroBatch
from fcp_cli.verification.emulation import Replayed, take_gradient
from fcp_cli.vision.parts import VisualSequence
from tests.runtime.linear_models import InDouble
from tests.runtime.models import Recomputation, Wrapping, recompute, wrap
from tests.runtime.plans import Row
from tests.runtime.vision_families import FAMILIES, Family

NO_GRADIENT = "k_proj.bias"
"""Weights that a loss does not depend on: they move all scores of a query alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionCase:
    """One way to run a plan."""

    family: Family = "qwen3_vl"
    frozen: bool = False
    recompute: Recomputation = "off"
    wrapping: Wrapping = "none"
    labelled: bool = False


def rows(
    *packs: tuple[Sequence[int], Sequence[int]], first: int = 0, wave: int = -1, family: Family = "qwen3_vl"
) -> list[Row]:
    """Micro-batches of (ranks, kinds), whose sequences are numbered on from `first`, which is a multiple of 5.

    Plans number sequences in order of appearance, so the kinds of a whole plan must be 0, 1, 2, 3, 4, 0, ... in order.
    """
    made, number = [], first
    for ranks, kinds in packs:
        assert list(kinds) == [(number + i) % 5 for i in range(len(kinds))], (number, kinds)
        made.append(
            Row(ranks, [len(FAMILIES[family].inputs_of(number + i).input_ids) for i in range(len(kinds))], wave)
        )
        number += len(kinds)
    return made


def unmodified(case: VisionCase) -> Any:
    """The transformers model in fp64; equal weights at every call, none zero or alike as initialisation leaves some."""
    torch.manual_seed(0)
    model = FAMILIES[case.family].model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if case.frozen:
        model.requires_grad_(False)
        model.model.language_model.requires_grad_(True)
        model.lm_head.requires_grad_(True)
    return model


def fetch(case: VisionCase) -> Any:
    family = FAMILIES[case.family]

    def sequence(row: int) -> VisualSequence:
        inputs = family.inputs_of(row)
        found: VisualSequence = family.sequence(inputs, inputs.labels if case.labelled else None)
        return found

    return sequence


def build(case: VisionCase) -> tuple[nn.Module, Any]:
    """One rank's model and the loss of a micro-batch; collective where the wrapping is."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from fcp_cli.integrations.transformers import prepare

    model = unmodified(case)
    prepare(model)
    recompute(model, case.recompute)
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    wrapped = wrap(model, case.wrapping, layers)

    def loss(microbatch: LocalMicroBatch) -> Tensor:
        logits = wrapped(input_ids=microbatch.input_ids, position_ids=microbatch.position_ids).logits
        return microbatch.loss(logits)

    return wrapped, loss


def in_double(case: VisionCase) -> AbstractContextManager[Any]:
    """Compute in fp64 what linear attention asks for in fp32."""
    return InDouble() if case.family.startswith("qwen3_5") else nullcontext()


def alone(case: VisionCase, plan: Path) -> Replayed:
    """Sequence by sequence in one process, positions and encoder as transformers has them."""
    with in_double(case):
        return _alone(case, plan)


def _alone(case: VisionCase, plan: Path) -> Replayed:
    model = unmodified(case)
    losses, gradients = [], []
    for step in PlanReader(plan).steps():
        found = [FAMILIES[case.family].inputs_of(row) for row in step.sequences.tolist()]
        labels = [next_token_labels(torch.from_numpy(one.labels if case.labelled else one.input_ids)) for one in found]
        tokens = sum(int((one != -100).sum()) for one in labels)
        total = 0.0
        for one, label in zip(found, labels, strict=True):
            loss = token_loss_sum(FAMILIES[case.family].logits_alone(model, one), label[None]) / tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        losses.append(total)
        gradients.append(take_gradient(model))
    return Replayed(losses=np.array(losses), gradients=np.stack(gradients))
