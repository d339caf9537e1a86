"""Lets Megatron-LM's `pretrain_gpt.py` run on the CPU, in fp64, and writes down what its training steps return.

For tests alone: a sitecustomize imports it in every rank, before the script and before fcp. The script and
`megatron.training` stay as they are; what they call of CUDA, and what they would compile, is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron compiles small functions for the device that it believes in

import tests.runtime.megatron.cpu_shim  # noqa: F401

import numpy as np  # isort: skip
import torch  # isort: skip

from fcp_cli.runtime.inject import after_import  # isort: skip

RECORDS = "FCP_TEST_RECORDS"
"""Names the file that the last rank, which has a pipeline's loss, writes a line to per step; weights go beside it."""

_DATA_HELPERS = "megatron.core.datasets.helpers_cpp"
_NEEDS_TRITON = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def _install() -> None:
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda _: None
    cuda.get_device_properties = lambda _: SimpleNamespace(major=10)
    # Clipping asserts that gradients are "torch.cuda.FloatTensor".
    type_of = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *args, **named: (  # type: ignore[method-assign, assignment]
        type_of(tensor, *args, **named) if args or named else "torch.cuda.FloatTensor"
    )
    optimizer: Any = torch.optim.Optimizer
    optimizer._accelerator_graph_capture_health_check = lambda _: None
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.accelerator.is_available = lambda: False  # else data loaders pin memory in a thread of their own
    torch.set_default_dtype(torch.float64)
    unused: Any = ModuleType(_NEEDS_TRITON)
    unused.enable_batch_invariant_mode = None
    sys.modules[_NEEDS_TRITON] = unused
    after_import(
        {
            "megatron.core.datasets.utils": _use_compiled_helpers,
            "megatron.legacy.fused_kernels": _compile_no_kernels,
            "megatron.training.arguments": _train_in_fp64,
            "megatron.training.training": _record_steps,
        }
    )


def _use_compiled_helpers(utils: Any) -> None:
    """Those of the megatron-core that is installed, instead of compiling them into the checkout."""
    utils.compile_helpers = lambda: None
    found = [file for entry in sys.path for file in Path(entry).glob("megatron/core/datasets/helpers_cpp*.so")]
    spec = importlib.util.spec_from_file_location(_DATA_HELPERS, found[0])
    assert spec is not None and spec.loader is not None
    sys.modules[_DATA_HELPERS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_DATA_HELPERS])


def _compile_no_kernels(fused_kernels: Any) -> None:
    fused_kernels.load = lambda _: None


def _train_in_fp64(arguments: Any) -> None:
    """No flag asks for it, and in fp32 rounding grows to 1e-6 in a few steps."""
    validate = arguments.validate_args

    def validate_args(*given: Any, **named: Any) -> Any:
        args = validate(*given, **named)
        if args.params_dtype == torch.float32:
            args.params_dtype = torch.float64
        return args

    arguments.validate_args = validate_args


def _record_steps(training: Any) -> None:
    train_step = training.train_step

    def recorded(forward_step: Any, data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        found = train_step(forward_step, data_iterator, model, *rest, **named)
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            records = Path(os.environ[RECORDS])
            losses, grad_norm = found[0], found[5]
            with records.open("a") as file:
                print(json.dumps({"loss": float(losses["lm loss"]), "grad_norm": float(grad_norm)}), file=file)
            weights = torch.cat([parameter.detach().flatten() for parameter in model[0].parameters()])
            np.save(records.with_suffix(".npy"), weights.numpy())
        return found

    training.train_step = recorded


_install()
