"""How tests run: properties with the same examples each time, and other processes only where a marker allows them.

`HYPOTHESIS_PROFILE=search python -m pytest ...` looks for examples that were not tried before; `quick` tries a fifth of them.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from fcp_cli.runtime.inject import after_import
from tests import messages
from tests.syntax import markers_of

settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("repeatable"), derandomize=False, max_examples=1000)
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=20)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell has what it starts in the background ignore Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors of tests are tiny, and threads of several processes on few cores spin while they wait for each other: a tiny model
# trained with two threads beside another worker takes five times the processor time that it takes with one.
after_import({"torch": lambda torch: torch.set_num_threads(1)})

# Ranks of jobs are forked by torchrun.
_FORKED_RANKS = str(Path(__file__).parent / "forked_ranks")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FORKED_RANKS, os.environ.get("PYTHONPATH")]))

# Modules of the standard library that ask a small program (`uname`, `ldconfig`) and wait for its answer.
_LOOK_UPS = ("platform", "ctypes.util")
_IMPLY_PROCESSES = ("distributed", "browser", "mindspore", "loops", "slurm", "stores")
_IMPLY_TORCH = ("torch", "hf", "megatron", "loops")
# Markers of tests that only run where `-m` names them: each has a target of its own in the Makefile.
_OPT_IN = ("cuda_build", "full", "loops", "slurm", "stores")

# Where hypothesis keeps the settings of a test; without it all examples are tried.
_ASKED = "_hypothesis_internal_use_settings"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Do once for all workers what each would do: compile the planner, for most of a minute, and import for jobs."""
    whole_suite = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if whole_suite and getattr(session.config.option, "numprocesses", None):
        from tests.forked_ranks import share_among_workers
        from tests.planning.examples import compile_planner

        if not session.config.option.markexpr:  # nothing is left out
            share_among_workers()  # it imports while the planner compiles
        compile_planner()


@pytest.hookimpl(tryfirst=True)  # before pytest itself deselects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Complete the markers: what starts a job starts processes, and what needs transformers needs PyTorch.

    Tests that nobody asked for by their marker are left out. Workers of pytest-xdist begin with the modules that start
    processes: those take longest.
    """
    _leave_to_full_tests(items)
    _leave_out_unasked(config, items)
    for item in items:
        for implied, names in (("processes", _IMPLY_PROCESSES), ("torch", _IMPLY_TORCH)):
            if any(item.get_closest_marker(name) for name in names):
                item.add_marker(implied)
    if os.environ.get("HYPOTHESIS_PROFILE") == "quick":
        _try_fewer_examples(items)
    if hasattr(config, "workerinput"):
        long = {item.path for item in items if item.get_closest_marker("processes")}
        items.sort(key=lambda item: item.path not in long)


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    """Divide the number of examples that a test itself asks for, which comes before a profile's."""
    for function in {item.function for item in items if isinstance(item, pytest.Function)}:
        if asked := getattr(function, _ASKED, None):
            setattr(function, _ASKED, settings(asked, max_examples=max(5, asked.max_examples // 5)))


def _leave_to_full_tests(items: list[pytest.Item]) -> None:
    """Mark all cases but some of a test with `examples(n)` as `full`: n that are spread evenly, the first and last too."""
    cases: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("examples") and isinstance(item, pytest.Function):
            cases.setdefault((item.path, item.function), []).append(item)
    for found in cases.values():
        marker = found[0].get_closest_marker("examples")
        assert marker is not None
        wanted = marker.args[0]
        kept = {round(k * (len(found) - 1) / max(wanted - 1, 1)) for k in range(wanted)}
        for place, item in enumerate(found):
            if place not in kept:
                item.add_marker("full")


def _leave_out_unasked(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = re.findall(r"\w+", config.option.markexpr)
    unasked = [name for name in _OPT_IN if name not in asked]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules out that need PyTorch as a whole, if such tests are: importing it takes longer than many tests."""
    unwanted = "not torch" in config.option.markexpr and collection_path.name.startswith("test_")
    return True if unwanted and not markers_of(collection_path).isdisjoint(_IMPLY_TORCH) else None


def pytest_collection_finish() -> None:
    """Keep the collector of garbage off thousands of test items, and off modules and the trees that tests parse.

    It would walk them again and again: a seventh of the processor time of tests that plan and parse.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a module that imports PyTorch although no test of it is wanted."""
    before = "torch" in sys.modules
    report = yield
    if "not torch" in collector.config.option.markexpr and "torch" in sys.modules and not before:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} imports torch at its top without `pytestmark = pytest.mark.torch`"
    return report


@pytest.fixture(autouse=True)
def _handlers_of_signals() -> Iterator[None]:
    """Take back what programs do that a test calls in this process: the trainer's `main` handles a rank's signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server of all workers fork torchrun and its ranks, where a test calls what starts them in this process."""
    from tests.forked_ranks import shared

    for name, value in shared().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def example_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps over eight ranks on two nodes."""
    from tests.report.runs import make_example_plan

    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    make_example_plan(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def _base_folder_of_messages(tmp_path_factory: pytest.TempPathFactory) -> None:
    messages.base_folder = tmp_path_factory.getbasetemp()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Refuse new processes to tests, and the fixtures that they set up, without the marker `processes`.

    In the three phases of a test alone: between them a refusal fails no test but ends the worker, in silence, and
    pytest-xdist then dies of the tests that it had left (its issue 1239).
    """
    with nullcontext() if item.get_closest_marker("processes") else _refused_processes():
        return (yield)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


@contextmanager
def _refused_processes() -> Iterator[None]:
    start = subprocess.Popen.__init__

    def start_look_ups_only(*args: Any, **kwargs: Any) -> None:
        if not any(frame.f_globals.get("__name__") in _LOOK_UPS for frame, _ in traceback.walk_stack(None)):
            pytest.fail("it starts a process: mark it with @pytest.mark.processes")
        start(*args, **kwargs)

    def refuse(_: BaseProcess) -> None:
        pytest.fail("it starts a process: mark it with @pytest.mark.processes")

    with (
        mock.patch.object(subprocess.Popen, "__init__", start_look_ups_only),
        mock.patch.object(BaseProcess, "start", refuse),
    ):
        yield
