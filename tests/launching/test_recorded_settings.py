"""The settings of a resumed run, out of a record that anybody may have written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.errors import RunError
from fcp_cli.launching.resolve import recorded_settings
from fcp_cli.training.settings import TrainSettings

RECORD = Path("runs/tiny-001/launch.json")


def test_every_setting_is_known() -> None:
    defaults = {field.name: field.default for field in fields(TrainSettings) if field.name not in ("plan", "run_dir")}
    training = {name: value for name, value in defaults.items() if name != "model"}
    training |= {"model": "qwen3-tiny", "weights": "/data/weights", "steps": 5, "lora": "rank=4"}
    assert recorded_settings(training, RECORD) == training


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"steps": "5"}, "steps is '5'; it must be a whole number"),
        ({"steps": True}, "steps is True; it must be a whole number"),
        ({"weights": 5}, "weights is 5; it must be a text"),
        ({"zero": "9"}, "zero is '9'; it must be one of"),
        ({"quiet": "no"}, "quiet is 'no'; it must be true or false"),
        ({"step": 5}, r"unknown key step; did you mean steps\?"),
    ],
)
def test_a_setting_of_another_kind_is_one_line(training: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=f"^{RECORD} is damaged: training: {message}"):
        recorded_settings(training, RECORD)
