"""Generated files, read by the tools that they are for, where these are installed: `make test-targets` installs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcp_cli.launching.targets import TARGETS, job_files
from tests.launching.cluster_jobs import cluster_job
from tests.launching.runnable_jobs import runnable
from tests.launching.test_golden_files import generated

_HOW = "is not installed here; 'make test-targets' installs it in an environment of its own"


@pytest.mark.parametrize("case", ["trainjob", "trainjob-placed"])
def test_kubeflow_trainer_knows_every_field(case: str) -> None:
    """Its classes drop fields that they do not know, so whatever comes back is what it read."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api {_HOW}")
    (text,) = generated(case).values()
    kinds = {
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for document in yaml.safe_load_all(text):
        assert lost(document, kinds[document["kind"]].from_dict(document).to_dict()) == []


def lost(written: Any, read: Any, place: str = "") -> list[str]:
    """The places of a document whose value another does not have."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [one for key, value in written.items() for one in lost(value, read.get(key), f"{place}/{key}")]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [one for at, pair in enumerate(zip(written, read, strict=True)) for one in lost(*pair, f"{place}/{at}")]
    return [] if written == read else [place]


def test_kubeflow_trainer_drops_a_misspelt_field() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api {_HOW}")
    (text,) = job_files(TARGETS["trainjob"], cluster_job()).values()
    document = list(yaml.safe_load_all(text))[1]
    document["spec"]["runtimeReff"] = {}
    assert lost(document, models.TrainerV1alpha1TrainJob.from_dict(document).to_dict()) == ["/spec/runtimeReff"]


@pytest.mark.parametrize("case", ["skypilot", "skypilot-image"])
def test_skypilot_reads_the_task(case: str) -> None:
    sky = pytest.importorskip("sky", reason=f"skypilot {_HOW}")
    (text,) = generated(case).values()
    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    (resources,) = task.resources
    assert task.num_nodes == 2
    assert list(resources.accelerators.values()) == [8]
    with pytest.raises(ValueError, match="num_node"):
        sky.Task.from_yaml_config({**yaml.safe_load(text), "num_node": 2})


@pytest.mark.processes
def test_ray_runs_a_node_s_command_on_a_cluster_of_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason=f"ray {_HOW}")
    job = runnable(tmp_path, num_nodes=1)
    (text,) = job_files(TARGETS["ray"], job).values()
    (tmp_path / "ray_job.py").write_text(text)
    ended = subprocess.run([sys.executable, str(tmp_path / "ray_job.py")], timeout=300, check=False)
    assert ended.returncode == 0
    heard = json.loads((tmp_path / "heard-0").read_text())
    assert heard["arguments"][-2:] == list(job.arguments[-2:])
