"""Functions of the package that open files which others may have written, found in the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.syntax import tree_of

ROOT = Path(__file__).parents[2]
# Functions and methods by which a file is opened or its text read, by the end of their dotted names.
_OPENING = {
    *(
        "read_text",
        "read_bytes",
        "read_json",
        "read_object",
        "read_records",
        "open_parquet",
        "open_footer",
        "tar_files",
    ),
    *(
        "memory_map",
        "open_file",
        "open_stream",
        "open_csv",
        "read_csv",
        "safe_open",
        "memmap",
        "fromfile",
        "from_pretrained",
    ),
    *("from_file", "Image.open", "av.open", "imagesize.get", "ParquetFile", "read_metadata", "read_table", "gzip.open"),
}


def readers() -> dict[str, tuple[str, int]]:
    """Return FILE:FUNCTION -> the file and the line where the function begins, of all that open a file to read it."""
    return dict(sorted(set(_readers())))


def _readers() -> Iterator[tuple[str, tuple[str, int]]]:
    for path in sorted((ROOT / "fcp_cli").rglob("*.py")):
        for function, name in _functions(tree_of(path), ""):
            if any(_opens(node) for node in _own_nodes(function)):
                first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
                yield f"{path.relative_to(ROOT)}:{name}", (str(path), first)


def _functions(node: ast.AST, within: str) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{within}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield child, name
            yield from _functions(child, name)
        else:
            yield from _functions(child, within)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child
            yield from _own_nodes(child)


def _opens(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name.rpartition(".")[2] == "open" and not name.startswith(("os.", "webbrowser.")) and name not in ("av.open",):
        words = [*node.args, *(one.value for one in node.keywords if one.arg == "mode")]
        modes = [one.value for one in words if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        return not any(set(mode) & set("wax") for mode in modes)
    return any(name == one or name.endswith(f".{one}") for one in _OPENING)
