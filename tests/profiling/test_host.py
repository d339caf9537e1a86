"""Operations that the host issues for a micro-batch: as many as transformers' own layers issue, at each its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fcp_cli.cost.profile import Coefficients
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.state import WHOLE, Cut
from fcp_cli.models.cluster import load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import analytic_profile, host_operations, layer_operations

_VIEWS = (
    *("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "unbind"),
)


def counted_operations(model_type: str, layers: int) -> tuple[int, int]:
    """Operations but views of a small model's forward under bf16 autocast, and of its backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers import AutoConfig, AutoModelForCausalLM

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        number = 0

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.number += func.overloadpacket.__name__ not in _VIEWS
            return func(*args, **(kwargs or {}))

    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes, **heads))  # type: ignore[no-untyped-call]
    tokens = torch.arange(16)[None]
    with Count() as count:  # type: ignore[no-untyped-call]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward = count.number
        loss.backward()
    return forward, count.number - forward


@pytest.mark.hf
@pytest.mark.parametrize(
    ("model_type", "name"),
    [("llama", "llama3-8b"), ("qwen3", "qwen3-8b"), ("qwen3_moe", "qwen3-30b-a3b"), ("gemma3_text", "gemma3-27b")],
)
def test_a_layer_has_the_operations_of_transformers_own(model_type: str, name: str) -> None:
    few, more = (counted_operations(model_type, layers) for layers in (1, 3))
    found = [(b - a) / 2 for a, b in zip(few, more, strict=True)]
    spec = load_model(name)
    assert layer_operations(spec, next(iter(spec.kinds))) == pytest.approx(found, rel=0.05)


def test_layers_that_are_frozen_issue_no_backward_and_recomputation_issues_a_forward_more() -> None:
    spec = load_model("qwen3-vl-8b")
    assert spec.vision is not None
    whole = host_operations(spec, Recipe())
    text = spec.num_layers * (64 + 117)
    assert whole == text + spec.vision.depth * (48 + 87)
    assert host_operations(spec, Recipe(freeze_vision=True)) == text + spec.vision.depth * 48
    assert host_operations(spec, Recipe(recompute="full")) == whole + spec.num_layers * 64 + spec.vision.depth * 48


def test_a_micro_batch_costs_what_its_stage_of_the_layers_issues() -> None:
    spec, h100 = load_model("llama3-8b"), load_cluster("h100")

    def priced(cut: Cut = WHOLE, **changed: Any) -> Coefficients:
        cluster = replace(h100, **changed)
        return analytic_profile(spec, cluster, recipe=Recipe(), sync="microbatch", ranks=64, cut=cut).coefficients

    whole, issued = priced(), 32 * (48 + 87) * 8e-6
    assert (whole.microbatch_seconds, whole.host_microbatch_seconds) == pytest.approx((0.0, issued))
    assert (whole.ring_hop_seconds, whole.host_hop_seconds) == pytest.approx((2 * 32 * 7e-6, 2 * 32 * 1e-4))
    # Every rank of a tensor-parallel group issues every layer, and a stage only its own.
    assert priced(Cut(tensor_parallel=4)).host_microbatch_seconds == whole.host_microbatch_seconds
    assert priced(Cut(pipeline_parallel=4)).host_microbatch_seconds == pytest.approx(issued / 4)
    assert priced(Cut(pipeline_parallel=4)).host_hop_seconds == pytest.approx(whole.host_hop_seconds / 4)
    # A cluster that does not price the host's messages adds all to the device's clock, as before hosts had one.
    added = priced(host_message_seconds=None)
    assert (added.microbatch_seconds, added.host_microbatch_seconds) == pytest.approx((issued, 0.0))
    assert priced(host_message_seconds=None, operation_seconds=None, microbatch_seconds=0.05).microbatch_seconds == 0.05
