"""The house holds: no circles between files or folders at any level, and long functions are named with their reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from fcp_cli.runtime.injection.integrations import HOOKS
from tests.syntax import markers_of, nodes_of, tree_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fcp_cli"
INTEGRATIONS = PACKAGE / "integrations"
# The public names of `fcp_cli.runtime`, two of which are of an integration; imported on first use.
RUNTIME_FACE = PACKAGE / "runtime" / "__init__.py"
# Where the core names integrations, by text that is resolved on first use.
DOOR = PACKAGE / "runtime" / "injection" / "integrations.py"
MOST_LINES = 60
MOST_PARAMETERS = 8
MOST_FILES = 12  # of a folder
ONE_FILE_EACH = {"published", "commands"}  # strategies, verbs
MOST_OFFERED = 60  # names of the runtime that integrations may import; the goal is 48

# Function -> why it is longer, or takes more, than the rest of the house.
_TRITON = "a Triton kernel takes its pointers and strides one by one"
EXCEPTIONS: dict[str, str] = {
    "fcp_cli.planning.planner.__init__": "the options of fcp plan that a planner takes, as arguments",
    "fcp_cli.runtime.ring_attention.triton_rows._add_kernel": _TRITON,
    "fcp_cli.runtime.ring_attention.triton_rows._merge_kernel": _TRITON,
    "fcp_cli.runtime.ring_attention.triton_rows._take_kernel": _TRITON,
    "fcp_cli.runtime.ring_attention.compiled._attention_backward_operator": "an operator of a compiled graph takes its tensors one by one",
}


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


def test_the_core_never_imports_an_integration() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(INTEGRATIONS)
        and any(module.startswith("fcp_cli.integrations") for module in imported_modules(path))
    }
    assert found == {str(RUNTIME_FACE.relative_to(ROOT))}


def test_the_core_names_integrations_in_one_file() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(INTEGRATIONS)
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and re.fullmatch(r"fcp_cli\.integrations[\w.:]*", str(node.value))
    }
    assert found == {str(path.relative_to(ROOT)) for path in (DOOR, RUNTIME_FACE)}


def test_integrations_import_of_the_runtime_what_the_page_of_its_interface_lists() -> None:
    page = (ROOT / "docs" / "explanation" / "integrations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| `([\w.]+)` \| (.+) \|$", page, flags=re.MULTILINE)
    offered = {f"fcp_cli.runtime.{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)}
    imported = {
        module
        for path in INTEGRATIONS.rglob("*.py")
        for module in imported_modules(path)
        if module.startswith("fcp_cli.runtime.")
    }
    assert imported == offered
    assert len(offered) <= MOST_OFFERED


def test_no_folder_has_more_than_a_dozen_files_and_its_face() -> None:
    rooms = [room for room in PACKAGE.glob("**/") if room != PACKAGE and room.name not in ONE_FILE_EACH]
    folders = {str(room.relative_to(ROOT)): len(list(room.glob("[!_]*.py"))) for room in rooms}
    assert {folder: files for folder, files in folders.items() if files > MOST_FILES} == {}


def test_every_named_integration_exists() -> None:
    assert {target for target in HOOKS.values() if not _is_function(target)} == set()


def _is_function(target: str) -> bool:
    module, _, name = target.partition(":")
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    tree = tree_of(path)
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


# A folder that plugs in -> who may import it besides itself; its registry names it as text.
_PLUGGED_IN = {
    "fcp_cli.planning.published": (),
    "fcp_cli.report": ("fcp_cli.commands",),
}


@pytest.mark.parametrize("folder", _PLUGGED_IN)
def test_the_core_imports_nothing_that_plugs_in(folder: str) -> None:
    """Strategies are imported by their registry alone, and what draws tables and pages by commands alone."""
    allowed = (folder, *_PLUGGED_IN[folder])
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in PACKAGE.rglob("*.py")
        for module in imported_modules(path)
        if f"{module}.".startswith(f"{folder}.")
        and not ".".join(path.relative_to(ROOT).with_suffix("").parts).startswith(allowed)
    }
    assert found == set()


def test_compiled_functions_call_none_of_other_folders() -> None:
    """They would outlive a change there: they are kept until a source of their own folder or the formula changes.

    Below a folder `compiled`, their own folder is that one.
    """
    compiled = {path: set(imported_modules(path)) for path in PACKAGE.rglob("*.py")}
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path, modules in compiled.items()
        for module in modules
        if "fcp_cli.compiling.compile.kernel" in modules
        and not module.startswith(
            (
                ".".join(
                    next((one for one in path.parents if one.name == "compiled"), path.parent).relative_to(ROOT).parts
                ),
                "fcp_cli.compiling.compile",
                "fcp_cli.arrays",
                "fcp_cli.cost.formula",
            )
        )
    }
    assert found == set()


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


def test_functions_are_short_and_take_few_parameters_or_say_why_not() -> None:
    found = {name for name, lines, parameters in functions() if lines > MOST_LINES or parameters > MOST_PARAMETERS}
    assert found == set(EXCEPTIONS)


def functions() -> Iterator[tuple[str, int, int]]:
    """Name, lines and parameters (without self) of every function of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in nodes_of(path):
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
    "fcp_cli/plan/file/messages.py",
    "fcp_cli/plan/metadata/online.py",
    "fcp_cli/planning/online/serving.py",
    "fcp_cli/runtime/online/control.py",
    "fcp_cli/runtime/online/job_plan.py",
    "fcp_cli/runtime/online/source.py",
}


# What opens files by itself, without the bounds of `fcp_cli/reading/inputs.py`: the reason is the file's origin.
_OPENS_FILES_OF_ITS_OWN = {
    "fcp_cli/app.py": "the null device",
    "fcp_cli/commands/plan.py": "a plan just made",
    "fcp_cli/compiling/compile.py": "sources of this package",
    "fcp_cli/kinds.py": "4 KiB of a regular file",
    "fcp_cli/launching/console_scripts.py": "4 KiB of the user's own program, which runs next",
    "fcp_cli/launching/job/inject.py": "the user's own script, which runs next",
    "fcp_cli/launching/node.py": "the launch record that this process wrote",
    "fcp_cli/files.py": "temporary files of its own",
    "fcp_cli/parquet_writer.py": "a file just written",
    "fcp_cli/launching/supervision/failure.py": "logs of ranks",
    "fcp_cli/launching/supervision/msrun_ranks.py": "logs of ranks",
    "fcp_cli/machine/accelerators.py": "/sys and /proc",
    "fcp_cli/machine/facts.py": "/proc and the toolkit's version",
    "fcp_cli/machine/host.py": "/proc",
    "fcp_cli/machine/identity.py": "/proc",
    "fcp_cli/machine/processes.py": "/proc",
    "fcp_cli/manifest/tokenizing/hub.py": "the cache of the hub's client",
    "fcp_cli/manifest/tokens.py": "MegatronIndex.open",
    "fcp_cli/manifest/sources/detect.py": "MegatronIndex.open",
    "fcp_cli/manifest/sources/media/media_readers.py": "av.open, after require_input",
    "fcp_cli/profiling/workers/device.py": "/proc",
    "fcp_cli/profiling/measure.py": "logs and samples that its own worker writes",
    "fcp_cli/report/page/page.py": "a template of this package",
    "fcp_cli/runs/owner.py": "times of files, without a read",
    "fcp_cli/runs/ownership.py": "a folder, to lock it",
    "fcp_cli/integrations/megatron/measured.py": "a recorder",
    "fcp_cli/runtime/online/cursor.py": "a stream",
    "fcp_cli/runtime/session/session.py": "a recorder",
    "fcp_cli/selftest/findings.py": "what its own worker writes",
    "fcp_cli/selftest/run.py": "logs of its own worker",
    "fcp_cli/training/weights/checkpoint.py": "a file just written",
    "fcp_cli/training/data.py": "tokenizers of two checkpoints, which transformers reads too",
    "fcp_cli/training/pictures/decoding.py": "pictures and videos, of which the manifest has read the sizes",
    "fcp_cli/training/trainer.py": "a recorder",
    "fcp_cli/verification/processes.py": "what its own worker writes",
}


def test_files_of_others_are_opened_with_bounds() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "reading"
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and _opens_to_read(node)
    }
    assert found == set(_OPENS_FILES_OF_ITS_OWN)


def _opens_to_read(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    writes = any(isinstance(word, ast.Constant) and str(word.value)[:1] in ("w", "a", "x") for word in call.args)
    return name in ("read_text", "read_bytes", "open") and not writes and not _is_of_a_reader(call)


def _is_of_a_reader(call: ast.Call) -> bool:
    """Whether it is `read_text` of `fcp_cli/reading/`, which takes the class of its error."""
    return any(word.arg == "error" for word in call.keywords)


def test_no_text_is_taken_for_a_number_that_int_cannot_read() -> None:
    """`str.isdigit` takes superscripts, too; `str.isdecimal` does not. Of bytes both are the same."""
    found = {
        str(path.relative_to(ROOT))
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isnumeric")
    }
    assert found == {"fcp_cli/manifest/sources/shards.py", "fcp_cli/reading/tar.py"}


def test_what_others_wrote_is_read_in_one_folder_alone() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node.func)}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "reading" and str(path.relative_to(ROOT)) not in _OF_OURSELVES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _RAW_READERS
    }
    assert found == set()


# Function -> why it writes without `files.replaced_atomically`. Every other write must be into a path of its block.
_TEMPORARY = "into a folder that ends with the block"
_FOLDER = "into a hidden folder, which is renamed when it is whole"
_LOG = "the output of a process, which must be readable while it runs"
_GROWS = "a file that grows by lines or batches, whose reader drops a torn end"
WRITERS: dict[str, str] = {
    "fcp_cli.app.main": "nowhere, in place of a closed pipe",
    "fcp_cli.commands.plan._plan_to_stdout": _TEMPORARY,
    "fcp_cli.commands.selftest.selftest": _TEMPORARY,
    "fcp_cli.compiling.compile._folder_of_this_process": "a folder of its own for compiled code, which ends with the process",
    "fcp_cli.demo.training.make_checkpoint": "into the demo's own folder, which every demo makes anew",
    "fcp_cli.files._remove_leftovers": "opens a killed writer's file to see whether it is locked",
    "fcp_cli.files._create_temporary": "it is the atomic writer",
    "fcp_cli.files.flush_to_disk": "opens for reading",
    "fcp_cli.files.replaced_atomically": "it is the atomic writer",
    "fcp_cli.launching.checks.preflight._check_folder": "finds out whether a file can be written",
    "fcp_cli.launching.supervision.full_disk.is_full": "finds out whether a disk is full",
    "fcp_cli.launching.supervision.run.run_command": _LOG,
    "fcp_cli.manifest.tokenizing.tokenizer._quiet_panics": "nowhere",
    "fcp_cli.parquet_writer.parquet_writer": "into a path of the atomic writer, which its callers pass",
    "fcp_cli.planning.online.journal.append": _GROWS,
    "fcp_cli.profiling.workers.device.reset_peak": "a switch of the kernel",
    "fcp_cli.profiling.measure._run": _LOG,
    "fcp_cli.profiling.measure.run_measurement": _TEMPORARY,
    "fcp_cli.profiling.fits.samples.append_line": _GROWS,
    "fcp_cli.reading.inputs.head_of": "opens for reading alone",
    "fcp_cli.reading.inputs.__init__": _TEMPORARY,
    "fcp_cli.reading.inputs.open_unpacked": _TEMPORARY,
    "fcp_cli.runs.metrics.metrics.__init__": _GROWS,
    "fcp_cli.runs.owner._latest_sign": "opens for reading",
    "fcp_cli.runs.ownership._lock": "opens a folder",
    "fcp_cli.runs.ownership._take": "makes a file that must not exist, for one of several that race",
    "fcp_cli.runtime.injection.error_file.record_error": "torchrun's own file, written as the rank ends",
    "fcp_cli.selftest.findings._append": _GROWS,
    "fcp_cli.selftest.run.watch": _LOG,
    "fcp_cli.training.weights.adapters.export_adapters": _FOLDER,
    "fcp_cli.training.weights.checkpoint._write_file": _FOLDER,
    "fcp_cli.training.weights.origin.keep_origin": _FOLDER,
    "fcp_cli.training.weights.saving._name_checkpoint": _FOLDER,
    "fcp_cli.training.weights.weights.copy_companions": _FOLDER,
    "fcp_cli.training.weights.weights._write_config": _FOLDER,
    "fcp_cli.training.weights.weights._write_index": _FOLDER,
    "fcp_cli.training.weights.weights._write_share": _FOLDER,
    "fcp_cli.training.weights.weights.published_folder": _FOLDER,
    "fcp_cli.manifest.table.columns.new_column": _TEMPORARY,
    "fcp_cli.verification.processes.run_rank": _TEMPORARY,
    "fcp_cli.verification.verify.verify": _TEMPORARY,
}
_WRITING_METHODS = {
    *("write_text", "write_bytes", "ParquetWriter", "OSFile", "save_file", "save_pretrained", "tofile"),
    *("symlink_to", "hardlink_to", "rename", "renames", "copyfile", "copyfileobj", "copy2", "copytree", "move"),
    *("mkstemp", "mkdtemp", "TemporaryFile", "NamedTemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory"),
}
_WRITING_FUNCTIONS = {
    *("os.open", "os.replace", "os.link", "os.symlink", "shutil.copy", "pq.write_table"),
    *("np.save", "np.savez", "np.savetxt", "torch.save", "pickle.dump"),
}


def test_every_write_goes_through_the_one_atomic_writer() -> None:
    found = {
        function
        for path in sorted(PACKAGE.rglob("*.py"))
        for function, call, atomic in calls_of(path)
        if writes(call) and not atomic & {name.id for name in ast.walk(call) if isinstance(name, ast.Name)}
    }
    assert found == set(WRITERS)


def calls_of(path: Path) -> Iterator[tuple[str, ast.Call, set[str]]]:
    """Every call of a file, the innermost function around it, and the names that `replaced_atomically` gives there."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)

    def visit(node: ast.AST, function: str, atomic: set[str]) -> Iterator[tuple[str, ast.Call, set[str]]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function, atomic = node.name, set()
        if isinstance(node, ast.With):
            atomic = atomic | {
                item.optional_vars.id
                for item in node.items
                if isinstance(item.optional_vars, ast.Name)
                and ast.unparse(item.context_expr).startswith("replaced_atomically(")
            }
        if isinstance(node, ast.Call):
            yield f"{module}.{function}", node, atomic
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, atomic)

    yield from visit(tree_of(path), "", set())


def writes(call: ast.Call) -> bool:
    """Whether a call makes, opens for writing or renames a file."""
    function = ast.unparse(call.func)
    method = function.rpartition(".")[2]
    if method in ("open", "fdopen") and function != "os.open":
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        modes = [node.value for node in given if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return any(set(mode) <= set("rwaxbtU+") and set(mode) & set("wax+") for mode in modes)
    if method == "replace" and isinstance(call.func, ast.Attribute):  # texts take two arguments
        return len(call.args) == 1 and not call.keywords
    return function != "rename" and (method in _WRITING_METHODS or function in _WRITING_FUNCTIONS)


_ROW = re.compile(r"^\| `fcp_cli/(?P<folder>\w+)/` \|.*\| (?P<imports>[^|]*) \|$", re.MULTILINE)


def test_the_table_of_folders_names_each_folder_and_all_that_it_imports() -> None:
    table = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    listed = {row["folder"]: row["imports"] for row in _ROW.finditer(table)}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(listed) == folders
    missing = {
        (folder, imported)
        for folder, imports in listed.items()
        for imported in (_imported_folders(PACKAGE / folder) & folders) - {folder}
        if not imports.startswith("everything") and not re.search(rf"\b{imported}\b", re.sub(r"\(.*?\)", "", imports))
    }
    assert missing == set()


def _imported_folders(folder: Path) -> set[str]:
    """Return the folders of `fcp_cli` that its modules import from, inside functions and for types, too."""
    modules: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom):
                modules |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
    return {module.split(".")[1] for module in modules if module.startswith("fcp_cli.")}


def test_no_template_renders_outside_the_sandbox() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "sandbox.py"
        for node in nodes_of(path)
        if (name := getattr(node, "attr", getattr(node, "name", "")))
        in (
            "Environment",
            "SandboxedEnvironment",
            "NativeEnvironment",
            "apply_chat_template",
            "from_string",
        )
    }
    assert found == set()
