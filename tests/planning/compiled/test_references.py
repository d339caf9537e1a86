"""Named tuples of arrays go to compiled functions by reference, which nobody but the compiler notices."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.core.errors import TypingError

from fcp_cli.util.arrays import FloatArray
from fcp_cli.util.compiling import kernel, leaf


class Inner(NamedTuple):
    weight: float
    values: FloatArray


class Outer(NamedTuple):
    scale: int
    inner: Inner


@leaf
def total(outer: Outer) -> float:
    found = 0.0
    for value in outer.inner.values:
        found += value * outer.inner.weight
    return found * outer.scale


@leaf
def add_to_all(more: float, inner: Inner) -> None:
    for k in range(len(inner.values)):
        inner.values[k] += more


@kernel
def own_total(count: int) -> float:
    """A tuple that a function made goes by reference to those that it calls, and what these write is seen."""
    outer = Outer(2, Inner(0.5, np.zeros(count)))
    for _ in range(3):
        add_to_all(1.0, outer.inner)
        outer = Outer(outer.scale + 1, outer.inner)
    return total(outer)


@kernel
def grown(count: int, inner: Inner) -> Any:
    """Return the tuple that was given, or one with more values."""
    if len(inner.values) < count:
        inner = Inner(inner.weight, np.ones(count))
    add_to_all(1.0, inner)
    return inner


@kernel
def given_back(inner: Inner) -> Any:
    return inner


@kernel
def first_of_given_back(count: int) -> float:
    return float(given_back(Inner(1.0, np.ones(count))).values[0])


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (total, add_to_all, own_total, grown, given_back, first_of_given_back):
        if hasattr(function, "_cache"):  # under NUMBA_DISABLE_JIT it is plain Python
            monkeypatch.setattr(function._cache, "_enabled", False)


def test_members_of_nested_tuples_are_read() -> None:
    assert total(Outer(3, Inner(0.5, np.array([1.0, 2.0])))) == 4.5


def test_a_function_s_own_tuples_are_seen_and_changed_by_those_that_it_calls() -> None:
    assert own_total(4) == 4 * 3.0 * 0.5 * 5


def test_a_function_returns_the_tuple_that_it_was_given_or_one_of_its_own() -> None:
    given = Inner(2.0, np.zeros(3))
    same, more = grown(2, given), grown(5, given)
    assert same.values.tolist() == [1.0] * 3 == given.values.tolist()
    assert (more.weight, more.values.tolist()) == (2.0, [2.0] * 5)


def test_arrays_are_released_once_nobody_has_them_any_more() -> None:
    values = np.zeros(3)
    before = sys.getrefcount(values)
    for _ in range(5):
        total(Outer(3, Inner(0.5, values)))
        grown(2, Inner(0.5, values))
        grown(5, Inner(0.5, values))
    assert sys.getrefcount(values) == before


def test_a_function_may_give_back_its_tuple_to_python_but_not_to_a_function_whose_arrays_may_be_gone() -> None:
    assert given_back(Inner(1.0, np.ones(2))).values.tolist() == [1.0, 1.0]
    with pytest.raises(TypingError, match="given_back returns a tuple that it was given, to a compiled function"):
        first_of_given_back(2)
