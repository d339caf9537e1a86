"""SkyPilot's and Ray's files: what a node runs is what `fcp launch` would start there, word for word."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fcp_cli.launching.target_options import _accelerator
from fcp_cli.launching.targets import TARGETS, job_files
from fcp_cli.util.console import Assumptions
from tests.launching.cluster_jobs import cluster_job
from tests.launching.jobs import plan_metadata
from tests.launching.runnable_jobs import runnable

ADDRESS = "10.0.0.7"


@pytest.mark.processes
def test_every_node_of_skypilot_runs_its_part(tmp_path: Path) -> None:
    job = runnable(tmp_path)
    (text,) = job_files(TARGETS["skypilot"], job).values()
    for rank in ("0", "1"):
        known = {
            "SKYPILOT_NODE_RANK": rank,
            "SKYPILOT_NODE_IPS": f"{ADDRESS}\n10.0.0.8",
            "PATH": "/usr/bin:/bin",
        }
        subprocess.run(["bash", "-c", yaml.safe_load(text)["run"]], env=known, check=True)
        check_heard(tmp_path, rank, job.arguments)


def check_heard(folder: Path, rank: str, arguments: tuple[str, ...]) -> None:
    heard = json.loads((folder / f"heard-{rank}").read_text())
    words = heard["arguments"]
    assert words[words.index("fcp_cli.training.train") + 1 :] == list(arguments)
    assert {f"--node-rank={rank}", f"--master-addr={ADDRESS}"} <= set(words)
    assert heard["plan"] == "/shared/my data/plan.parquet"
    assert heard["directory"] == str(folder)


_FAKE_RAY = '''
"""Ray's functions as the script calls them: tasks run at once, here, and their results are the references."""
import types, sys
cancelled = []
class Task:
    def __init__(self, function): self.function = function
    def options(self, *, scheduling_strategy, max_retries, resources, num_cpus, num_gpus=0):
        assert max_retries == 0
        return self
    def remote(self, *arguments): return (self.function, arguments)
def init(): pass
def remote(function): return Task(function)
def get(task): return task if task is None else task[0](*task[1])
def wait(tasks, num_returns): return tasks[:1], tasks[1:]
def cancel(task): print("cancelled", task[1][0])
class Group:
    def ready(self): return None
def placement_group(bundles, strategy):
    print(strategy, bundles)
    return Group()
class util: get_node_ip_address = staticmethod(lambda: "10.0.0.7")
sys.modules["ray.util"] = types.ModuleType("ray.util")
groups = sys.modules["ray.util.placement_group"] = types.ModuleType("ray.util.placement_group")
groups.placement_group = placement_group
places = sys.modules["ray.util.scheduling_strategies"] = types.ModuleType("ray.util.scheduling_strategies")
places.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: placement_group_bundle_index
__path__ = []
'''


@pytest.mark.processes
def test_ray_starts_one_command_on_each_of_different_nodes(tmp_path: Path) -> None:
    job = runnable(tmp_path)
    (text,) = job_files(TARGETS["ray"], job).values()
    (tmp_path / "ray_job.py").write_text(text)
    (tmp_path / "ray.py").write_text(_FAKE_RAY)
    run = [sys.executable, "ray_job.py"]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "STRICT_SPREAD [{'CPU': 1}, {'CPU': 1}]\n"
    for rank in ("0", "1"):
        check_heard(tmp_path, rank, job.arguments)
    failed = subprocess.run(
        run, cwd=tmp_path, env={"FAILS": "0", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[1:] == ["cancelled 1"]


def test_accelerators_are_named_as_skypilot_names_them() -> None:
    assumed = Assumptions()

    def named(target: str, cluster: str) -> str:
        profile = f"cluster: {cluster}\n"
        return _accelerator(
            replace(cluster_job(), target=target, metadata=plan_metadata(cost_profile=profile)), assumed
        )

    assert named("skypilot", "a100-8x8") == "A100-80GB"
    assert named("skypilot", "h100-16x8") == "H100"
    assert named("ray", "example-8x8") == ""
    assert assumed.warnings == []
    assert named("skypilot", "example-8x8") == ""
    assert assumed.warnings == ["the plan does not name the nodes' devices; start with: sky launch --gpus NAME:8"]
