"""What is not installed is named with a line that installs it, whether or not an index has fcp itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcp_cli.util import plugins
from fcp_cli.util.plugins import pip_install, pip_install_module
from tests.pages import ROOT
from tests.patience import PATIENCE_SECONDS
from tests.runtime.plans import Row, write_plan


@pytest.fixture(autouse=True)
def requirements(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lines = [
        "numpy>=1.24",
        'torch>=2.7; extra == "hf"',
        'tokenizers>=0.20; extra == "hf"',
        "vl-convert-python>=1.7; extra == 'report'",
    ]
    monkeypatch.setattr(plugins, "requires", lambda name: lines)
    plugins._of_extras.cache_clear()
    yield
    plugins._of_extras.cache_clear()  # later tests of this process ask for what is really installed


def test_the_packages_of_an_extra_are_named_by_themselves() -> None:
    assert pip_install("hf") == "pip install 'torch>=2.7' 'tokenizers>=0.20'"
    assert pip_install("hf", "tokenizers") == "pip install 'tokenizers>=0.20'"
    assert pip_install("npu") == "pip install 'fcp-cli[npu]'"  # nothing else is known


def test_a_module_is_installed_by_the_package_that_brings_it() -> None:
    assert pip_install_module("vl_convert") == "pip install 'vl-convert-python>=1.7'"
    assert pip_install_module("numpy") is None


@pytest.mark.processes
def test_a_command_without_its_library_ends_with_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; from unittest import mock\n"
        "sys.modules['torch'] = None\n"
        "from fcp_cli.cli import app\nfrom fcp_cli.util import plugins\n"
        "plugins.requires = lambda name: ['torch>=2.7; extra == \"torch\"']\n"
        "sys.argv = ['fcp', 'verify']\n"
        "app.main()\n"
    )

    def said() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert done.returncode == 1
        return done.stderr

    assert said().startswith("error: there is no plan plan.parquet;")  # before torch is imported, which takes seconds
    write_plan(tmp_path / "plan.parquet", [[Row([0], [5])]], num_ranks=1)
    assert said() == "error: torch is not installed here, and this command needs it; run: pip install 'torch>=2.7'\n"


@pytest.mark.processes
def test_a_profile_is_computed_without_any_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.environments", "plain", "--", "profile", "--analytic", "-o", "profile.yaml"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "profile.yaml").is_file()
