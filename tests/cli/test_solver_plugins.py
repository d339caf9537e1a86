"""Solvers of other packages: one that is installed works everywhere, and one that is broken breaks only itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fcp_cli.plan.file import PlanReader
from tests.cli.planning_folder import fcp, fcp_process
from tests.planning.examples import PROFILE
from tests.plugin_packages import install

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "solver_package"
PLAN = [
    "--profile",
    "profile.yaml",
    "--ranks",
    "4",
    "--ranks-per-node",
    "4",
    "--tokens-per-rank",
    "4096",
    "--global-batch-size",
    "16",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A folder with a small data set."""
    lengths = "".join(f"{200 * (k % 50) + 1}\n" for k in range(32))
    (tmp_path / "profile.yaml").write_text(PROFILE, encoding="utf-8")
    (tmp_path / "lengths.txt").write_text(lengths, encoding="utf-8")
    return tmp_path


def test_the_example_package_fits_a_page() -> None:
    files = [path for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml") and path.name[:5] != "test_"]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 60


@pytest.mark.processes
def test_the_tests_of_the_example_package_pass_and_need_only_what_is_public(tmp_path: Path) -> None:
    for path in EXAMPLE.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1].startswith("2 passed"), done.stdout + done.stderr
    imported = re.findall(r"^from (fcp_cli[\w.]*)", (tmp_path / "test_longest_first.py").read_text("utf-8"), re.M)
    assert imported == ["fcp_cli", "fcp_cli.extend"]


@pytest.mark.processes
def test_an_installed_package_adds_a_solver_that_lists_compares_plans_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    source.mkdir()
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([sys.executable, *install, "--target", str(site), str(source)], check=True, timeout=120)

    listed = fcp_process("list", "solvers", cwd=tmp_path, PYTHONPATH=f"{site}{os.pathsep}{ROOT}")
    assert listed.stdout.splitlines()[-1] == "longest-first (of the package fcp-longest-first 1.0)", listed.stderr
    monkeypatch.syspath_prepend(site)

    def run(*words: str) -> str:
        result = fcp(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout

    compared = json.loads(run("compare", "lengths.txt", *PLAN, "--solvers", "static,longest-first", "--json"))
    (example,) = (one for one in compared["strategies"] if one["name"] == "longest-first")
    assert example["refusal"] is None
    for sync in ("microbatch", "iteration"):
        run("plan", "lengths.txt", *PLAN, "--solver", "longest-first", "--sync", sync, "-o", f"{sync}.parquet")
        run("check", f"{sync}.parquet", "--manifest", "lengths.txt")
    metadata = PlanReader(tmp_path / "iteration.parquet").metadata
    assert (metadata.solver, metadata.solver_options) == ("longest-first", {"package": "fcp-longest-first 1.0"})


def solver(body: str, *, options: str = "{}") -> str:
    """Return a module whose solver answers by this expression."""
    return (
        "from fcp_cli.extend import place_waves\n"
        f"class Odd:\n    name, options = 'odd', {options}\n    def __init__(self, problem): self.problem = problem\n"
        f"    def assign(self, batch): return {body}\n"
        "def make(batches): return Odd(batches.problem)\n"
    )


IMPORT, MADE = "cannot be imported from odd:make: ", "made no solver with odd:make: "
# The fault of a package -> its module, and the start of the message.
BROKEN = {
    "a missing library": ("import no_such_library\n", f"{IMPORT}ModuleNotFoundError: No module named"),
    "no such factory": ("", f"{IMPORT}AttributeError: module 'odd' has no attribute 'make'"),
    "an end of the process": ("raise SystemExit(3)\n", f"{IMPORT}SystemExit: 3"),
    "no function": ("make = 3\n", f"{MADE}TypeError: 'int' object is not callable"),
    "other arguments": ("def make(): ...\n", f"{MADE}TypeError: make() takes 0 positional arguments"),
    "no solver": ("make = lambda batches: batches\n", f"{MADE}AttributeError: '"),
    "options that JSON cannot hold": (solver("None", options="{'x': {1}}"), f"{MADE}TypeError: Object of type set"),
    "a class that cannot be copied": (
        solver("None") + "def make(batches): return type('Local', (Odd,), {})(batches.problem)\n",
        f"{MADE}PicklingError: ",
    ),
    "an error": (solver("1 / 0"), "failed in step 0: ZeroDivisionError: division by zero (odd.py:5); "),
    "an error in code that it calls": (
        solver("place_waves([[(0, batch)]], 3)"),
        "failed in step 0: AttributeError: 'int' object has no attribute 'num_ranks' (odd.py:5); ",
    ),
    "an error without a word": (
        solver("check()") + "def check():\n    assert False\n",
        "failed in step 0: AssertionError (odd.py:8); ",
    ),
    "an end of the process in a step": (solver("exit(3)"), "failed in step 0: SystemExit: 3 (odd.py:5); "),
    "an end of the process in the factory": ("def make(batches): exit(3)\n", f"{MADE}SystemExit: 3 (odd.py:1); "),
    "no answer": (solver("None"), "failed in step 0: AttributeError: 'NoneType' object"),
    "a plan without all sequences": (
        solver("place_waves([[(1, [0])]], self.problem)"),
        "planned step 0 against the rules: member 1 (manifest row ",
    ),
    "a group with a rank twice": (
        solver("doubled(place_waves([[(2, list(range(len(batch.rows))))]], self.problem))")
        + "def doubled(found):\n    found.ranks[1] = found.ranks[0]\n    return found\n",
        "planned step 0 against the rules: order 0: its ranks do not ascend: 0 follows 0; ",
    ),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_solver_is_one_line_that_names_its_package(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, fault = BROKEN[case]
    install(tmp_path, monkeypatch, "odd", text=module, group="fcp.solvers", entries={"odd": "odd:make"})
    result = fcp("plan", "lengths.txt", *PLAN, "--solver", "odd", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error:"))
    assert line.startswith(f"error: solver odd of the package odd 2.5 {fault}"), line
    assert line.endswith("; fix or update that package, or remove it with 'pip uninstall odd'")
    assert not (tmp_path / "plan.parquet").exists()
    compared = fcp("compare", "lengths.txt", *PLAN, "--solvers", "static,odd", "--json", cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    static, odd = json.loads(compared.stdout)["strategies"]
    assert static["refusal"] is None
    assert odd["refusal"].startswith(f"solver odd of the package odd 2.5 {fault}")
    assert fcp("plan", "lengths.txt", *PLAN, "--solver", "static", cwd=tmp_path).returncode == 0


def test_a_batch_that_a_solver_cannot_plan_is_its_own_line_and_below_a_comparison_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = solver("refuse(batch)") + (
        "from fcp_cli.extend import PlanError\n"
        "def refuse(batch): raise PlanError(f'{batch.lengths.max()} tokens are too many')\n"
    )
    install(tmp_path, monkeypatch, "odd", text=text, group="fcp.solvers", entries={"odd": "odd:make"})
    planned = fcp("plan", "lengths.txt", *PLAN, "--global-batch-size", "32", "--solver", "odd", cwd=tmp_path)
    assert planned.stderr.splitlines()[-1] == "error: 6201 tokens are too many"
    compared = fcp("compare", "lengths.txt", *PLAN, "--global-batch-size", "32", "--solvers", "odd", cwd=tmp_path)
    assert compared.stdout.splitlines()[-1] == "odd: 6201 tokens are too many"


def test_no_package_replaces_a_solver_of_fcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path, monkeypatch, "thief", text="raise SystemExit\n", group="fcp.solvers", entries={"static": "thief:make"}
    )
    listed = fcp("list", "solvers", cwd=tmp_path)
    assert "ignored: solver static of the package thief 2.5 has the name of fcp's own solver" in listed.stderr
    assert listed.stdout.split().count("static") == 1
    assert fcp("plan", "lengths.txt", *PLAN, "--solver", "static", cwd=tmp_path).returncode == 0


def test_a_name_of_two_packages_is_refused_and_other_names_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("first", "second"):
        install(tmp_path, monkeypatch, package, text="", group="fcp.solvers", entries={"same": f"{package}:make"})
    refused = fcp("plan", "lengths.txt", *PLAN, "--solver", "same", cwd=tmp_path)
    assert refused.returncode == 1
    assert "error: solver same of the package second 2.5 has the name of one in first 2.5; " in refused.stderr
    assert fcp("list", "solvers", cwd=tmp_path).returncode == 0


def test_a_package_with_damaged_metadata_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "sound", text="", group="fcp.solvers", entries={"sound": "sound:make"})
    install(tmp_path, monkeypatch, "torn", text="", group="fcp.solvers", entries={})
    (tmp_path / "site-torn" / "torn-2.5.dist-info" / "entry_points.txt").write_text(
        "[fcp.solvers]\nno equals sign\n", encoding="utf-8"
    )
    listed = fcp("list", "solvers", cwd=tmp_path)
    assert "sound" in listed.stdout.split()
    assert "ignored: the entry points of the package torn cannot be read" in listed.stderr


def test_an_option_of_fcp_is_refused_for_other_packages_solvers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "odd", text="", group="fcp.solvers", entries={"odd": "odd:make"})
    result = fcp("plan", "lengths.txt", *PLAN, "--solver", "odd", "--max-degree", "1", cwd=tmp_path)
    assert result.returncode == 2
    assert "--max-degree works with --solver fcp only, not with odd" in result.stderr
