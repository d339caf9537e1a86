"""Families of Hugging Face decoders: trained as one process trains them, or refused in one line before a step."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fcp_cli.errors import RunError
from fcp_cli.integrations.transformers.preparation import _check_call, prepare
from fcp_cli.integrations.transformers.probe import probe
from fcp_cli.verification.emulation import (
    Meeting,
    Replayed,
    gradients_alone,
    gradients_on_rank,
    run_ranks,
    synthetic_tokens,
    thread_session,
)
from tests.pages import ROOT
from tests.runtime.families import FAMILIES, HYBRIDS, STATE_SPACES, Family
from tests.runtime.plans import Row, write_plan

pytestmark = pytest.mark.hf

ROWS = (Row([0, 1], [20, 5]), Row([0], [9]), Row([1], [6]))
_building = threading.Lock()  # weights are drawn from one random state


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    yield
    transformers.logging.set_verbosity(before)


def trained(family: Family, folder: Path) -> tuple[list[Replayed], Replayed]:
    """What two ranks compute, which are threads, and what one process does."""
    plan = write_plan(folder / "plan.parquet", [ROWS], num_ranks=2)
    fetch = synthetic_tokens(plan, 61)
    alone = family.build()

    def on_rank(meeting: Meeting, rank: int) -> Replayed:
        with _building:
            model = family.build()
            prepare(model)
        session = thread_session(plan, fetch, meeting, rank)
        return gradients_on_rank(
            session, model, lambda mb: mb.loss(model(input_ids=mb.input_ids, position_ids=mb.position_ids).logits)
        )

    ranks = run_ranks(2, on_rank)
    return ranks, gradients_alone(
        plan,
        fetch,
        alone,
        lambda ids, _: alone(input_ids=ids, use_cache=False).logits,
    )


def check(family: Family, folder: Path) -> None:
    if family.refused is not None:
        with pytest.raises(RunError, match=family.refused) as refused:
            prepare(family.build())
        assert "\n" not in str(refused.value)
        return
    ranks, alone = trained(family, folder)
    assert np.abs(alone.gradients).max() > 1e-3
    for rank in ranks:
        np.testing.assert_allclose(rank.gradients, alone.gradients, rtol=0, atol=family.tolerance)
        np.testing.assert_allclose(rank.losses, alone.losses, rtol=0, atol=family.tolerance)


@pytest.mark.full
@pytest.mark.processes  # one looks for a compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_trained_as_in_one_process_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    check(FAMILIES[name], tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_is_refused_for_what_it_computes(name: str) -> None:
    model = HYBRIDS[name].build()
    with pytest.raises(RunError, match="mixes tokens outside its attention"):
        probe(model, model.config, lambda *_: None)
    with pytest.raises(RunError):
        prepare(model)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATE_SPACES)
def test_a_model_without_attention_is_refused(name: str) -> None:
    with pytest.raises(RunError):
        prepare(STATE_SPACES[name].build())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("deepseek_v3, dense", id="latent attention whose values have a size of their own"),
        pytest.param("gpt_oss", id="windows and sinks"),
        pytest.param("llama4_text, tuned", id="queries scaled by counted positions"),
        pytest.param("llama, dynamic", id="rotations that grow with counted positions"),
    ],
)
def test_examples_of_families_are_trained_as_in_one_process_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    check(FAMILIES[name], tmp_path)


def test_the_page_has_every_type_of_its_release_once_and_none_that_is_wrong() -> None:
    page = (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    section = page.partition("## Every causal language model")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    types = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[3])]
    assert len(types) == len(set(types)) == sum(int(row.split("|")[2]) for row in rows)
    assert not any(row.startswith(("| wrong", "| fails")) for row in rows)
    if f"transformers {transformers.__version__} " in section:
        assert set(types) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("llama", "exact"), ("doge", "refused"), ("fuyu", "not tried"), ("gemma", "exact but for parts in fp32")],
)
def test_a_type_is_tried_by_its_config_class(kind: str, verdict: str) -> None:
    from tests.every_family import outcome

    assert outcome(kind).verdict == verdict


class TokenShift(nn.Module):
    """A norm that lets a little of the token before through, as no config says."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: Tensor) -> Tensor:
        shifted: Tensor = self.inner(hidden + self.share * hidden.roll(1, dims=1))
        return shifted


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-4), (torch.float32, 0.01), (torch.bfloat16, 0.3)])
def test_layers_that_mix_tokens_are_found_by_running_them(dtype: torch.dtype, share: float) -> None:
    model: Any = FAMILIES["llama"].build().to(dtype).train()
    before = model.config._attn_implementation
    probe(model, model.config, _check_call)
    assert model.training
    assert model.config._attn_implementation == before
    model.model.layers[1].input_layernorm = TokenShift(model.model.layers[1].input_layernorm, share)
    with pytest.raises(RunError, match=r"^the llama model mixes tokens outside its attention"):
        probe(model, model.config, _check_call)


def test_a_model_without_weights_yet_is_judged_by_its_modules() -> None:
    with torch.device("meta"):
        model: Any = FAMILIES["llama"].build()
    probe(model, model.config, _check_call)
    model.model.layers[1].mlp = nn.Sequential(nn.Conv1d(32, 32, 4))
    with pytest.raises(RunError, match=r"mixes tokens .*; its model.layers.1.mlp.0 is one$"):
        probe(model, model.config, _check_call)


@pytest.mark.full
@pytest.mark.processes  # one looks for a compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_without_weights_yet_is_judged_as_with_them(name: str) -> None:
    with torch.device("meta"):
        model = FAMILIES[name].build()
    try:
        prepare(model)
    except RunError as refused:
        said = str(refused)
        assert FAMILIES[name].refused is not None, said
        assert "\n" not in said
    else:
        assert FAMILIES[name].refused is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", None),
        ("llama4_text, tuned", "scales its queries by positions that it counts itself"),
        ("llama, dynamic", "asks for rope_type dynamic"),
    ],
)
def test_a_model_of_full_size_is_judged_before_its_weights_are_there(name: str, said: str | None) -> None:
    family = FAMILIES[name]
    large = {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 128_256,
             "max_position_embeddings": 8192}  # fmt: skip
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        model = replace(family, settings={**family.settings, **large}).build()
    torch.random.set_rng_state(before)
    if said is None:
        prepare(model)
    else:
        with pytest.raises(RunError, match=said):
            prepare(model)
    assert torch.random.get_rng_state().equal(before)
    assert model.get_input_embeddings().weight.is_meta


@pytest.mark.parametrize("most", [16, 64, 2048])
@pytest.mark.parametrize("name", ["llama, dynamic", "phi3, longrope"])
def test_a_rotation_that_grows_is_refused_by_its_name_however_short_the_first_training_was(
    name: str, most: int
) -> None:
    family = FAMILIES[name]
    model = replace(family, settings={**family.settings, "max_position_embeddings": most}).build()
    with pytest.raises(RunError, match=family.refused):
        prepare(model)


def test_a_prepared_model_evaluates_and_generates_outside_the_plan(tmp_path: Path) -> None:
    from fcp_cli.runtime.session import outside

    own, model = FAMILIES["llama"].build(), FAMILIES["llama"].build()
    prepare(model)
    ids = torch.arange(12).reshape(2, 6) + 3
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with torch.no_grad():
        expected = own(input_ids=ids, attention_mask=mask, labels=ids)
        written = own.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        with outside():
            found = model(input_ids=ids, attention_mask=mask, labels=ids)
            assert model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False).equal(written)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits[mask.bool()], expected.logits[mask.bool()])
    with pytest.raises(RunError, match=r"in 'with fcp_cli\.runtime\.outside\(\):'"):
        model(input_ids=ids, position_ids=ids)
