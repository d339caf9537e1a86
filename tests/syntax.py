"""Files of the package as Python parses them, once for all tests of a process: many look at each file."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def markers_of(module: Path) -> set[str]:
    """Names of the markers in a test module's `pytestmark`; found by text, as each worker looks at every module."""
    mark = re.search(r"^pytestmark = (\[.*?\]|[^\n]*)", module.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\bmark\.(\w+)", mark[1])) if mark else set()
