"""Targets of `fcp launch`: their files, and how a node learns its rank.

Third-party packages add targets as entry points in the group `fcp.targets` that load a `Target`.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import shutil
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fcp_cli import __version__
from fcp_cli.errors import FcpError, RunError, UsageError
from fcp_cli.launching import job
from fcp_cli.launching.commands import node_argv, node_environment
from fcp_cli.launching.job import LEAD_SECONDS, Job, variable
from fcp_cli.launching.request import LOCAL
from fcp_cli.runs.run_dir import RunPaths
from fcp_cli.util.files import replaced_atomically, shipped
from fcp_cli.util.inputs import read_text
from fcp_cli.util.plugins import Registry
from fcp_cli.util.words import did_you_mean, has_control_characters

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment


HOSTFILE = "hostfile"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A scheduler or platform for which fcp writes job files.

    Attributes:
        template: template of the file that starts a node's ranks, without suffix; `--template` replaces it.
        others: further files, rendered with the same values.
        folder: folder of the templates NAME.j2; None: the shipped ones.
        options: fields of `ClusterOptions` that it supports, besides `template`, `python` and `env`.
        is_container: whether ranks run in a container, which requires `image`.
        node: returns how a node of a job learns its rank and node 0's address.
        ready: quotes a word for the template; see `template_values`.
        start: returns the command that starts the job, given the folder of its files.
    """

    template: str
    others: tuple[str, ...] = ()
    folder: Path | None = None
    options: frozenset[str] = frozenset()
    is_container: bool = False
    node: Callable[[Job], NodeFacts]
    ready: Callable[[str], str] = job.quote
    start: Callable[[Path], tuple[str, ...]]


_OF_CONTAINERS = frozenset({"image", "mount", "max_restarts"})


def _node(rank: str, first_node: str, *, log: str = "{name}") -> Callable[[Job], NodeFacts]:
    """Return a function for `Target.node`: rank from the variable `rank`, and node 0's address.

    {name} in the address and the log name is replaced by the job's name.
    """

    def node(job: Job) -> NodeFacts:
        name, number = job_name(job.run_dir.name), variable(rank)
        log_name = f"{log.format(name=name)}-node{number}"
        return NodeFacts(rank=number, master_addr=first_node.format(name=name), log_name=log_name)

    return node


def _on_kubernetes(template: str) -> Target:
    """Return a target with a single file that makes a JobSet, which gives every pod a name: set-job-number-index.set"""
    return Target(
        template=template,
        options=_OF_CONTAINERS,
        is_container=True,
        node=_node("JOB_COMPLETION_INDEX", "{name}-node-0-0.{name}"),
        ready=job.kubernetes_word,
        start=lambda folder: ("kubectl", "apply", "-f", str(folder / template)),
    )


TARGETS = {
    "scripts": Target(
        template="node.sh",
        others=("start.sh", HOSTFILE),
        options=frozenset({"hostfile", "setup"}),
        node=_node("NODE_RANK", variable("MASTER_ADDR"), log=variable("STARTED")),
        start=lambda folder: ("bash", str(folder / "start.sh")),
    ),
    "slurm": Target(
        template="job.sbatch",
        options=frozenset({"sbatch_option", "srun_option", "setup", "image", "mount", "max_restarts"}),
        node=_node("SLURM_NODEID", variable("MASTER_ADDR"), log=variable("STARTED")),
        start=lambda folder: ("sbatch", str(folder / "job.sbatch")),
    ),
    "trainjob": _on_kubernetes("trainjob.yaml"),  # its JobSet has its name
    "skypilot": Target(
        template="skypilot.yaml",
        options=frozenset({"image", "setup", "max_restarts"}),
        node=_node("SKYPILOT_NODE_RANK", variable("MASTER_ADDR")),
        start=lambda folder: ("sky", "launch", str(folder / "skypilot.yaml")),
    ),
    "ray": Target(
        template="ray_job.py",
        node=_node("NODE_RANK", variable("MASTER_ADDR")),
        ready=job.kubernetes_word,  # the script replaces $(NAME) like Kubernetes
        start=lambda folder: ("ray", "job", "submit", "--", "python", str(folder / "ray_job.py")),
    ),
    "jobset": _on_kubernetes("jobset.yaml"),
}


ALSO_CALLED = {"kubernetes": "trainjob", "k8s": "trainjob"}
"""Aliases of targets."""
REGISTRY = Registry("fcp.targets", "target", "--target", (LOCAL, *TARGETS, *ALSO_CALLED))


def target_of(name: str) -> Target:
    """Return a target by name, except `LOCAL`."""
    if name in TARGETS:
        return TARGETS[name]
    plugin = REGISTRY.plugin(name)
    found = plugin.load()
    if not isinstance(found, Target):
        raise plugin.error(f"is no fcp_cli.extend.Target but {type(found).__name__} at {plugin.entry.value}")
    return found


def job_files(target: Target, job: Job, *, template: Path | None = None) -> dict[str, str]:
    """Return the texts of a job's files by name, beginning with the one that starts a node's ranks."""
    with _faults_named(job.target):
        values = template_values(job, target.node(job), target.ready)
    folder = target.folder or shipped("launchers")
    rendered = [(name, folder / f"{name}{SUFFIX}") for name in (target.template, *target.others)]
    if template is not None:
        rendered[0] = target.template, template
    files = {name: render(path, values) for name, path in rendered}
    for name, text in files.items():
        # Non-UTF-8 bytes in arguments or paths appear as lone surrogates.
        if lone := re.search("[\ud800-\udfff]+", text):
            raise UsageError(f"{name} cannot hold {lone[0]!a}: an argument or a path is not UTF-8 text")
    return files


def start_command(target: Target, job: Job, folder: Path) -> tuple[str, ...]:
    """Return the command that starts a job from the folder of its files."""
    with _faults_named(job.target):
        words = tuple(target.start(folder))
        shlex.join(words)  # raises unless all words are strings
        return words


@contextmanager
def _faults_named(name: str) -> Iterator[None]:
    """Convert an exception of a third-party target to a one-line error that names its package."""
    try:
        yield
    except FcpError:
        raise
    except (Exception, SystemExit) as error:
        if name in TARGETS:
            raise
        raise REGISTRY.plugin(name).error("failed", error) from error


# Renders the templates in `launchers/`, or custom ones; undefined names raise errors with a line number.

SUFFIX = ".j2"


def render(template: Path, values: Mapping[str, Any]) -> str:
    """Render a template, which may extend or include shipped templates and files in its folder.

    Args:
        template: path of a Jinja template in UTF-8.
        values: template variables by name.

    Raises:
        UsageError: any failure of the template, with its file and line.
    """
    import jinja2

    from fcp_cli.util.templates import MOST_TEMPLATE_BYTES, compiled

    text = read_text(template, error=UsageError, label="the template ", most_bytes=MOST_TEMPLATE_BYTES)
    environment = _sandbox(template)
    try:
        # Compiled under its own path, so that tracebacks contain its line numbers.
        rendered = compiled(environment, text, name=template.name, file=str(template)).render(values)
    except jinja2.TemplateSyntaxError as error:
        where = error.filename or str(template)
        raise UsageError(f"{where}, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateNotFound as error:
        raise UsageError(
            f"{_place(error, template)}: there is no template {error.name} to extend or include"
        ) from error
    except jinja2.UndefinedError as error:
        message = str(error.message)  # like: 'jb_name' is undefined
        hint = did_you_mean(message.split("'")[1] if "'" in message else "", values)
        hint = hint or "; docs/reference/templates.md lists the variables of a template"
        raise UsageError(f"{_place(error, template)}: {message}{hint}") from error
    except Exception as error:  # a template is a program, which may raise anything
        raise UsageError(f"{_place(error, template)}: {type(error).__name__}: {error}") from error
    _refuse_unknown_blocks(environment, template, text)
    return rendered


def _refuse_unknown_blocks(environment: ImmutableSandboxedEnvironment, template: Path, text: str) -> None:
    """Raise UsageError for blocks that no extended template has: jinja would drop them without a word."""
    from jinja2 import nodes

    parsed = environment.parse(text)
    unknown = [node.name for node in parsed.body if isinstance(node, nodes.Block)]
    known: list[str] = []
    while environment.loader and (base := parsed.find(nodes.Extends)) and isinstance(base.template, nodes.Const):
        parsed = environment.parse(environment.loader.get_source(environment, base.template.value)[0])
        known += [block.name for block in parsed.find_all(nodes.Block)]
    if known and (unknown := [name for name in unknown if name not in known]):
        raise UsageError(f"{template}: there is no block {unknown[0]} to replace, only {', '.join(sorted(known))}")


def _sandbox(template: Path) -> ImmutableSandboxedEnvironment:
    from jinja2 import FileSystemLoader, StrictUndefined

    from fcp_cli.util.templates import sandbox

    environment = sandbox(
        loader=FileSystemLoader((shipped("launchers"), template.parent)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # the files are programs and YAML, not web pages; `quote` and `yaml` escape for those
    )
    environment.filters |= {
        "quote": lambda value: shlex.quote(str(value)),
        "yaml": yaml_scalar,
        "block": yaml_block,
        "lines": command_lines,
    }
    return environment


def command_lines(words: Sequence[str], indent: int) -> str:
    """Format a command over several lines, one option with its value per line, continuations indented by `indent`.

    The words are already quoted.
    """
    lines = [words[0]]
    for before, word in itertools.pairwise(words):
        is_option = word.lstrip("'").startswith("-")
        # Keep an interpreter and its -m together, and an option and its value.
        runs_module = word == "-m" and lines[-1] == before
        if (is_option and not runs_module) or before == "--" or (before.startswith("-") and "=" in before):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return f" \\\n{' ' * indent}".join(lines)


def yaml_scalar(value: Any) -> str:
    """Format a string or number as a YAML scalar on one line; strings are always double-quoted."""
    style = '"' if isinstance(value, str) else None
    text: str = yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def yaml_block(text: str) -> str:
    """Format a multi-line text as a YAML literal block, or quoted if its characters require it."""
    dumped: str = yaml.safe_dump(text, default_style="|", width=math.inf, allow_unicode=True)
    return dumped.removesuffix("\n")


def _place(error: BaseException, template: Path) -> str:
    """Return the innermost template line that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    templates = {str(template.parent), str(shipped("launchers"))}
    found = [frame for frame in frames if str(Path(frame.filename).parent) in templates]
    return f"{found[-1].filename}, line {found[-1].lineno}" if found else str(template)


# Template variables of a job.

# Kubernetes names have at most 63 characters, and controllers append to them.
_LONGEST_NAME = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Values known only on the node, as text with `shell.variable` placeholders.

    Attributes:
        rank: node rank.
        master_addr: address of node 0.
        log_name: name of the log folder of this start and node, in the run's logs.
    """

    rank: str
    master_addr: str
    log_name: str


def template_values(job: Job, node: NodeFacts, ready: Callable[[str], str]) -> dict[str, Any]:
    """Return all template variables; see docs/reference/templates.md.

    Args:
        job: job for a cluster.
        node: rank and master address as placeholders.
        ready: quotes a word for the file: `shell.quote` or `shell.kubernetes_word`.
    """
    log_dir = job.paths.logs / node.log_name
    job = replace(job, master_addr=node.master_addr, log_dir=log_dir)
    command = [
        *(job.python, "-m", "fcp_cli.launching.node", f"--node-rank={node.rank}", f"--log-dir={log_dir}"),
        f"--grace={job.grace_seconds}",
        *(f"--interface-for={variable.name}" for variable in job.variables if not variable.value),
        *((f"--master-addr={node.master_addr}", f"--master-port={job.master_port}") if job.num_nodes > 1 else ()),
        *(() if job.output is None else (f"--record={RunPaths(run_dir=job.output).launch}",)),
        *("--", *node_argv(job, node_rank=node.rank)),
    ]
    return {
        "fcp_version": __version__,
        "job_name": job_name(job.run_dir.name),
        "launcher": job.launcher,
        "device": job.stack,
        "num_nodes": job.num_nodes,
        "processes_per_node": job.processes_per_node,
        "plan": str(job.plan.absolute()),
        "run_dir": str(job.run_dir),
        "directory": str(job.directory),
        "master_port": job.master_port,
        "stop_seconds": job.grace_seconds + LEAD_SECONDS,
        "environment": {name: ready(value) for name, value in node_environment(job).items()},
        "command": [ready(word) for word in command],
        "hosts": list(job.hosts),
        "output": _sbatch_output(job.output or job.paths.logs),
        **job.values,
        "srun_options": [ready(option) for option in job.values["srun_options"]],
    }


def _sbatch_output(folder: Path) -> str:
    """Return the log path for an #SBATCH directive, which must be a single line."""
    if has_control_characters(str(folder)):
        raise UsageError(f"{str(folder)!r} has a control character, which files of a job cannot hold; rename it")
    return shlex.quote(f"{str(folder).replace('%', '%%')}/slurm-%j.log")


def job_name(text: str) -> str:
    """Convert any text to a name valid in Slurm and Kubernetes."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LONGEST_NAME].strip("-")
    return name if name[:1].isalpha() else f"fcp-{name}".rstrip("-")


# Writes generated files, and submits jobs to Slurm.


def write_files(folder: Path, files: Mapping[str, str], *, overwrite: bool) -> None:
    """Write the files of a job to a folder, created if missing; existing files raise FcpError unless `overwrite`.

    All or none: a full disk leaves no job of which a part is missing.
    """
    for name in files:
        if not overwrite and (folder / name).exists():
            raise FcpError(f"{folder / name} is there already; remove it, or choose another folder")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FcpError(f"cannot make the folder {folder}: {error.strerror}") from error
    try:
        with ExitStack() as renames:  # each file is renamed after the last was written
            for name, text in files.items():
                renames.enter_context(replaced_atomically(folder / name)).write_text(text, encoding="utf-8")
    except FcpError:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


def require_sbatch() -> None:
    """Raise RunError if sbatch is not available here."""
    if shutil.which("sbatch") is None:
        raise RunError("there is no sbatch on this machine; write the script with -o DIR and submit it where Slurm is")


def submit(argv: Sequence[str]) -> str:
    """Run sbatch and return its output; raise RunError with its last line if it fails."""
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    if result.returncode:
        words = (result.stderr.strip() or result.stdout.strip() or f"status {result.returncode}").splitlines()
        raise RunError(f"sbatch did not take the job: {words[-1].removeprefix('sbatch: error: ')}")
    return result.stdout.strip()
