"""The example package of an integration: installed, it makes unmodified scripts of PyTorch-Ignite follow a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.planning_folder import fcp
from tests.forked_ranks import shared_by_scripts
from tests.planning.examples import PROFILE
from tests.runtime.launch import forked_script
from tests.training.small_runs import run_fcp

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "integration_package"
SCRIPT = Path(__file__).parent / "workers" / "ignite_script.py"
LENGTHS = (40, 3, 7, 25, 12, 5, 33, 9, 17, 4, 28, 6)  # of the script's data

pytestmark = [pytest.mark.hf, pytest.mark.processes, pytest.mark.distributed]
pytest.importorskip("ignite", reason="pytorch-ignite is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package, and a plan of 12 rows in steps of 4 on two ranks of 32 tokens."""
    folder = tmp_path_factory.mktemp("ignite")
    source = folder / "source"
    source.mkdir()
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *install, "--target", str(folder / "site"), str(source)], check=True, timeout=120)
    (folder / "profile.yaml").write_text(PROFILE, encoding="utf-8")
    (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS), encoding="utf-8")
    settings = ["--profile", "profile.yaml", "--ranks", "2", "--ranks-per-node", "2", "--tokens-per-rank", "32"]
    planned = fcp("plan", "lengths.txt", *settings, "--global-batch-size", "4", "--no-shuffle", cwd=folder)
    assert planned.returncode == 0, planned.stderr
    return folder


def launched(folder: Path, kind: str, *, batch_size: int = 4) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(folder / "site"), os.environ["PYTHONPATH"]))
    script = ["--plan", "plan.parquet", "--", str(SCRIPT), kind, str(batch_size)]
    return run_fcp("launch", *script, folder=folder, **{**shared_by_scripts(), "PYTHONPATH": path})


@pytest.mark.parametrize("kind", ["clears after", "supervised"])
def test_losses_and_weights_are_those_of_the_script_without_a_plan(folder: Path, kind: str) -> None:
    forked_script(SCRIPT, kind, "4", folder=folder)
    planned = launched(folder, kind)
    assert planned.returncode == 0, planned.stderr
    expected = torch.load(folder / "trained.alone")
    for rank in (0, 1):
        # transformers sums token losses in float32, whatever the weights are
        torch.testing.assert_close(torch.load(folder / f"trained.{rank}"), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "batch_size", "message"),
    [
        ("own loss", 4, "let the model compute its loss: the function has to pass it the batch's labels"),
        (
            "more data",
            4,
            "the data set has 13 rows, but the plan's manifest lengths.txt has 12; build the manifest from this "
            "data set with 'fcp manifest build', and plan again with 'fcp plan'",
        ),
        ("clears before", 2, "the loader's batch_size is 2, but the plan's batches have 4 rows"),
    ],
)
def test_a_script_that_cannot_follow_it_is_refused_in_one_line(
    folder: Path, kind: str, batch_size: int, message: str
) -> None:
    refused = launched(folder, kind, batch_size=batch_size)
    assert (refused.returncode, refused.stderr.splitlines()[-1].endswith(message)) == (1, True), refused.stderr
