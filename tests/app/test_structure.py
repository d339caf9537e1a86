"""Directions in which the parts of fcp may import each other."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fcp_cli.runtime.inject import HOOKS
from tests.syntax import markers_of, nodes_of, tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fcp_cli"
INTEGRATIONS = PACKAGE / "integrations"
# The public names of `fcp_cli.runtime`, two of which belong to an integration; imported on first use.
RUNTIME_FACE = PACKAGE / "runtime" / "__init__.py"
# The only file of the core that names integrations, as text that is resolved on first use.
DOOR = PACKAGE / "runtime" / "inject.py"
# Rooms that plan on a laptop or a head node.
WITHOUT_TORCH = ("util", "manifest", "cost", "models", "memory", "plan", "planning", "runs", "report", "cli")


def folders() -> list[Path]:
    return sorted({path.parent for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_files_and_folders_of_a_folder_import_each_other_in_one_direction(folder: Path) -> None:
    """Imports inside functions and those for types alone count, too: they tie two places together all the same."""
    graph: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        if path in (folder / "__init__.py", RUNTIME_FACE):
            continue  # the folder's face hands names on
        own = child(folder, path)
        graph.setdefault(own, set()).update({one for one in imported_children(folder, path) if one != own})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


def child(folder: Path, path: Path) -> str:
    """The file or folder directly inside `folder` that holds `path`."""
    return path.relative_to(folder).parts[0].removesuffix(".py")


def imported_children(folder: Path, path: Path) -> Iterator[str]:
    for module in imported_modules(path):
        target = ROOT.joinpath(*module.split("."))
        while not (target.with_suffix(".py").is_file() or (target / "__init__.py").is_file()):
            target = target.parent  # a name of a module, not a module
        if target != folder and target.is_relative_to(folder):
            yield child(folder, target)


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Modules and names of the package that a file imports."""
    found: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fcp_cli":
            found += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found += (alias.name for alias in node.names if alias.name.split(".")[0] == "fcp_cli")
    return tuple(found)


def test_no_room_has_more_than_two_levels() -> None:
    assert [str(path) for path in PACKAGE.rglob("*.py") if len(path.relative_to(PACKAGE).parts) > 3] == []


def test_the_core_never_imports_an_integration() -> None:
    found = {
        path
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(INTEGRATIONS)
        and any(module.startswith("fcp_cli.integrations") for module in imported_modules(path))
    }
    assert found == {RUNTIME_FACE}


def test_the_core_names_integrations_in_one_file() -> None:
    found = {
        path
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(INTEGRATIONS)
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and re.fullmatch(r"fcp_cli\.integrations[\w.:]*", str(node.value))
    }
    assert found == {DOOR, RUNTIME_FACE}


def test_every_named_integration_exists() -> None:
    assert {target for target in HOOKS.values() if not _is_function(target)} == set()


def _is_function(target: str) -> bool:
    module, _, name = target.partition(":")
    tree = tree_of(ROOT.joinpath(*module.split(".")).with_suffix(".py"))
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_the_planner_imports_no_published_strategy() -> None:
    room = PACKAGE / "planning" / "strategies"
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(room)
        for module in imported_modules(path)
        if module.startswith("fcp_cli.planning.strategies.")
    }
    assert found == set()


def test_compiled_functions_call_none_outside_their_folder() -> None:
    """The cache of compiled code holds as long as the sources of its own folder and the formula do not change."""
    allowed = ("fcp_cli.util.compiling", "fcp_cli.util.arrays", "fcp_cli.cost.formula")
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in PACKAGE.rglob("*.py")
        if "fcp_cli.util.compiling.kernel" in imported_modules(path)
        for module in imported_modules(path)
        if not module.startswith((".".join(path.parent.relative_to(ROOT).parts), *allowed))
    }
    assert found == set()


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_planning_never_imports_torch(room: str) -> None:
    """`fcp plan` runs on a laptop or a head node. What runs inside a job is imported by the functions that start it."""
    ranks = {PACKAGE / "cli" / "paced_ranks.py"}
    found = {path: first_importer_of("torch", path) for path in (PACKAGE / room).rglob("*.py") if path not in ranks}
    assert {path: through for path, through in found.items() if through} == {}


@pytest.mark.lengthy
def test_test_modules_without_a_marker_of_pytorch_do_not_import_it() -> None:
    """`make fast` collects them, and importing PyTorch takes longer than most of its tests."""
    found: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        if markers_of(path).isdisjoint(("torch", "hf", "megatron", "loops")):
            through = first_importer_of("torch", path)
            found |= {str(path.relative_to(ROOT)): str(through.relative_to(ROOT))} if through else {}
    assert found == {}


def first_importer_of(package: str, path: Path) -> Path | None:
    """Return the file that imports the package as soon as `path` is imported, or None."""
    seen, pending = {path}, [path]
    while pending:
        file = pending.pop()
        if package in packages_at_the_top(file):
            return file
        pending += (new := files_at_the_top(file) - seen)
        seen |= new
    return None


@cache
def packages_at_the_top(path: Path) -> set[str]:
    return {name.split(".")[0] for name in names_at_the_top(path)}


@cache
def files_at_the_top(path: Path) -> set[Path]:
    """Files of this repository that run when `path` is imported, not counting those that they import."""
    own = {name for name in names_at_the_top(path) if name.startswith(("fcp_cli.", "tests.", "benchmarks."))}
    modules = {name.rsplit(".", depth)[0] for name in own for depth in range(name.count(".") + 1)}
    places = [ROOT.joinpath(*module.split(".")) for module in modules]
    files = [file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))]
    return {file for file in files if file.is_file()}


@cache
def names_at_the_top(path: Path) -> set[str]:
    """Modules and names that a file imports outside functions, but for those for types alone."""
    names: set[str] = set()
    statements = list(tree_of(path).body)
    for node in statements:
        if isinstance(node, (ast.Try, ast.With)):
            statements += node.body
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name for path in PACKAGE.rglob("*.py") for node in nodes_of(path) if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_no_template_renders_outside_the_sandbox() -> None:
    rendering = ("Environment", "SandboxedEnvironment", "NativeEnvironment", "apply_chat_template", "from_string")
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "util" / "templates.py"
        for node in nodes_of(path)
        if (name := getattr(node, "attr", getattr(node, "name", ""))) in rendering
    }
    assert found == set()
