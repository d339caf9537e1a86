"""Every field of the trainers' settings is followed, refused or irrelevant, in the table of the documentation."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import pytest
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from tests.runtime.launch import ROOT
from tests.runtime.test_trainer_refusals import CHANGES

pytestmark = pytest.mark.hf

_FREE_OF_CASES = {"router_aux_loss_coef", "loss_type"}  # refused by the model's settings; see test_trl.py


def table() -> dict[str, str]:
    """Return what the documentation says of each field."""
    page = (ROOT / "docs" / "how-to" / "hugging-face-trainers.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*) \| ([a-z].*) \|$", page.partition("### Every setting")[2].partition("## Masks")[0], re.M
    )
    found: dict[str, str] = {}
    for names, treatment in rows:
        outside = re.sub(r"\([^)]*\)", "", names)
        for name in re.findall(r"`(\w+)`", outside):
            assert name not in found, f"{name} is in two rows"
            found[name] = treatment
    return found


def require_all(kind: Any) -> None:
    missing = {field.name for field in fields(kind)} - table().keys()
    assert not missing, f"{kind.__name__} has new fields: say in the documentation what a plan does with {missing}"


@pytest.mark.parametrize("kind", [TrainingArguments, AcceleratorConfig])
def test_the_table_has_every_field(kind: Any) -> None:
    require_all(kind)


@pytest.mark.loops
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed; make test-loops installs it")
@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig"])
def test_the_table_has_every_field_of_trl(name: str) -> None:
    import trl

    require_all(getattr(trl, name))


def test_every_field_that_is_refused_has_a_case_of_its_refusal() -> None:
    cases = " ".join(f"{path} {message}" for path, _, message in CHANGES.values())
    refused = {name for name, treatment in table().items() if treatment.startswith("refused")} - _FREE_OF_CASES
    assert refused and {name for name in refused if name not in cases} == set()
