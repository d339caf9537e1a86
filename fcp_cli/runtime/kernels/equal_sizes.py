"""Zero-padding of heads for kernels that require equal head sizes of q, k and v.

Zeros appended to queries and keys do not change the scores. Zeros appended to values add output columns, which are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.nn import functional

Method = TypeVar("Method", bound=Callable[..., Any])


def with_equal_sizes(forward: Method) -> Method:
    """Wrap `AttentionKernel.forward` of a kernel that requires equal head sizes: pad with zeros, and cut the result."""

    @wraps(forward)
    def widened(kernel: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        size = v.shape[2]
        if size == q.shape[2]:
            return forward(kernel, q, k, v, *rest, **named)
        out, lse = forward(kernel, *_widened(q, k, v), *rest, **named)
        return out[..., :size].contiguous(), lse

    return cast(Method, widened)


def with_equal_sizes_backward(backward: Method) -> Method:
    """Wrap `AttentionKernel.backward` of a kernel that requires equal head sizes."""

    @wraps(backward)
    def widened(
        kernel: Any, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, **named: Any
    ) -> Any:
        sizes = q.shape[2], k.shape[2], v.shape[2]
        if v.shape[2] == q.shape[2]:
            return backward(kernel, dout, q, k, v, out, *rest, **named)
        grads = backward(kernel, *_widened(dout, q, k, v, out), *rest, **named)
        own = (grad[..., :size].contiguous() for grad, size in zip(grads, sizes, strict=False))
        return *own, *grads[len(sizes) :]

    return cast(Method, widened)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad heads [.., .., D] with zeros to the largest size among them."""
    size = max(tensor.shape[2] for tensor in tensors)
    return tuple(functional.pad(tensor, (0, size - tensor.shape[2])) for tensor in tensors)
