"""Removed options and commands, and options typed under the wrong command, with their replacements."""

from __future__ import annotations

from typing import Final

_SHARDS: Final = "count part I of N with --shard I/N in a job of any scheduler, and merge with 'fcp manifest merge'"
_TRACE: Final = "write --no-shuffle --global-batch-size N, for a trace in order with N rows a step"
_WHOLE: Final = "a plan is made whole, on as many cores as there are: 100 million sequences take two of them 20 minutes"
RETIRED: Final[dict[tuple[str, str], str]] = {
    ("compare", "--embeddings-cached"): "a frozen encoder's outputs are not cached",
    ("compare", "--step-column"): _TRACE,
    ("compare", "--stress"): "no effect it simulated changed the ranking of strategies",
    ("launch", "--cache-embeddings"): "a frozen encoder runs in every epoch",
    ("launch", "--planner"): "rank 0 plans for all nodes",
    ("launch", "--random-weights"): "write --weights random",
    ("launch", "--reorder-window"): "exchange sequences between batches in the stream itself",
    ("launch", "--warmup-ratio"): "write --warmup-steps X, which below 1 is a share of the schedule",
    ("manifest build", "--on"): _SHARDS,
    ("manifest build", "--sbatch-option"): _SHARDS,
    ("manifest build", "--shards"): _SHARDS,
    ("manifest build", "--text-field"): "write --column",
    ("plan", "--emit"): "no engine reads Megatron's proposed interface for planners",
    ("plan", "--embeddings-cached"): "a frozen encoder's outputs are not cached",
    ("plan", "--merge"): _WHOLE,
    ("plan", "--robust"): "it gained at most 2 %, if all rings of a node share one link, and lost as much otherwise",
    ("plan", "--shard"): _WHOLE,
    ("plan", "--step-column"): _TRACE,
    ("plan", "--tokenizer"): "count the tokens of texts with 'fcp manifest build --tokenizer', and plan the manifest",
    ("profile", "--share"): "send the profile itself; nothing reads the shared file",
    ("profile", "--hf-config"): "write --model, which takes a config.json",
}
"""Command and flag -> what to write instead, or why nothing replaces it."""
RETIRED_COMMANDS: Final = {
    "manifest synth": "'fcp manifest build --kind media' counts any JSON lines of sizes",
    "profile diff": "'fcp profile show' explains one profile after the other",
    "jobs": "'fcp watch' shows a run, and the scheduler's own commands (squeue, kubectl get) list and end its jobs",
    "trust": "name the config that you trust with --config",
    "trace": "'fcp report' draws plans and runs, 'fcp inspect --step' any step",
}
"""Command -> what to type instead."""


def replacement(command: str, flag: str = "") -> str | None:
    """Return the end of an "unknown command or option" message: the replacement, or None if it never existed.

    Args:
        command: words after `fcp`, e.g. "manifest build".
        flag: long flag, as typed; "" for the command itself.
    """
    instead = RETIRED.get((command, flag)) if flag else RETIRED_COMMANDS.get(command)
    return instead and f"{'' if flag else ' any more'}; {instead}"


def replacement_of_variable(name: str) -> str | None:
    """Return the same for an environment variable, e.g. FCP_LAUNCH_RANDOM_WEIGHTS."""
    for command, flag in RETIRED:
        if name == f"FCP {command} {flag[2:]}".upper().replace(" ", "_").replace("-", "_"):
            return replacement(command, flag)
    return None
