"""Arguments, paths and environment values arrive unchanged through every target, whatever characters they hold."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from fcp_cli.launching.job import Job
from fcp_cli.launching.targets import TARGETS, job_files
from tests.launching.cluster_jobs import FakeCluster, allocation, cluster_job
from tests.messages import raises

# Stands for the interpreter: writes down its arguments and one variable, each ended by NUL.
_PROBE = r"""
printf '%s\0' "$@" > "$OUT"
printf '%s\0' "$NOTE" >> "$OUT"
pwd >> "$OUT"
"""
WORDS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20), max_size=4)
AWKWARD = [
    "two words",
    "it's",
    '"quoted"',
    "$HOME `id` $(id)",
    "back\\slash",
    "new\nline\r\n",
    "",
    "#",
    "*",
    "~",
    "é😀",
    "!",
]


@dataclass(frozen=True)
class Probe:
    """A cluster whose interpreter only tells what it was given."""

    cluster: FakeCluster
    folder: Path

    def job(self, arguments: list[str], note: str) -> Job:
        here = self.folder / "it's a folder"
        here.mkdir(exist_ok=True)
        job = cluster_job(device="cpu")
        return replace(
            job,
            python=str(self.folder / "bin" / "probe"),
            arguments=tuple(arguments),
            environment={"NOTE": note},
            directory=here,
            values={**job.values, "setup": ()},
        )

    def heard(self) -> tuple[list[str], str, str]:
        """What the interpreter was given, the variable NOTE, and where it ran."""
        *words, note, here = (self.folder / "heard").read_bytes().decode().split("\0")
        return words, note, here

    def run(self, target: str, job: Job) -> subprocess.CompletedProcess[str]:
        for name, text in job_files(TARGETS[target], job).items():
            (self.folder / name).write_bytes(text.encode())
        start = {
            "scripts": ("bash", str(self.folder / "node.sh"), "0"),
            "slurm": ("bash", str(self.folder / "job.sbatch")),
        }[target]
        more = allocation(2) if target == "slurm" else {}
        return self.cluster.run(*start, OUT=str(self.folder / "heard"), **more)


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    cluster = FakeCluster(tmp_path)
    cluster.add("probe", _PROBE)
    cluster.add("srun", 'while [[ $1 == --* ]]; do shift; done; SLURM_NODEID=0 "$@"')  # one node is enough here
    return Probe(cluster, tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("target", ["scripts", "slurm"])
def test_every_argument_goes_through_the_scripts_and_a_real_bash(probe: Probe, target: str) -> None:
    @given(arguments=WORDS, note=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
    @example(arguments=AWKWARD, note="\n".join(AWKWARD))
    @settings(max_examples=15)
    def check(arguments: list[str], note: str) -> None:
        job = probe.job(arguments, note)
        result = probe.run(target, job)
        assert result.returncode == 0, result.stderr
        words, heard_note, here = probe.heard()
        assert words[words.index("fcp_cli.training.train") + 1 :] == arguments
        assert heard_note == note
        assert here.rstrip("\n") == str(job.directory)

    check()


@pytest.mark.lengthy
@pytest.mark.parametrize("target", ["trainjob", "jobset"])
@given(arguments=WORDS, note=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
@example(arguments=AWKWARD, note="\n".join(AWKWARD))
@settings(max_examples=20)
def test_every_argument_goes_through_a_manifest(target: str, arguments: list[str], note: str) -> None:
    job = replace(cluster_job(), arguments=tuple(arguments), environment={"NOTE": note})
    (text,) = job_files(TARGETS[target], job).values()
    for container in _containers(next(iter(yaml.safe_load_all(text)))):
        environment = {"JOB_COMPLETION_INDEX": "3"}
        words = [_kubernetes_expanded(word, environment) for word in container["command"]]
        assert words[words.index("fcp_cli.training.train") + 1 :] == arguments
        assert "--node-rank=3" in words
        (value,) = (entry["value"] for entry in container["env"] if entry["name"] == "NOTE")
        assert _kubernetes_expanded(value, environment) == note


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    (nodes,) = (spec["template"]["spec"] if "template" in spec else spec)["replicatedJobs"]
    containers: list[dict[str, Any]] = nodes["template"]["spec"]["template"]["spec"]["containers"]
    return containers


def _kubernetes_expanded(word: str, environment: dict[str, str]) -> str:
    """What a kubelet makes of a word: $$ is a dollar sign, $(NAME) a value, anything else stays."""

    def expand(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, word)


def test_a_word_that_is_not_text_is_one_line() -> None:
    job = replace(cluster_job(), arguments=("\udc80",))
    with raises(snapshot("UsageError: node.sh cannot hold '\\udc80': an argument or a path is not UTF-8 text")):
        job_files(TARGETS["scripts"], job)
