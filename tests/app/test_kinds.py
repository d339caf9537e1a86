"""A file of another kind than a command reads is named for what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fcp_cli.cost.profile import load_cost_profile
from fcp_cli.errors import FcpError
from fcp_cli.manifest.read import read_manifest
from fcp_cli.plan.file import PlanReader
from fcp_cli.profiling.samples import read_samples
from fcp_cli.runs.metrics_reader import open_run, read_metrics
from fcp_cli.util.kinds import Kind, another_kind
from tests.planning.examples import PROFILE

READERS: dict[str, tuple[Callable[[Path], object], ...]] = {
    "lengths.parquet": (read_manifest,),
    "plan.parquet": (PlanReader,),
    "profile.yaml": (load_cost_profile,),
    "metrics.jsonl": (read_metrics, open_run),
    "profile.samples.jsonl": (read_samples,),
}
KINDS: dict[str, Kind] = {
    "lengths.parquet": "manifest",
    "plan.parquet": "plan",
    "profile.yaml": "cost profile",
    "metrics.jsonl": "metrics",
    "profile.samples.jsonl": "samples",
}
NOUNS = {
    "lengths.parquet": "a length manifest",
    "plan.parquet": "a plan",
    "profile.yaml": "a cost profile",
    "metrics.jsonl": "the metrics of a run",
    "profile.samples.jsonl": "the samples of a measurement",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind, no more than its format stated, and two that fcp did not write."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, kind in (("lengths.parquet", "fcp-manifest/1"), ("plan.parquet", "fcp-plan/1")):
        table = pa.table({"length": [1]}).replace_schema_metadata({"fcp": json.dumps({"format": kind})})
        pq.write_table(table, folder / name)
    pq.write_table(pa.table({"length": [1]}), folder / "foreign.parquet")
    (folder / "profile.yaml").write_text(PROFILE)
    (folder / "metrics.jsonl").write_text('{"kind":"run","format":"fcp-metrics/1"}\n')
    (folder / "profile.samples.jsonl").write_text('{"format": "fcp-samples/1", "model": "qwen3-tiny"}\n')
    (folder / "text.jsonl").write_text('{"width": 640, "format": "jpeg"}\n')
    return folder


@pytest.mark.parametrize("given", NOUNS)
@pytest.mark.parametrize("wanted", READERS)
def test_another_kind_of_fcp_is_named_with_what_to_do(folder: Path, wanted: str, given: str) -> None:
    if wanted == given:
        assert another_kind(folder / given, KINDS[wanted]) is None
        return
    for read in READERS[wanted]:
        with pytest.raises(FcpError, match=rf"{given} is {NOUNS[given]}, not {NOUNS[wanted]}; .*fcp ") as caught:
            read(folder / given)
        assert str(folder / given) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_fcp_did_not_write_is_named_where_only_its_form_is_known(folder: Path) -> None:
    assert another_kind(folder / "foreign.parquet", "metrics") == (
        f"{folder}/foreign.parquet is a Parquet file, not the metrics of a run; name the folder that 'fcp launch' "
        "printed"
    )
    assert another_kind(folder / "text.jsonl", "manifest") == (
        f"{folder}/text.jsonl is text, not a length manifest; 'fcp manifest build {folder}/text.jsonl' makes one of a "
        "data set"
    )


@pytest.mark.parametrize("name", ["foreign.parquet", "missing.parquet", "."])
def test_what_may_be_a_manifest_is_left_to_its_reader(folder: Path, name: str) -> None:
    assert another_kind(folder / name, "manifest") is None
