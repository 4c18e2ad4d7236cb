"""Triton kernels behind the functions of `derived_attention.attention`: what a GPU runs.

A kernel is there where PyTorch's own would read more, or compute more, than the mechanism needs. A
mechanism that has one takes ``fused``: None runs it where the tensors are on a GPU that Triton
compiles for, True insists, and False leaves it to PyTorch. Without a GPU, ``TRITON_INTERPRET=1``
runs kernels on the CPU one program at a time, which is how the tests check them; and `resources`
compiles them ahead of time.

Modules here import Triton, which comes with PyTorch's builds for CUDA: import them where `chosen`
has said yes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)  # what `resources` compiles kernels for; others are padded to a power of two
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: what its compiler has to know, and no data.

    `arguments` has the type of each argument, as Triton writes it: ``"*bf16"``, ``"i32"``, and
    ``"constexpr"`` for those of `constants`.
    """

    name: str  # what a table calls it
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Work:
    """What a kernel has to do: operations of its matrix products, and bytes from and to memory."""

    operations: float
    bytes: float


@functools.cache
def available() -> bool:
    """Say whether there is a Triton."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, so also on the CPU."""
    if not available():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def chosen(fused: bool | None, *tensors: Tensor) -> bool:
    """Say whether a mechanism is to run its kernel on `tensors`, which have one dtype and device.

    Where nobody insists, it is not under ``torch.compile`` or a transform of ``torch.func``, which
    cannot look into a kernel.

    Raises
    ------
    TypeError
        If `fused` is neither None nor a bool.
    ValueError
        If it is True, and the kernel cannot run.
    """
    if not (fused is None or isinstance(fused, bool)):
        raise TypeError(f"fused is of type {type(fused).__name__}; expected True, False or None")
    if fused is False:
        return False
    obstacle = _obstacle(tensors)
    if fused and obstacle:
        raise ValueError(f"fused is True, and {obstacle}; None leaves the choice to the function")
    return not obstacle and (fused is True or tensors[0].is_cuda)


def _obstacle(tensors: tuple[Tensor, ...]) -> str:
    """Return what keeps a kernel from running; nothing, if it can."""
    q = tensors[0]
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return "a transform of torch.func is at work"
    if not available():
        return "there is no Triton here"
    if interpreted():
        return ""
    if not q.is_cuda:
        return f"q is on {q.device}: kernels run on CUDA, or with TRITON_INTERPRET=1"
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}: kernels take float16, bfloat16 and float32"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""
