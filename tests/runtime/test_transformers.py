"""Unmodified Hugging Face decoders on threads as ranks; gloo ranks with DDP and FSDP2 are in test_session."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from fcp_cli.errors import RunError
from fcp_cli.runtime.layout import shard_layout
from fcp_cli.runtime.loss import Labels, token_loss_sum
from fcp_cli.runtime.ring import Ring, current_ring
from fcp_cli.verification.emulation import Meeting, Replayed, gradients_on_rank, run_ranks, thread_session
from tests.runtime.models import Case, Family, Recomputation, assert_agrees, build, expected, hugging_face, recompute
from tests.runtime.plans import Row, random_steps, write_plan

pytestmark = [pytest.mark.torch, pytest.mark.hf]

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 1, 4, 1]])
POSITIONS = torch.arange(4)[None]


SHARING_HEADS = [
    [Row([0, 1, 2, 3], [31, 1, 6], heads_degree=2), Row([1, 2], [9], heads_degree=2), Row([0, 3], [7, 3])],
    [Row([0, 1], [1], heads_degree=2), Row([2, 3], [20]), Row([0, 1, 2, 3], [17, 4], heads_degree=4)],
]
"""Four query and two key/value heads: sets of four hold each of these twice."""


def require_trained_as_with_sdpa(plan: Path, case: Case, num_ranks: int) -> None:
    built = [build(case) for _ in range(num_ranks)]  # transformers sets dtypes globally: not on threads

    def run(meeting: Meeting, rank: int) -> Replayed:
        return gradients_on_rank(thread_session(plan, case.fetch(plan), meeting, rank), *built[rank])

    alone = expected(case, plan)
    for rank in run_ranks(num_ranks, run):
        assert_agrees(case, rank, alone)


@pytest.mark.examples(6)
@pytest.mark.parametrize("recompute", get_args(Recomputation))
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_decoder_under_a_plan_computes_what_sdpa_computes(
    family: Family, recompute: Recomputation, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path / "p", random_steps(3, 2, sync="iteration", seed=5), num_ranks=3)
    require_trained_as_with_sdpa(plan, Case(family=family, recompute=recompute), 3)


@pytest.mark.parametrize(
    "recompute", ["off", *(pytest.param(one, marks=pytest.mark.full) for one in get_args(Recomputation)[1:])]
)
def test_a_decoder_whose_ranks_share_heads_computes_what_sdpa_computes(
    recompute: Recomputation, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path / "p", SHARING_HEADS, num_ranks=4)
    require_trained_as_with_sdpa(plan, Case(family="qwen3", recompute=recompute), 4)


@pytest.fixture
def microbatch() -> Iterator[Ring]:
    """A ring of one rank that is current, with a sequence of four tokens."""
    ring = Ring(layout=shard_layout((4,), 1))
    current_ring.set(ring)
    yield ring
    current_ring.set(None)


def prepared(family: Family = "qwen3") -> Any:
    from fcp_cli.integrations.transformers import prepare

    decoder = hugging_face(family, torch.float64)
    prepare(decoder)
    return decoder


def test_every_layer_runs_on_the_current_ring(microbatch: Ring) -> None:
    prepared()(input_ids=IDS, position_ids=POSITIONS)
    assert microbatch.attention_calls == 2


def test_a_ring_that_is_passed_on_wins(microbatch: Ring) -> None:
    given = Ring(layout=shard_layout((4,), 1))
    prepared()(input_ids=IDS, position_ids=POSITIONS, ring=given)
    assert (given.attention_calls, microbatch.attention_calls) == (2, 0)


def test_going_back_to_sdpa_frees_the_model_from_plans() -> None:
    model = prepared()
    model.set_attn_implementation("sdpa")
    wanted = hugging_face("qwen3", torch.float64)(input_ids=IDS).logits
    assert torch.equal(model(input_ids=IDS).logits, wanted)


def test_outside_a_microbatch_the_model_says_where_it_belongs() -> None:
    with pytest.raises(RunError, match="the model was called outside a micro-batch"):
        prepared()(input_ids=IDS, position_ids=POSITIONS)


REFUSED_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"position_ids": None}, "no position_ids; pass position_ids=microbatch.position_ids"),
    ({"attention_mask": torch.ones(1, 4)}, "was given attention_mask, which it cannot use under a plan; remove it"),
    (
        {"labels": IDS},
        r"was given labels, .*; pass microbatch.labels, or remove them and use microbatch.loss\(logits\)",
    ),
    ({"past_key_values": ()}, "was given past_key_values"),
    ({"cache": ()}, "was given cache"),
    ({"position_bias": torch.ones(1, 4, 4, 4)}, "was given position_bias, .*; remove it: rings add no bias to scores"),
    ({"is_causal": False}, "asks for attention that is not causal"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED_CALLS)
def test_arguments_that_would_be_ignored_or_wrong_are_refused(
    microbatch: Ring, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RunError, match=message):
        prepared()(**{"input_ids": IDS, "position_ids": POSITIONS, **arguments})


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "layer_types",
            ["full_attention", "chunked_attention"],
            "the qwen3 model has layers of chunked_attention; a plan is for full attention and windows",
        ),
        ("attention_dropout", 0.1, "the qwen3 model has attention_dropout 0.1; set it to 0 in its config"),
        (
            "output_router_logits",
            True,
            "the qwen3 model adds an auxiliary loss of its experts (output_router_logits), which is made",
        ),
        ("vision_config", object(), "a qwen3 model is not a plain decoder, nor one of qwen3_vl, "),
    ],
)
def test_a_model_that_a_ring_cannot_follow_is_refused_before_training(setting: str, value: Any, message: str) -> None:
    from fcp_cli.integrations.transformers import prepare

    decoder = hugging_face("qwen3", torch.float64)
    setattr(decoder.config, setting, value)
    with pytest.raises(RunError, match=re.escape(message)):
        prepare(decoder)


def labelled(ring: Ring) -> torch.Tensor:
    """The labels of the ring's micro-batch, of which the second token has none."""
    values = torch.tensor([[1, -100, 1, 5]])
    ring.context.labels = Labels(values=values)
    return values


def test_with_the_microbatchs_labels_a_model_answers_with_the_sum_of_token_losses(microbatch: Ring) -> None:
    model, values = prepared(), labelled(microbatch)
    wanted = token_loss_sum(model(input_ids=IDS, position_ids=POSITIONS).logits, values)
    found = model(input_ids=IDS, position_ids=POSITIONS, labels=values)
    assert found.logits is None
    assert abs(float((found.loss - wanted).detach())) <= 1e-12
    assert model(input_ids=IDS, position_ids=POSITIONS).loss is None, "labels are those of one call"


def test_a_model_that_failed_forgets_the_labels(microbatch: Ring) -> None:
    model, values = prepared(), labelled(microbatch)
    with pytest.raises(RunError, match="asks for attention"):
        model(input_ids=IDS, position_ids=POSITIONS, labels=values, is_causal=False)
    assert model(input_ids=IDS, position_ids=POSITIONS).logits.shape == (1, 4, 61)


def test_the_head_keeps_its_weight_its_name_and_its_ties(microbatch: Ring) -> None:
    from fcp_cli.integrations.transformers import prepare

    model = hugging_face("qwen3", torch.float64, tied=True)
    names, shapes = list(model.state_dict()), [weight.shape for weight in model.state_dict().values()]
    prepare(model)
    assert list(model.state_dict()) == names
    assert [weight.shape for weight in model.state_dict().values()] == shapes
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_other_labels_than_the_microbatchs_are_refused(microbatch: Ring) -> None:
    """A data set's labels are not shifted to the next token."""
    same = labelled(microbatch).clone()
    with pytest.raises(RunError, match=r"was given labels, .*; pass microbatch.labels, or remove them"):
        prepared()(input_ids=IDS, position_ids=POSITIONS, labels=same)


def test_a_model_that_changes_its_logits_is_not_given_a_wrong_loss(microbatch: Ring) -> None:
    model = prepared()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.raises(RunError, match=r"changes the logits of its head, .*; remove labels, and use microbatch"):
        model(input_ids=IDS, position_ids=POSITIONS, labels=labelled(microbatch))


def test_what_a_layer_asks_of_attention_is_not_left_out_in_silence(microbatch: Ring) -> None:
    from fcp_cli.integrations.transformers.preparation import _attention_forward

    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(RunError, match=r"Module asks for .*, which a plan cannot follow"):
        _attention_forward(torch.nn.Module(), heads, heads, heads, None, ring=microbatch, dropout=0.5)


def test_a_layer_that_leaves_its_window_to_a_mask_is_refused() -> None:
    from fcp_cli.integrations.transformers.preparation import _check_call

    layer: Any = torch.nn.Module()
    layer.config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=16)
    for layer.layer_idx, right, wrong in ((0, None, 16), (1, 16, None), (1, 16, 17)):
        _check_call(layer, None, {"sliding_window": right})
        with pytest.raises(RunError, match=f"asks for a window of {wrong} tokens where its config says {right}; which"):
            _check_call(layer, None, {"sliding_window": wrong})


def with_learned_bias(model: Any, name: str = "position_bias") -> Any:
    """A decoder whose attention passes a learned bias to transformers' attention interface."""
    for layer in model.model.layers:
        layer.self_attn.bias = torch.nn.Parameter(torch.ones(1, 4, 4, 4, dtype=torch.float64))
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, name: module.bias}), with_kwargs=True
        )
    return model


def test_a_keyword_that_a_module_adds_to_its_attention_is_refused_before_training() -> None:
    from fcp_cli.integrations.transformers import prepare

    decoder = with_learned_bias(hugging_face("qwen3", torch.float64))
    with pytest.raises(
        RunError, match="Qwen3Attention passes position_bias to its attention, which rings would ignore"
    ):
        prepare(decoder)


def test_a_keyword_that_a_module_adds_only_in_training_is_refused_there(microbatch: Ring) -> None:
    decoder = with_learned_bias(prepared(), "indices")
    with pytest.raises(RunError, match="Qwen3Attention passes indices to its attention"):
        decoder(input_ids=IDS, position_ids=POSITIONS)


@pytest.mark.parametrize("how", ["off", "non-reentrant", "reentrant"])
def test_keywords_that_the_model_was_called_with_reach_its_attention(microbatch: Ring, how: Recomputation) -> None:
    decoder = prepared().train()
    recompute(decoder, how)
    given = {"num_items_in_batch": 4, "cu_seq_lens_q": torch.tensor([0, 4]), "max_length_q": 4}
    decoder(input_ids=IDS, position_ids=POSITIONS, **given).logits.sum().backward()
    assert decoder.model.layers[0].self_attn.q_proj.weight.grad is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by old names
def test_a_model_with_adapters_is_prepared_as_the_model_inside(microbatch: Ring) -> None:
    peft = pytest.importorskip("peft")
    from fcp_cli.integrations.transformers import prepare

    model = peft.get_peft_model(hugging_face("qwen3", torch.float64), peft.LoraConfig(target_modules=["q_proj"]))
    prepare(model)
    values = labelled(microbatch)
    wanted = token_loss_sum(hugging_face("qwen3", torch.float64)(input_ids=IDS).logits, values)
    found = model(input_ids=IDS, position_ids=POSITIONS, labels=values).loss
    assert abs(float((found - wanted).detach())) <= 1e-12  # fresh adapters change nothing
    assert microbatch.attention_calls == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_puts_tokens_before_sequences_is_refused() -> None:
    peft = pytest.importorskip("peft")
    from fcp_cli.integrations.transformers import prepare

    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(RunError, match="PromptTuningConfig puts tokens before every sequence"):
        prepare(peft.get_peft_model(hugging_face("qwen3", torch.float64), prompts))


def test_a_layer_without_its_ring_names_the_way_out() -> None:
    from fcp_cli.integrations.transformers.preparation import _attention_forward

    heads = torch.zeros(1, 2, 4, 8)
    with pytest.raises(RunError, match=r"Module was called without its ring; call prepare\(model\)"):
        _attention_forward(torch.nn.Module(), heads, heads, heads, None)


def test_no_mask_is_built() -> None:
    """transformers skips masks for an attention that has no mask function; see the integration's docstring."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask

    from fcp_cli.integrations.transformers.preparation import NAME

    model = prepared()
    assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS
    arguments = {
        "config": model.config,
        "inputs_embeds": torch.zeros(1, 4, 32),
        "input_embeds": torch.zeros(1, 4, 32),  # its name before transformers 5
        "attention_mask": None,
        "cache": None,
        "past_key_values": None,  # its name before transformers 5.24
        "position_ids": torch.tensor([[0, 1, 0, 1]]),
        "cache_position": torch.arange(4),
    }
    known = inspect.signature(create_causal_mask).parameters
    assert create_causal_mask(**{name: value for name, value in arguments.items() if name in known}) is None
