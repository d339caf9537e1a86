"""`fcp check` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.planning_folder import EIGHT_RANKS, assert_one_error_line, fcp, write_dataset
from tests.plan.plans import Columns, rewritten


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_dataset(tmp_path_factory.mktemp("check"))
    assert fcp("plan", "dataset.parquet", *EIGHT_RANKS, cwd=folder).returncode == 0
    return folder


def spoil(columns: Columns) -> None:
    columns["seconds"] = [0.5 * seconds for seconds in columns["seconds"]]


@pytest.mark.parametrize("arguments", [(), ("plan.parquet",), ("plan.parquet", "--manifest", "dataset.parquet")])
def test_a_sound_plan_has_status_0(planned: Path, arguments: tuple[str, ...]) -> None:
    result = fcp("check", *arguments, cwd=planned)
    assert (result.returncode, result.stderr) == (0, "")
    assert "plan.parquet is sound: 4 steps, hash " in result.stdout


def test_findings_name_step_and_order_and_are_listed_as_json(planned: Path) -> None:
    sound = json.loads(fcp("check", "--json", cwd=planned).stdout)
    assert (sound["sound"], sound["findings"]) == (True, [])
    edited = rewritten(planned / "plan.parquet", edit=spoil)
    told, listed = (fcp("check", edited.name, *words, cwd=planned) for words in ((), ("--json",)))
    assert (told.returncode, listed.returncode) == (1, 1)
    assert "edited-plan.parquet: step 0: order 0: " in told.stdout
    document = json.loads(listed.stdout)
    assert document["sound"] is False
    assert document["findings"][0]["step"] == 0
    assert "its cost profile gives" in document["findings"][0]["message"]


@pytest.mark.parametrize("content", [None, "step,order\n0,0\n"], ids=["no file", "a text"])
def test_what_is_no_plan_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "plan.parquet").write_text(content)
    for verb in ("check", "inspect"):
        assert "plan.parquet" in assert_one_error_line(fcp(verb, cwd=tmp_path), 1)


def test_another_manifest_is_named(planned: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"length": [1, 2]}), tmp_path / "other.parquet")
    result = fcp("check", "--manifest", str(tmp_path / "other.parquet"), cwd=planned)
    assert result.returncode == 1
    assert "other.parquet is not the manifest dataset.parquet" in result.stdout
