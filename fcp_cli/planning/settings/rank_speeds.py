"""Parsing of rank speeds: a list, assignments such as `12=0.7`, or a file of either."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from fcp_cli.console import Assumptions
from fcp_cli.errors import UsageError
from fcp_cli.plan.metadata.plan_metadata import PlanMetadata
from fcp_cli.plan.pricing.speeds import QUICKEST, SLOWEST, Speeds, named_speeds, speeds_text
from fcp_cli.planning.settings.options import PlanRequest
from fcp_cli.reading.documents import parse_yaml, read_text

_NAME: Final = re.compile(r"(?:(?P<node>node)(?P<number>\d+)|(?P<first>\d+)(?:-(?P<last>\d+))?)$")
_FORMS: Final = (
    "one speed per rank, as 1,1,0.7,1; or the others' only, as 12=0.7,16-23=0.9,node3=0.8; or a file of them"
)

GivenSpeeds: TypeAlias = str | Sequence[float] | Mapping[Any, float]


def read_rank_speeds(given: GivenSpeeds, *, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [num_ranks] the rank speeds relative to the cost profile, or None if all are 1.

    Args:
        given: a list of one speed per rank, or a mapping from rank (`12`), rank range (`16-23`) or node (`node3`) to
            speed, with 1 for all others. Either may be comma-separated text or the name of a YAML or JSON file.
        num_ranks, ranks_per_node: of the job.

    Raises:
        UsageError: the speeds are malformed, out of range, or name ranks that the job does not have.
    """
    where = "--rank-speeds"
    if isinstance(given, str):
        given, where = _spoken(given, where)
    if isinstance(given, Mapping):
        speeds = [1.0] * num_ranks
        for name, speed in given.items():
            for rank in _ranks(str(name), num_ranks, ranks_per_node, where):
                speeds[rank] = _speed(speed, str(name), where)
    elif isinstance(given, Sequence):
        if len(given) != num_ranks:
            raise UsageError(f"{where} has {len(given)} speeds for {num_ranks} ranks; it takes {_FORMS}")
        speeds = [_speed(speed, str(rank), where) for rank, speed in enumerate(given)]
    else:
        raise UsageError(f"{where} is {given!r}; it takes {_FORMS}")
    return tuple(speeds) if any(speed != 1.0 for speed in speeds) else None


def requested_speeds(request: PlanRequest, num_ranks: int, ranks_per_node: int) -> Speeds | None:
    """Return [ranks] the speeds of `--rank-speeds`, or None if all are 1."""
    if request.rank_speeds is None:
        return None
    for flag, given in (("balance", request.encoder_balance != "ring"), ("ranks", request.encoder_ranks is not None)):
        if given:
            raise UsageError(f"--encoder-{flag} shares work as if ranks were equally fast; remove it or --rank-speeds")
    return read_rank_speeds(request.rank_speeds, num_ranks=num_ranks, ranks_per_node=ranks_per_node)


def speeds_of_run(
    request: PlanRequest,
    metadata: PlanMetadata,
    step: int,
    num_ranks: int,
    ranks_per_node: int,
    assumptions: Assumptions,
) -> Speeds | None:
    """Return the rank speeds of a continued run: as given, else the run's if the number of ranks is unchanged."""
    if request.rank_speeds is not None:
        return requested_speeds(request, num_ranks, ranks_per_node)
    before = metadata.speeds_at(step)
    if before is None or num_ranks != metadata.num_ranks:
        return None
    assumptions.assume("--rank-speeds", speeds_text(named_speeds(before) or {}), "the run's plan")
    return before


def speeds_words(given: GivenSpeeds | None) -> str | None:
    """Return speeds as the argument of `--rank-speeds`."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return ",".join(f"{name}={speed}" for name, speed in given.items()) or None
    return ",".join(str(speed) for speed in given)


def _spoken(text: str, where: str) -> tuple[Any, str]:
    """Return the parsed value of text or of the file that it names, and its location for messages."""
    words = [word.strip() for word in text.split(",")]
    if all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words), where
    # A single number is the list of a job with one rank; any other single word names a file.
    if len(words) > 1 or _is_number(text):
        return words, where
    document = parse_yaml(read_text(Path(text), error=UsageError, label=f"{where}: "), name=text, error=UsageError)
    return document, f"{where}: {text}"


def _ranks(name: str, num_ranks: int, ranks_per_node: int, where: str) -> Iterator[int]:
    found = _NAME.match(name)
    if found is None:
        raise UsageError(f"{where} names {name!r}; it takes {_FORMS}")
    if found["node"]:
        first, nodes = int(found["number"]) * ranks_per_node, -(-num_ranks // ranks_per_node)
        if first >= num_ranks:
            raise UsageError(f"{where} names node {found['number']} of a job of {nodes} nodes, which count from 0")
        yield from range(first, min(first + ranks_per_node, num_ranks))
        return
    first, last = int(found["first"]), int(found["last"] or found["first"])
    if last >= num_ranks or last < first:
        raise UsageError(f"{where} names {name} of a job of {num_ranks} ranks, which count from 0")
    yield from range(first, last + 1)


def _speed(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not _is_number(str(value)) or not SLOWEST <= float(value) <= QUICKEST:
        raise UsageError(
            f"{where} says {value} of {name}; a speed is a number from {SLOWEST:g} to {QUICKEST:g}, and 1 is as the "
            "cost profile says"
        )
    return float(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
