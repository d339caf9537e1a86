"""Operations that the host issues for a micro-batch: as many as transformers' own layers issue, at each its seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fcp_cli.cost.profile import Coefficients
from fcp_cli.cost.recipe import Recipe
from fcp_cli.memory.activations import layer_bytes
from fcp_cli.memory.items import precision_of
from fcp_cli.memory.state import WHOLE, Cut
from fcp_cli.models.cluster import ClusterSpec, load_cluster
from fcp_cli.models.model import load_model
from fcp_cli.profiling.computed import (
    MOVED_PER_SAVED_BYTE,
    analytic_profile,
    host_operations,
    layer_operations,
)

_VIEWS = (
    *("view", "_unsafe_view", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("detach", "alias", "split", "split_with_sizes", "as_strided", "unbind"),
)


def counted_operations(model_type: str, layers: int) -> tuple[int, int]:
    """Operations but views of a small model's forward under bf16 autocast, and of its backward."""
    import torch

    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64, "pad_token_id": 0}
    model = small_model(model_type, layers, sizes | {"num_attention_heads": 2, "num_key_value_heads": 1})
    tokens = torch.arange(16)[None]
    with counting() as count:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward = count.number
        loss.backward()
    return forward, count.number - forward


def small_model(model_type: str, layers: int, sizes: dict[str, int]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **sizes)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def counting() -> Any:
    """A context that counts operations but views, and the bytes that all but products and attention read and write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        number = moved = 0

        def __torch_dispatch__(
            self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            if name not in _VIEWS:
                self.number += 1
                if name not in ("mm", "addmm", "bmm") and "attention" not in name:
                    tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
                    self.moved += sum(one.numel() * one.element_size() for one in tensors)
            return out

    return Count()  # type: ignore[no-untyped-call]


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


@pytest.mark.hf
@pytest.mark.parametrize(("hidden", "ffn", "heads"), [(256, 768, 4), (128, 384, 2), (64, 128, 1)])
@pytest.mark.parametrize(("model_type", "name"), [("llama", "llama3-8b"), ("qwen3", "qwen3-8b")])
def test_elementwise_operations_move_the_bytes_that_cpu_ranks_pay_for(
    model_type: str, name: str, hidden: int, ffn: int, heads: int
) -> None:
    import torch

    sizes: dict[str, Any] = {"hidden_size": hidden, "head_dim": 64, "vocab_size": 64}
    config = {"intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": heads, "pad_token_id": 0}

    def moved(layers: int, tokens: int) -> int:
        model = small_model(model_type, layers, sizes | config)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        with counting() as count:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return int(count.moved)

    per_token = (moved(2, 96) - moved(1, 96) - moved(2, 32) + moved(1, 32)) / 64
    spec = replace(load_model(name), num_layers=1, ffn_size=ffn, num_heads=heads, num_kv_heads=heads, **sizes)
    (kind,) = spec.kinds
    saved = layer_bytes(spec, kind, precision_of(Recipe(precision="fp32")))
    assert per_token / saved == pytest.approx(MOVED_PER_SAVED_BYTE, rel=0.25)


def test_only_cpu_ranks_pay_for_all_elementwise_operations() -> None:
    spec, recipe = load_model("qwen3-tiny"), Recipe(precision="fp32")

    def seconds_per_token(cluster: ClusterSpec) -> float:
        found = analytic_profile(spec, cluster, recipe=recipe, sync="iteration", ranks=2)
        return found.coefficients.linear_seconds_per_token

    (kind,), cores, h100 = spec.kinds, load_cluster("this-machine"), load_cluster("h100")
    moved = MOVED_PER_SAVED_BYTE * spec.num_layers * layer_bytes(spec, kind, precision_of(recipe))
    paid = seconds_per_token(cores) - seconds_per_token(replace(cores, memory_bytes_per_second=1e30))
    assert paid == pytest.approx(moved / (0.8 * 15e9))
    assert seconds_per_token(h100) == seconds_per_token(replace(h100, memory_bytes_per_second=1e30))


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
