"""What the runtime asks of a CUDA build of PyTorch, proven without a card: `make test-cuda-build` prints two tables.

Calls go through the build's own schemas and meta kernels, on fake tensors; Triton's kernels become machine code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import fcp_cli
from fcp_cli.cost.recipe import KernelName
from fcp_cli.runtime import kernel_agreement, transport
from fcp_cli.runtime.kernels import available, select
from fcp_cli.runtime.kernels.available import kernels_of
from fcp_cli.runtime.kernels.cudnn import CudnnKernel, aten_operators, packs_soundly
from fcp_cli.runtime.kernels.select import Preference, Signature
from fcp_cli.runtime.layout import Segments
from tests.runtime.fake_cuda import without_a_card

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda_build,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # flash-attn-4 imports much that is
]

DEVICE = torch.device("cuda", 0)
QWEN3_8B = Signature(32, 8, 128, 128, torch.bfloat16)
MLA = Signature(16, 16, 192, 128, torch.bfloat16)
WITHOUT_PAIRS = Signature(3, 1, 80, 80, torch.bfloat16)  # heads and sizes that are no powers of two
ARCHITECTURES = (80, 90, 100)
PACKAGES: frozenset[KernelName] = frozenset({"fa3", "fa4"})  # they compile or load machine code when they are called


class Launch(NamedTuple):
    """A variant of a Triton kernel: types of its arguments, constants, and which of them are multiples of 16."""

    kernel: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    warps: int


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that reach the device, and follows fcp's own to the launches of their kernels."""

    def __init__(self, launches: dict[Launch, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.schemas: Counter[str] = Counter()
        self._rows: Any = importlib.import_module("fcp_cli.runtime.triton_rows")
        for name in ("_merge_kernel", "_add_kernel", "_add_pair_kernel", "_take_kernel"):
            kernel = getattr(self._rows, name)
            if not isinstance(kernel, _Recorder):
                setattr(self._rows, name, _Recorder(name, kernel, launches))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in func.name() or func.namespace == "fcp":
            self.schemas[str(func._schema)] += 1
        if func.namespace == "fcp":
            return getattr(self._rows, func._opname)(*args)
        return func(*args, **(kwargs or {}))


class _Recorder:
    """A kernel of which a launch is noted in the way in which Triton specializes it."""

    def __init__(self, name: str, kernel: Any, launches: dict[Launch, None]) -> None:
        self.name, self.kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *args: Any, num_warps: int, **constants: Any) -> None:
        types: dict[str, str] = {}
        divisible = []
        for parameter, value in zip(self.kernel.params, args, strict=False):
            if isinstance(value, torch.Tensor):
                scalar = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}[value.dtype]
                types[parameter.name] = f"*{scalar}"
                is_divisible = not parameter.do_not_specialize_on_alignment
            elif value == 1 and not parameter.do_not_specialize:
                constants[parameter.name] = 1
                continue
            else:
                types[parameter.name] = "i32" if value < 2**31 else "i64"
                is_divisible = value % 16 == 0 and not parameter.do_not_specialize
            if is_divisible:
                divisible.append(parameter.name)
        found = (tuple(types.items()), tuple(constants.items()), tuple(divisible), num_warps)
        self._launches[Launch(self.name, *found)] = None


@pytest.fixture(scope="module")
def launches() -> dict[Launch, None]:
    """The variants of Triton's kernels that the tests of this module have launched, in order."""
    return {}


@pytest.fixture
def card(request: pytest.FixtureRequest) -> Iterator[None]:
    capability: tuple[int, int] = getattr(request, "param", (9, 0))
    before = list(select._preferences)
    with without_a_card(capability):
        yield
    select._preferences[:] = before
    select.select_kernel.cache_clear()


def run_rings(name: KernelName, signature: Signature) -> None:
    """Rings of every kind on one kernel, as `start` rehearses them, and with calls that cuDNN prefers."""
    failures: list[str] = []
    select.prefer(Preference(asked=name, excluded=PACKAGES, report=failures.append))
    kernel = select.select_kernel("cuda", signature.dtype)
    assert isinstance(kernel, select.ChosenKernel)
    assert kernel.of(signature, Segments((4096,), (4096,), causal=True), DEVICE).name == name
    windows = (None,) if name == "cudnn" else (None, 8)
    for degree, lengths, window in product((2, 3, 4), ((33,), (20, 40, 51), (4096, 8192)), windows):
        kernel_agreement.rehearse_ring(signature, lengths, degree, window, DEVICE, "fp32")
    assert not failures, "the calls went to another kernel"


def test_rings_call_operators_of_this_build_with_their_own_schemas(
    card: None, launches: dict[Launch, None], capsys: pytest.CaptureFixture[str]
) -> None:
    with Calls(launches) as calls:
        for signature in (QWEN3_8B, MLA, WITHOUT_PAIRS):
            run_rings("fa2", signature)
            run_rings("cudnn", signature)
    wanted = ["_flash_attention", "_scaled_dot_product_cudnn_attention", "merge_rows", "add_rows", "add_pair_rows"]
    assert all(any(name in schema for schema in calls.schemas) for name in [*wanted, "take_rows"])
    operators = aten_operators()
    assert operators is not None
    assert packs_soundly(operators) == any("aten::_cudnn_attention_backward" in schema for schema in calls.schemas)
    with capsys.disabled():
        print(f"\n\ntorch {torch.__version__}: operators that rings call, with the schemas that took the calls\n")
        print("| calls | schema |\n|---|---|")
        for schema, count in sorted(calls.schemas.items()):
            print(f"| {count} | `{schema}` |")


@pytest.mark.parametrize("packs", [False, True], ids=["dense", "packed"])
def test_both_forms_of_cudnn_pass_the_calls_of_their_test(card: None, packs: bool) -> None:
    operators = aten_operators()
    assert operators is not None
    if packs and not packs_soundly(operators):
        pytest.skip(f"torch {torch.__version__} has no sound packed form")
    assert select.failure(CudnnKernel(operators, packs=packs), QWEN3_8B, DEVICE) is None


@pytest.mark.parametrize("card", [(8, 0), (9, 0), (10, 0)], indirect=True, ids=["sm80", "sm90", "sm100"])
def test_every_architecture_finds_a_kernel_for_short_and_long_sequences(card: None) -> None:
    chosen = select.ChosenKernel(Preference(excluded=PACKAGES))
    hopper_or_newer = available.major_capability() >= 9
    for tokens, first in ((512, "fa2"), (16384, "cudnn" if hopper_or_newer else "fa2")):
        assert chosen.of(QWEN3_8B, Segments((tokens,), (tokens,), causal=True), DEVICE).name == first


def test_every_name_of_pytorch_that_fcp_writes_is_in_this_build() -> None:
    roots = {"torch": torch, "dist": dist}
    missing = []
    for path in Path(fcp_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            found: ast.AST = node
            while isinstance(found, ast.Attribute):
                names.append(found.attr)
                found = found.value
            root = roots.get(found.id) if names and isinstance(found, ast.Name) else None
            if root is not None and not _resolves(root, names[::-1]):
                missing.append(f"{path.name}: {ast.unparse(node)}")
    assert not missing


def _resolves(found: Any, names: list[str]) -> bool:
    for name in names:
        if inspect.ismodule(found) and not hasattr(found, name):
            try:
                importlib.import_module(f"{found.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_groups_take_the_options_that_they_are_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda *_: "cpu:gloo,cuda:nccl")
    options = transport._priority_options(DEVICE)
    assert isinstance(options, dist.ProcessGroupNCCL.Options) and options.is_high_priority_stream
    given = {"timeout": timedelta(seconds=1), "device_id": DEVICE, "store": None, "rank": 0, "world_size": 1}
    inspect.signature(dist.init_process_group).bind("cpu:gloo,cuda:nccl", **given)
    inspect.signature(dist.new_group).bind([0], group_desc="rings", timeout=timedelta(seconds=1), pg_options=options)


def test_nccl_means_the_back_end_whose_order_was_read() -> None:
    """From torch 2.15 on, "nccl" is ProcessGroupNCCL2 unless TORCH_DIST_USE_NCCL2=0: its order of operations differs."""
    with pytest.raises(ValueError, match=r"^ProcessGroupNCCL is only supported with GPUs"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
        )


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_adapters_of_flash_attention_have_the_names_and_signatures_that_are_called(name: str) -> None:
    adapter = available._ADAPTERS[name]
    module = importlib.import_module(adapter.module)
    inspect.signature(getattr(module, adapter.load)).bind(adapter.package)
    assert name == "fa3" or hasattr(module, available._FA4_PATH)
    aten = torch.ops.aten
    for function, operator in (
        (adapter.forward, aten._flash_attention_forward.default),
        (adapter.backward, aten._flash_attention_backward.default),
    ):
        arguments = operator._schema.arguments
        positional = [argument.name for argument in arguments if not argument.kwarg_only]
        named = dict.fromkeys(("scale", "window_size_left", "window_size_right"))
        inspect.signature(getattr(module, function)).bind(*positional, **named)


@pytest.mark.parametrize("card", [(10, 0)], indirect=True)
def test_flash_attention_4_is_imported_through_pytorchs_adapter(card: None) -> None:
    if not available._is_installed("flash_attn.cute.interface"):
        pytest.skip("flash-attn-4 is not installed")
    (kernel,) = kernels_of("fa4")
    assert kernel.name == "fa4" and version("flash-attn-4")


@pytest.mark.processes
def test_every_variant_of_a_triton_kernel_becomes_machine_code_without_spills(
    launches: dict[Launch, None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of those that the rings above have launched, for each architecture."""
    assert launches, "run the whole module"
    rows = [cubin(launch, architecture, tmp_path) for launch in launches for architecture in ARCHITECTURES]
    table = Counter(rows)
    with capsys.disabled():
        triton = version("triton")
        print(
            f"\n\ntriton {triton}: {len(launches)} variants, {len(rows)} cubins; registers and bytes spilled by ptxas\n"
        )
        print(
            "| kernel | architecture | variants | registers | spilled bytes | cubin bytes |\n|---|---|---|---|---|---|"
        )
        for kernel, architecture in sorted({row[:2] for row in table}):
            own = [row for row in rows if row[:2] == (kernel, architecture)]
            figures = [[row[at] for row in own] for at in (2, 3, 4)]
            spans = " | ".join(f"{min(each)} to {max(each)}" for each in figures)
            print(f"| {kernel} | {architecture} | {len(own)} | {spans} |")
    assert not any(row.spilled for row in rows)


class Cubin(NamedTuple):
    kernel: str
    architecture: str
    registers: int
    spilled: int
    size: int


def cubin(launch: Launch, architecture: int, folder: Path) -> Cubin:
    """Compile a variant for an architecture, and ask ptxas what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module("fcp_cli.runtime.triton_rows"), launch.kernel)
    function = kernel.kernel if isinstance(kernel, _Recorder) else kernel
    names = function.arg_names
    constants = dict(launch.constants)
    signature = {name: dict(launch.types).get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": launch.warps})
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    target_name = re.search(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target_name is not None
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = tools / ("ptxas-blackwell" if architecture >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas")
    told = subprocess.run(
        [ptxas, "-v", f"--gpu-name={target_name[1]}", ptx, "-o", folder / "kernel.cubin"],
        capture_output=True, text=True, check=True,
    ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", told)
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill", told)]
    assert registers is not None and len(compiled.asm["cubin"]) > 0, told
    return Cubin(launch.kernel.strip("_"), target_name[1], int(registers[1]), sum(spilled), len(compiled.asm["cubin"]))
