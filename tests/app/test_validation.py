"""Every mistake in a mapping is one line with the path of its key, the value, and what is allowed."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pytest
from inline_snapshot import snapshot

from fcp_cli.errors import FcpError, ProfileError
from fcp_cli.util.inputs import parse_yaml
from fcp_cli.util.validation import Count, NonEmptyText, NonNegative, Positive, Share, validated
from tests.messages import raises


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    power: Positive
    waste: Share = 0.0

    def __post_init__(self) -> None:
        if self.power > 1000 and not self.waste:
            raise ValueError("an engine of such power has waste")


@dataclass(frozen=True, kw_only=True, slots=True)
class Car:
    name: NonEmptyText
    fuel: Literal["petrol", "diesel"] = "petrol"
    doors: Annotated[int, msgspec.Meta(ge=2)] = 4
    seats: Count | None = None
    electric: bool = False
    engine: Engine
    spare: Engine | None = None
    others: tuple[Engine, ...] = ()
    named: Mapping[str, Engine] = field(default_factory=dict)
    price: NonNegative = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)


GOOD: dict[str, Any] = {"name": "a", "engine": {"power": 3}}


def test_a_sound_mapping_becomes_the_dataclass_with_its_defaults() -> None:
    car = validated({**GOOD, "others": [{"power": 1.5}]}, Car, where="car.yaml", error=ProfileError)
    assert car == Car(name="a", engine=Engine(power=3.0), others=(Engine(power=1.5),))
    assert isinstance(car.engine.power, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nam": "b"}, "unknown key nam; did you mean name?"),
        ({"engine": {"power": 1, "pover": 2}}, "unknown key engine.pover; did you mean engine.power?"),
        ({"engine": {"power": 1, "x": 2}}, "unknown key engine.x; known: power, waste"),
        ({"others": [{"power": 1}, {"speed": 2}]}, "unknown key others[1].speed; known: power, waste"),
        ({"named": {"b": {"speed": 2}}}, "unknown key named[...].speed; known: power, waste"),
        ({"engine": {"waste": 0.5}}, "engine.power is missing"),
        ({"others": [{}]}, "others[0].power is missing"),
        ({"name": ""}, "name is ''; it must be a text"),
        ({"name": None}, "name is None; it must be a text"),
        ({"fuel": "coal"}, "fuel is 'coal'; it must be one of diesel, petrol"),
        ({"doors": 1}, "doors is 1; it must be a whole number of at least 2"),
        ({"doors": 2.5}, "doors is 2.5; it must be a whole number of at least 2"),
        ({"doors": True}, "doors is True; it must be a whole number of at least 2"),
        ({"seats": 0}, "seats is 0; it must be a whole number of at least 1 or absent"),
        ({"electric": 1}, "electric is 1; it must be true or false"),
        ({"engine": 3}, "engine is 3; it must be a mapping"),
        ({"engine": {"power": 0.0}}, "engine.power is 0.0; it must be a positive number"),
        ({"engine": {"power": math.nan}}, "engine.power is nan; it must be a positive number"),
        ({"engine": {"power": math.inf}}, "engine.power is inf; it must be a positive number"),
        ({"engine": {"power": "3"}}, "engine.power is '3'; it must be a positive number"),
        ({"spare": {"power": 1, "waste": 2}}, "spare.waste is 2; it must be a share from 0 to 1"),
        ({"others": [{"power": 1}, {"power": -1}]}, "others[1].power is -1; it must be a positive number"),
        ({"named": {"b": {"power": -1}}}, "named[...].power must be a positive number"),
        ({"engine": {"power": 2000}}, "engine: an engine of such power has waste"),
        ({"others": {}}, "others is {}; it must be a list"),
        ({"notes": []}, "notes is []; it must be a mapping"),
    ],
)
def test_a_mistake_is_named_by_its_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as raised:
        validated({**GOOD, **change}, Car, where="car.yaml", error=ProfileError)
    assert str(raised.value) == f"car.yaml: {message}"


def test_a_missing_block_and_the_remedy_are_named() -> None:
    with pytest.raises(FcpError) as raised:
        validated({"name": "a"}, Car, where="car.yaml", error=FcpError, remedy="'make' writes one")
    assert str(raised.value) == snapshot("car.yaml: the block engine is missing; 'make' writes one")


def test_what_is_no_mapping_is_refused() -> None:
    with raises(snapshot("FcpError: car.yaml: the file is [1]; it must be a mapping")):
        validated([1], Car, where="car.yaml", error=FcpError)


def test_long_values_are_abbreviated() -> None:
    with pytest.raises(FcpError) as raised:
        validated({**GOOD, "doors": "x" * 10_000}, Car, where="car.yaml", error=FcpError)
    assert len(str(raised.value)) < 200


def test_yaml_numbers_without_a_dot_are_numbers_and_texts_stay_texts() -> None:
    document = parse_yaml("{a: 50e9, b: 5e-5, c: -1E+3, d: e9, e: '5e5', f: 12}", name="x", error=FcpError)
    assert document == {"a": 50e9, "b": 5e-5, "c": -1000.0, "d": "e9", "e": "5e5", "f": 12}


def test_broken_yaml_is_one_line() -> None:
    with pytest.raises(ProfileError) as raised:
        parse_yaml("a: [1,\n  2", name="car.yaml", error=ProfileError)
    assert str(raised.value).startswith("car.yaml is not valid YAML: ")
    assert "\n" not in str(raised.value)


@pytest.mark.processes
def test_the_help_does_not_import_the_checker() -> None:
    program = "import sys, fcp_cli.cli.app; sys.exit('msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
