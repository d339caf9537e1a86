"""Compiled kernels never outlive the code that they were compiled from, and need no folder to write to."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fcp_cli.util import compiling
from fcp_cli.util.compiling import is_kept, kernel, package_stamp, timed_loading
from tests.patience import PATIENCE_SECONDS, wait_until

ROOT = Path(__file__).parents[3]


def doubling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel in a module of its own, not compiled yet."""
    source = folder / "doubling.py"
    source.write_text("def double(x):\n    return 2 * x\n")
    return kernel(module_of(source, monkeypatch).double)


def module_of(source: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of a source file, imported anew."""
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # what numba keeps on disk names the module it belongs to
    spec.loader.exec_module(module)
    return module


def test_a_kernel_is_kept_until_any_source_of_its_own_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
        (folder / "called.py").write_text("x = 1\n")

    def edit(folder: Path) -> None:
        (folder / "called.py").write_text("x = 2\n")
        package_stamp.cache_clear()

    assert not is_kept(doubling(home, monkeypatch))
    assert doubling(home, monkeypatch)(4) == 8
    edit(elsewhere)
    again = doubling(home, monkeypatch)
    assert is_kept(again)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    edit(home)
    changed = doubling(home, monkeypatch)
    assert not is_kept(changed)
    assert changed(4) == 8
    assert sum(changed.stats.cache_hits.values()) == 0


def test_kernels_that_were_compiled_for_a_class_that_is_gone_are_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Before", "After"):
        (tmp_path / "renamed.py").write_text(
            f"from typing import NamedTuple\nclass {name}(NamedTuple):\n    x: int\ndef first(pair):\n    return pair.x\n"
        )
        package_stamp.cache_clear()
        module = module_of(tmp_path / "renamed.py", monkeypatch)
        first = kernel(module.first)
        assert not is_kept(first)
        assert first(getattr(module, name)(3)) == 3


def test_a_kernel_that_came_with_the_wheel_is_used_and_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = doubling(tmp_path, monkeypatch)
    assert made(4) == 8
    shipped = tmp_path / "shipped"
    Path(made.stats.cache_path).rename(shipped)
    assert not is_kept(doubling(tmp_path, monkeypatch))
    monkeypatch.setattr(compiling, "SHIPPED", shipped)
    again = doubling(tmp_path, monkeypatch)
    assert is_kept(again)
    with timed_loading() as loading_seconds:
        assert again(4) == 8
    assert loading_seconds() > 0
    assert (sum(again.stats.cache_hits.values()), sum(again.stats.cache_misses.values())) == (1, 0)


def test_machine_code_is_for_every_processor_of_the_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = doubling(tmp_path, monkeypatch)
    made(4)
    ((_signature, (_triple, processor, features), _code),) = made._cache._cache_file.local._load_index()
    assert (processor, features) == (os.environ.get("NUMBA_CPU_NAME", "generic"), "")


def test_the_stamp_of_a_package_is_that_of_every_source_in_it(tmp_path: Path) -> None:
    sources = tmp_path / "a.py", tmp_path / "b.py"
    for source in sources:
        source.write_text("x = 1\n")
    stamps = {package_stamp(tmp_path)}
    for source in sources:
        package_stamp.cache_clear()
        source.write_text("x = 2\n")
        stamps.add(package_stamp(tmp_path))
    assert len(stamps) == 3


def test_the_parts_of_the_planner_are_kept_under_one_stamp_since_they_call_each_other(tmp_path: Path) -> None:
    (tmp_path / "compiled" / "waves").mkdir(parents=True)
    (tmp_path / "compiled" / "core.py").write_text("x = 1\n")
    source = tmp_path / "compiled" / "waves" / "wave.py"
    source.write_text("def fill():\n    return 1\n")
    names: dict[str, Any] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    assert compiling.folder_of(names["fill"]) == tmp_path / "compiled"
    before = package_stamp(tmp_path / "compiled")
    source.write_text("x = 2\n")
    package_stamp.cache_clear()
    assert package_stamp(tmp_path / "compiled") != before


def test_a_change_of_the_cost_formula_changes_the_stamp_of_the_folders_that_compile_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formula = tmp_path / "cost" / "formula.py"
    formula.parent.mkdir()
    formula.write_text("x = 1\n")
    monkeypatch.setattr(compiling, "_FORMULA", formula)
    package_stamp.cache_clear()
    before = package_stamp(tmp_path)
    formula.write_text("x = 2\n")
    package_stamp.cache_clear()
    assert package_stamp(tmp_path) != before
    package_stamp.cache_clear()


def test_a_plain_function_is_not_kept() -> None:
    assert not is_kept(len)


@pytest.mark.full
@pytest.mark.processes
def test_the_wheel_brings_the_kernels_of_plans_and_of_their_pipelines(tmp_path: Path) -> None:
    for kept in ("", str(tmp_path / "kept")):  # the first compiles what no run before it did
        subprocess.run(
            [sys.executable, ROOT / "hatch_build.py", kept],
            check=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    kept_functions = {file.name.split("-")[0] for file in (tmp_path / "kept").glob("*.nbi")}
    assert {"timelines.schedule", "waves.planned", "microbatches.places", "kernel.longest_paths"} <= kept_functions


@pytest.mark.processes
def test_the_planner_compiles_where_nothing_can_be_written() -> None:
    program = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from fcp_cli.planning.compiled import single_rank_packs as room_tree\n"
        "import numpy as np\n"
        "tree = room_tree.make_tree(3)\n"
        "room_tree.set_room(tree, 2, 5.0, 7)\n"
        "assert room_tree.first_with_room(tree, 4.0, 7, 0) == 2\n"
        "assert room_tree.make_tree.stats.cache_path is None\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


_HASH_OF_PLANS = """
import hashlib
import numpy as np
from fcp_cli.planning.batches import BatchSettings, GlobalBatches
from fcp_cli.planning.fcp_solver import make_solver
from fcp_cli.planning.make_plan import plan_step
from tests.planning.examples import example_problem, long_tail

SYNCS = ("iteration", "microbatch")
digest = hashlib.sha256()
for sync, padding, steps in (*((sync, None, 3) for sync in SYNCS), *((sync, 4, 1) for sync in SYNCS)):
    settings = BatchSettings(global_batch_size=41, step_limit=steps)
    batches = GlobalBatches(long_tail(120), example_problem(sync, padding_multiple=padding), settings)
    solver = make_solver(batches)
    for batch in batches:
        step = plan_step(batch, batches.problem, solver)
        for values in (step.ranks, step.sequences, step.start_seconds, step.seconds, np.array(step.bound_seconds)):
            digest.update(values.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.processes
def test_compiled_and_interpreted_planners_make_the_same_plan_to_the_last_bit() -> None:
    def printed(**environment: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", _HASH_OF_PLANS],
            check=True,
            timeout=PATIENCE_SECONDS,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd()), **environment},
        )
        return run.stdout

    assert printed() == printed(NUMBA_DISABLE_JIT="1")


def test_a_process_waits_for_another_that_compiles_the_same_kernel_and_loads_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiling, "_told_to_wait", [])
    made = doubling(tmp_path, monkeypatch)
    made(4)
    cache = Path(made.stats.cache_path)
    (lock,) = cache.glob(".doubling.double-*.lock")
    assert lock.read_text() == str(os.getpid())
    index = next(cache.glob("*.nbi"))
    index.rename(tmp_path / "index")
    waiting = doubling(tmp_path, monkeypatch)
    with lock.open() as held, ThreadPoolExecutor() as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = pool.submit(waiting, 4)
        wait_until(lambda: bool(compiling._told_to_wait))
        assert not found.done()
        (tmp_path / "index").rename(index)
        fcntl.flock(held, fcntl.LOCK_UN)
        assert found.result(PATIENCE_SECONDS) == 8
    assert f"process {os.getpid()} compiles double for this machine" in " ".join(capsys.readouterr().err.split())
    assert (sum(waiting.stats.cache_hits.values()), sum(waiting.stats.cache_misses.values())) == (1, 0)


def test_a_process_that_is_stopped_while_it_compiles_holds_up_others_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_LONGEST_WAIT_SECONDS", 0.1)
    doubled = doubling(tmp_path, monkeypatch)
    Path(doubled.stats.cache_path).mkdir(exist_ok=True)
    with doubled._cache._cache_file.lock._path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert doubled(4) == 8


def test_calls_with_a_literal_and_with_a_variable_share_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "shares.py"
    source.write_text("def part(x, k):\n    return x + k\ndef both(x, k):\n    return part(x, 1) * part(x, k)\n")
    module = module_of(source, monkeypatch)
    module.part = kernel(module.part)
    assert kernel(module.both)(2, 3) == 15
    assert len(module.part._parts) == 1
