"""Rows of packed tensors: torch's operations against plain indexing, and the Triton kernels against torch's."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fcp_cli.runtime import rows as operators
from fcp_cli.runtime.layout import Rows
from fcp_cli.runtime.rows import add, add_pair, merge, take, take_pair, take_with_lse

pytestmark = pytest.mark.torch

TOKENS, HEADS, HEAD_DIM = 13, 3, 20  # neither is a power of two
ROWS = {"all": Rows((0, 13)), "span": Rows((4, 9)), "scattered": Rows(None, np.array([1, 2, 5, 6, 12]))}
PRECISIONS = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]


@pytest.fixture(params=ROWS)
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(ROWS[request.param].span, ROWS[request.param].positions)


def chosen(rows: Rows) -> Tensor:
    return torch.arange(TOKENS)[slice(*rows.span)] if rows.span else torch.as_tensor(rows.positions)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-place", "elsewhere"])
@pytest.mark.parametrize(("dtype", "precise"), PRECISIONS)
def test_merging_weighs_by_the_sums_of_both_parts(
    rows: Rows, dtype: torch.dtype, precise: torch.dtype, elsewhere: bool
) -> None:
    at = chosen(rows)
    source, part = draw(TOKENS, HEADS, HEAD_DIM, dtype=dtype), draw(len(at), HEADS, HEAD_DIM, dtype=dtype, seed=1)
    lse, part_lse = draw(TOKENS, HEADS, dtype=precise, seed=2), draw(len(at), HEADS, dtype=precise, seed=3)
    weight, part_weight = (value.double().exp().unsqueeze(-1) for value in (lse[at], part_lse))
    expected = (weight * source[at].double() + part_weight * part.double()) / (weight + part_weight)
    before, before_lse = source.clone(), lse.clone()
    into = torch.zeros(TOKENS, HEADS, HEAD_DIM, dtype=precise) if elsewhere else source
    also = torch.zeros_like(source) if elsewhere else None
    merge(source, into, also, lse, rows, part, part_lse)
    close = 1e-13 if precise == torch.float64 else 1e-6
    assert (into[at].double() - expected).abs().max() <= (close if into.dtype == precise else 1e-2)
    assert (lse[at].double() - (weight + part_weight).squeeze(-1).log()).abs().max() <= close
    others = [row for row in range(TOKENS) if row not in at.tolist()]
    assert torch.equal(lse[others], before_lse[others])
    if also is not None:
        assert torch.equal(source, before)
        assert torch.equal(also[at], into[at].to(dtype))
        assert not into[others].any() and not also[others].any()
    else:
        assert torch.equal(source[others], before[others])


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-place", "elsewhere"])
@pytest.mark.parametrize(("dtype", "precise"), PRECISIONS)
def test_shares_are_added_to_their_rows_and_rounded_once(
    rows: Rows, dtype: torch.dtype, precise: torch.dtype, elsewhere: bool
) -> None:
    at = chosen(rows)
    source, share = draw(TOKENS, HEADS, HEAD_DIM, dtype=dtype), draw(len(at), HEADS, HEAD_DIM, dtype=dtype, seed=1)
    expected = source.to(precise, copy=True)
    expected[at] += share.to(precise)
    into = torch.zeros(TOKENS, HEADS, HEAD_DIM, dtype=precise) if elsewhere else source
    add(source, into, rows, share)
    assert torch.equal(into[at], expected[at].to(into.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_is_added_half_by_half(rows: Rows, dtype: torch.dtype) -> None:
    at = chosen(rows)
    total = draw(2, TOKENS, HEADS, HEAD_DIM, dtype=dtype)
    first, second = (draw(len(at), HEADS, HEAD_DIM, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    expected = total.to(torch.float32, copy=True)
    expected[0, at] += first.float()
    expected[1, at] += second.float()
    add_pair(total, rows, first, second)
    assert torch.equal(total, expected.to(dtype))


def test_rows_are_taken_from_every_tensor(rows: Rows) -> None:
    at = chosen(rows)
    tensors = (draw(TOKENS, HEADS, HEAD_DIM), draw(TOKENS, HEADS, HEAD_DIM, seed=1), draw(TOKENS, HEADS, HEAD_DIM))
    lse = draw(HEADS, TOKENS).t()
    for taken, tensor in zip(take_with_lse(tensors, lse, rows), (*tensors, lse), strict=True):
        assert torch.equal(taken, tensor[at])
    pair = draw(2, TOKENS, HEADS, HEAD_DIM)
    for taken, half in zip(take_pair(pair, rows), pair, strict=True):
        assert torch.equal(taken, half[at])
    assert torch.equal(take(lse, rows), lse[at])


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The fused operators on the CPU, through Triton's interpreter; yields the names of those that were called."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined
    pytest.importorskip("triton")
    kernels = importlib.reload(importlib.import_module("fcp_cli.runtime.triton_rows"))
    calls: list[str] = []

    def launch(name: str) -> Any:
        def run(*args: Any) -> Any:
            calls.append(name)
            return getattr(kernels, name)(*args)

        return run

    for name in ("merge_rows", "add_rows", "add_pair_rows", "take_rows"):
        monkeypatch.setattr(operators, name, launch(name))
    monkeypatch.setattr(operators, "fused_rows", lambda device_type: True)
    yield calls
    monkeypatch.undo()


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What `run` changes or returns, by the Triton kernels and by torch."""
    found: list[Tensor] = run()
    monkeypatch.setattr(operators, "fused_rows", lambda device_type: False)
    return found, run()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-place", "elsewhere"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_merge_does_what_torch_does(
    rows: Rows, dtype: torch.dtype, elsewhere: bool, interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(chosen(rows))

    def run() -> list[Tensor]:
        source, part = draw(TOKENS, HEADS, HEAD_DIM, dtype=dtype), draw(count, HEADS, HEAD_DIM, dtype=dtype, seed=1)
        # Columns first, as the flash kernel gives it; far apart, where a naive exp would overflow.
        lse, part_lse = 300 * draw(HEADS, TOKENS, seed=2).t(), 300 * draw(HEADS, count, seed=3).t()
        into = torch.zeros(TOKENS, HEADS, HEAD_DIM) if elsewhere else source
        also = torch.zeros_like(source) if elsewhere else source
        merge(source, into, also if elsewhere else None, lse, rows, part, part_lse)
        return [into, also, lse]

    found, expected = both_ways(monkeypatch, run)
    assert interpreted == ["merge_rows"]
    for tensor, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-6 if tensor.dtype == torch.float32 else 1e-2, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_triton_sums_are_those_of_torch(
    rows: Rows, dtype: torch.dtype, interpreted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(chosen(rows))

    def run() -> list[Tensor]:
        source, share = draw(TOKENS, HEADS, HEAD_DIM, dtype=dtype), draw(count, HEADS, HEAD_DIM, dtype=dtype, seed=1)
        into, pair = torch.zeros(TOKENS, HEADS, HEAD_DIM), torch.stack((source, source))
        add(source, into, rows, share)
        add(source, source, rows, share)
        add_pair(pair, rows, share, -share)
        return [source, into, pair]

    found, expected = both_ways(monkeypatch, run)
    assert interpreted == ["add_rows", "add_rows", "add_pair_rows"]
    for tensor, wanted in zip(found, expected, strict=True):
        # The interpreter cuts bf16 off where GPUs round.
        torch.testing.assert_close(tensor, wanted, rtol=1e-2 if tensor.dtype == torch.bfloat16 else 0.0, atol=0.0)


def test_no_argument_of_a_triton_kernel_has_an_annotation_that_triton_would_refuse() -> None:
    """It compiles annotations, too, and takes no global names but its own; its interpreter takes any."""
    source = Path(operators.__file__).with_name("triton_rows.py").read_text(encoding="utf-8")
    kernels = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    ]
    annotations = [ast.unparse(one.annotation) for kernel in kernels for one in kernel.args.args if one.annotation]
    assert len(kernels) == 4 and set(annotations) == {"tl.constexpr"}


def test_the_triton_gather_takes_the_rows(interpreted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        fetched = draw(HEADS, TOKENS, HEAD_DIM).transpose(0, 1)
        tensors = (fetched, draw(TOKENS, HEADS, HEAD_DIM, seed=1), draw(TOKENS, HEADS, HEAD_DIM, seed=2))
        return list(take_with_lse(tensors, draw(HEADS, TOKENS, seed=3).t(), ROWS["scattered"]))

    found, expected = both_ways(monkeypatch, run)
    assert interpreted == ["take_rows"]
    assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(found, expected, strict=True))
