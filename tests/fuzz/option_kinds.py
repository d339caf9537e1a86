"""Options of every command, set by fcp.yaml, by the environment or on the command line, to values hostile by their type."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any

import typer.main
import yaml

from fcp_cli.cli import app
from fcp_cli.util.options import Arg, Option
from tests.fuzz.kind import PLAN_OPTIONS, Input, Kind
from tests.fuzz.mutations import OPTION_WORDS

_PLAN = dict(zip(PLAN_OPTIONS[::2], PLAN_OPTIONS[1::2], strict=True))
_OUT = {"-o": "out.parquet"}
# Command -> its arguments and the options without which it would measure, start or wait; drawn ones replace them.
_SOUND: dict[str, tuple[str, Mapping[str, str | None]]] = {
    "plan": ("dataset.parquet", {**_PLAN, **_OUT, "--workers": "1"}),
    "compare": ("dataset.parquet", {**_PLAN, "--steps": "1", "--solvers": "fcp,static", "--json": None}),
    "launch": ("", {"--plan": "plan.parquet", "--model": "qwen3-tiny", "--synthetic": None, "--dry-run": None}),
    "check": ("plan.parquet", {}),
    "inspect": ("plan.parquet", {"--json": None}),
    "report": ("plan.parquet", {"-o": "out.html"}),
    "watch": ("runs/tiny-001", {"--once": None}),
    "verify": ("", {"--plan": "plan.parquet", "--steps": "1"}),
    "env": ("", {"--json": None}),
    "list": ("models", {}),
    "selftest": ("", {"--quick": None, "--ranks": "2", "-o": "out.json"}),
    "profile": ("", {"--analytic": None, "--model": "qwen3-8b", "--cluster": "example-8x8", "-o": "out.yaml"}),
    "profile show": ("profile.yaml", {"--json": None}),
    "profile fit": ("runs/tiny-001", {"--skip-steps": "0", "-o": "out.yaml"}),
    "manifest build": ("texts.jsonl", _OUT),
    "manifest merge": ("half-1.parquet half-2.parquet", _OUT),
    "manifest show": ("dataset.parquet", {"--json": None}),
}
UNDRAWN = {
    "demo": "it takes an output folder alone, and two minutes",
}
"""Commands without a kind, and why."""
_SHARES = {"plan": 6.0, "launch": 6.0, "compare": 1.5, "profile": 2.0, "manifest build": 2.0, "env": 0.05, "list": 0.1}
_SHARES |= {"selftest": 0.3, "verify": 0.2}
_AMOUNTS = {("plan", "epochs"), ("compare", "steps")}
"""Options that say how much work is wanted: a large number is none of a fault, and takes its time."""

_WHOLE: tuple[str, ...] = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "4096",
    "2147483648",
    "4611686018427387904",
    "9223372036854775807",
)
_WHOLE += (
    "9223372036854775808",
    "1.5",
    "1e3",
    "nan",
    "x",
    "",
    " 4 ",
    "\u0664",
    "1_0",
    "true",
    "null",
    "[1]",
    "{}",
    "1" * 5000,
)
_REAL: tuple[str, ...] = (
    "0",
    "-1",
    "0.5",
    "1",
    "1e-320",
    "1e308",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "x",
    "",
    "1e999",
    "null",
    "[0.5]",
)
_TEXTS: tuple[str, ...] = (
    "",
    "x",
    "-",
    "--",
    "a b",
    "a\nb",
    "\x1b[2J",
    "{{ 7 * 7 }}",
    "$(id)",
    "'; id; '",
    "é",
    "\u202e",
    "x" * 3000,
    "..",
    "/",
)
_TEXTS += (
    "null",
    "1",
    "true",
    "[]",
    "{}",
    "length",
    "eta",
    "step",
    "a=b",
    "a:/b",
    "*",
    "**/",
    "%s",
    "\u00b2",
    *OPTION_WORDS,
)
_PATHS: tuple[str, ...] = (
    "missing",
    ".",
    "",
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "loop",
    "broken",
    "pipe",
    "~",
    "x" * 300,
    "x/" * 3000,
)
_PATHS += (
    "dataset.parquet/x",
    "runs",
    "runs/tiny-001",
    "plan.parquet",
    "dataset.parquet",
    "profile.yaml",
    "model.yaml",
    "hf/tiny",
)
_PATHS += (
    "empty",
    "corpus",
    "texts.jsonl",
    "media.tar",
    "tokenizer.json",
    "a\nb",
    "\x1b[2J",
    "unreadable",
    "../x",
    "1",
    "[]",
    "{}",
)
_KNOWN = {
    "model": ("qwen3-tiny", "qwen3-8b", "qwen3-vl-8b", "deepseek-v3", "bamba-9b"),
    "cluster": ("example-8x8", "h100-8x8", "this-machine", "ascend910b-8x8"),
    "solver": ("fcp", "static", "flexsp", "megatron", "bytescale"),
    "solvers": ("all", "fcp,static", "fcp,fcp", ",", "fcp,x"),
    "rank_speeds": (
        "1=0.7",
        "node1=0.9",
        "0-3=0.5",
        "1=nan",
        "x=1",
        "1=",
        "=",
        "9=1",
        "1,1,1,1",
        "speeds.yaml",
        "1=1e-300",
    ),
    "lora": ("r=8", "r=8,alpha=16,target=q_proj", "r=0", "r=x", "r=8,r=8", "target=", "r=99999999999999999999"),
    "freeze": ("visual.*", "*", "[", "(", "a,b", ",", "a{1,99999}"),
    "mask": ("full", "prefix:x", "segments:", "pairs:length", "types:a", ":", "full:x"),
    "column": ("text", "id", "input_ids", "x"),
    "length_column": ("length", "eta", "x"),
    "processor": ("qwen3-vl", "internvl", "gemma3", "processors/qwen3-vl", "processors"),
    "tokenizer": ("bytes", "tokenizer.json", "chat", "gpt2", "a/b", "texts.jsonl"),
    "image": ("a", "a b", "registry/x:1", "x@sha256:0"),
    "mount": ("claim:/data", "claim", ":/x", "c:relative", "c:/a:b"),
    "steps": ("0:2", "1:", ":1", "2:1", "a:b", "-1:3", "0:99999999999999999999"),
    "encoder_ranks": ("auto", "1", "3", "4", "0", "-1", "x"),
    "target": (
        "local",
        "scripts",
        "slurm",
        "trainjob",
        "jobset",
        "skypilot",
        "ray",
        "kubernetes",
    ),
    "template": ("template.j2", "texts.jsonl"),
    "hostfile": ("hosts", "texts.jsonl"),
    "manifest": ("dataset.parquet", "spans.parquet", "pictures.parquet"),
    "plan": ("plan.parquet", "waves.parquet", "masked.parquet", "heads.parquet", "stages.parquet"),
    "profile": ("profile.yaml", "heads.yaml", "stages.yaml", "pictures.yaml"),
    "weights": ("weights", "hf/tiny", "chat"),
    "run_dir": ("runs/tiny-001", "runs/tiny-002", "runs/new"),
    "continue_from": ("runs/tiny-001", "runs/tiny-002"),
    "metrics": ("runs/tiny-001", "runs/tiny-001/metrics.jsonl"),
    "samples": ("samples.jsonl",),
    "from_samples": ("samples.jsonl",),
    "output": ("out", "out.json", "out/x", "-", "loop", "broken"),
    "runs": ("runs", "empty"),
    "why": ("0", "1"),
}
_SURROUNDINGS = {
    "COLUMNS": ("0", "-1", "1", "x", "", "99999999999", "20"),
    "LINES": ("0", "-1", "x"),
    "TERM": ("dumb", "", "x"),
    "NO_COLOR": ("", "1"),
    "FCP_CONFIG": ("missing", "given.yaml", "/dev/zero", "dataset.parquet", ""),
    "FCP_NO_CONFIG": ("1", "x", ""),
    "FCP_QUIET": ("1", "x"),
    "FCP_VERBOSE": ("2", "x", "-1", "9" * 400),
    "FCP_PLAN_RANK": ("4",),
    "HF_HOME": ("missing", "/dev/null", "hub"),
    "XDG_CACHE_HOME": ("missing",),
    "CUDA_VISIBLE_DEVICES": ("", "x", "-1", "0,99999"),
    "ASCEND_RT_VISIBLE_DEVICES": ("x",),
    "OMP_NUM_THREADS": ("x", "0", "-1", "9" * 30),
    "WORLD_SIZE": ("x", "-1"),
    "RANK": ("x",),
    "SLURM_JOB_ID": ("--all", "x"),
    "TZ": ("x", ":/dev/zero"),
    "LANG": ("C", "x"),
}


def write_odd_paths(folder: Path) -> None:
    """Write what a path may lead to: links in a loop, a broken one, an empty folder; no pipe, whose readers wait for a writer."""
    (folder / "loop").symlink_to("loop")
    (folder / "broken").symlink_to("nowhere/x")
    (folder / "empty").mkdir()


@cache
def commands() -> Mapping[str, tuple[Option, ...]]:
    """Return the options of every command, by its words."""
    return dict(_commands(typer.main.get_command(app.app), ()))


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, tuple[Option, ...]]]:
    for name, command in group.commands.items():
        if found := getattr(command.callback, "options", None):
            yield " ".join((*words, name)), found
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))


def _value(draw: random.Random, command: str, option: Option) -> str:
    """Return a text for an option: usual for its name, odd for its type, or odd for another's."""
    choices: tuple[str, ...] = _KNOWN.get(option.name, ()) + tuple(map(str, option.choices))
    if choices and draw.random() < 0.6:
        return draw.choice(choices)
    odd: tuple[str, ...] = {int: _WHOLE, float: _REAL, Path: _PATHS, bool: ("true", "false", "x", "", "2", "null")}.get(
        option.type, _TEXTS
    )
    if option.commas:
        odd = ("1,2,4", "4", "", ",", "0", "-1", "1,x", "1,,2", "9" * 30, "[1, 2]", "1:2", "{}")
    if (command, option.name) in _AMOUNTS:
        odd = ("0", "-1", "1", "2", "x", "", "1.5", "nan")
    return draw.choice(odd if draw.random() < 0.85 else _TEXTS)


def _words(command: str, without: set[str], extra: list[str]) -> tuple[str, ...]:
    arguments, sound = _SOUND[command]
    kept: list[str] = []
    for flag, value in sound.items():
        if flag not in without:
            kept += [flag] if value is None else [flag, value]
    return (*command.split(), *arguments.split(), *kept, *extra)


def _flags(option: Option) -> set[str]:
    return {option.flag, *getattr(option.mark, "flags", ())}


def _drawn(draw: random.Random, command: str) -> Input:
    options = [option for option in commands()[command] if not isinstance(option.mark, Arg)]
    chosen = draw.sample(options, min(len(options), draw.choice((1, 1, 2, 3))))
    values = {option.name: _value(draw, command, option) for option in chosen}
    # What measures, trains or starts is asked for no less: it is stopped where it begins to.
    held = {"--dry-run", "--analytic", "--once", "--quick"}
    without = set[str]().union(*map(_flags, chosen)) - (held if draw.random() < 0.9 or command == "watch" else set())
    environment, files, first, extra = {}, {}, [], []
    way = draw.randrange(3)
    if way == 0:
        document: Any = {}
        inner = document
        for word in command.split():
            inner = inner.setdefault(word, {})
        read = {name: _of_yaml(draw, value) for name, value in values.items()}
        inner.update({name.replace("_", draw.choice("-_")): value for name, value in read.items()})
        values |= {
            name: value for name, value in read.items() if isinstance(value, str)
        }  # YAML strips blanks and quotes
        files["drawn.yaml"] = yaml.safe_dump(document, allow_unicode=True).encode()
        first = ["--config", "drawn.yaml"]
    elif way == 1:
        prefix = f"FCP_{command.replace(' ', '_').upper()}_"
        environment = {prefix + name.upper(): value.replace("\0", "") for name, value in values.items()}
        if draw.random() < 0.3:
            name = draw.choice(list(_SURROUNDINGS))
            environment[name] = draw.choice(_SURROUNDINGS[name])
    else:
        for option in chosen:
            extra += [option.flag] if option.type is bool else [option.flag, values[option.name]]
    words = (*first, *_words(command, without, extra))
    return Input(
        name=" ".join([*(f"{k}={v!r}" for k, v in environment.items()), "fcp", *words, *map(str, files.values())])[
            :1500
        ],
        words=words,
        files=files,
        environment=environment,
        starts=True,
        writes=("runs/*", "*.samples.jsonl", *_named_outputs(values)),
    )


def _named_outputs(values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the patterns of what an option names to be written: whoever names a file there wants it replaced."""
    defaults = (
        "plan.parquet",
        "report.html",
        "lengths.parquet",
        "selftest.json",
        "sizes.jsonl",
        "profile.yaml",
    )
    named = [value for name, value in values.items() if name in ("output", "samples", "run_dir")]
    if "" in named:  # as if it were not given
        return defaults
    return tuple(pattern for value in map(escape, named) for pattern in (value, f"{value}/*", f"./{value}"))


def _of_yaml(draw: random.Random, value: str) -> Any:
    """Return a text as the value that YAML reads of it, more often than not."""
    if draw.random() < 0.3:
        return value
    try:
        return yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):
        return value


def _kind(command: str) -> Kind:
    words = _words(command, set(), [])
    return Kind(
        draw=lambda draw, _: _drawn(draw, command),
        sound=(Input(name=" ".join(words), words=words, starts=True),),
        share=_SHARES.get(command, 0.6),
    )


KINDS: dict[str, Kind] = {f"options of {command}": _kind(command) for command in _SOUND}
