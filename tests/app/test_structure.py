"""The house holds: no circles between files or folders at any level, and long functions are named with their reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fcp_cli"
MOST_LINES = 60
MOST_PARAMETERS = 8

# Function -> why it is longer, or takes more, than the rest of the house.
_TRITON = "a Triton kernel takes its pointers and strides one by one"
EXCEPTIONS: dict[str, str] = {
    "fcp_cli.runtime.kernels.triton_rows._add_kernel": _TRITON,
    "fcp_cli.runtime.kernels.triton_rows._merge_kernel": _TRITON,
    "fcp_cli.runtime.kernels.triton_rows._take_kernel": _TRITON,
    "fcp_cli.runtime.ring.forward": "a function of autograd takes its tensors and settings one by one",
    "fcp_cli.runtime.ring._attention_backward_operator": "an operator of a compiled graph takes its tensors one by one",
}


def folders() -> list[Path]:
    return sorted({path.parent for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(ROOT)))
def test_the_files_and_folders_of_a_folder_import_each_other_in_one_direction(folder: Path) -> None:
    """Imports inside functions and those for types alone count, too: they tie two places together all the same."""
    graph: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        if path == folder / "__init__.py":
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


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fcp_cli":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fcp_cli")


def test_compiled_functions_call_none_of_other_folders() -> None:
    """They would outlive a change there: they are kept until a source of their own folder changes."""
    compiled = {path: set(imported_modules(path)) for path in PACKAGE.rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path, modules in compiled.items()
        for module in modules
        if "fcp_cli.compiling.kernel" in modules
        and not module.startswith(
            (".".join(path.parent.relative_to(ROOT).parts), "fcp_cli.compiling", "fcp_cli.arrays")
        )
    }
    assert found == set()


def test_functions_are_short_and_take_few_parameters_or_say_why_not() -> None:
    found = {name for name, lines, parameters in functions() if lines > MOST_LINES or parameters > MOST_PARAMETERS}
    assert found == set(EXCEPTIONS)


def functions() -> Iterator[tuple[str, int, int]]:
    """Name, lines and parameters (without self) of every function of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                counted = [argument for argument in arguments if argument.arg not in ("self", "cls")]
                yield f"{module}.{node.name}", node.end_lineno - node.lineno + 1, len(counted)


# What reads foreign text and files by itself, instead of through `fcp_cli/reading/`.
_RAW_READERS = {
    "json.load",
    "json.loads",
    "yaml.load",
    "yaml.safe_load",
    "tarfile.open",
    "pq.ParquetFile",
    "pq.read_metadata",
}
_RAW_READERS |= {"pq.read_schema", "pq.read_table"}
# What processes of one fcp tell each other.
_OF_OURSELVES = {
    "fcp_cli/launching/supervision/guard.py",
    "fcp_cli/plan/messages.py",
    "fcp_cli/plan/online.py",
    "fcp_cli/planning/online/serving.py",
    "fcp_cli/runtime/online/source.py",
}


def test_what_others_wrote_is_read_in_one_folder_alone() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node.func)}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "reading" and str(path.relative_to(ROOT)) not in _OF_OURSELVES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _RAW_READERS
    }
    assert found == set()
