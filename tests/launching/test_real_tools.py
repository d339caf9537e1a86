"""Generated files, read by the tools that they are for, where these are installed: `make test-targets` installs them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from fcp_cli.launching.targets.catalog import TARGETS, job_files
from tests.launching.cluster_jobs import cluster_job
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
