"""Triton kernels behind the functions of `derived_attention.attention`: what a GPU can run.

A kernel is there where PyTorch's own would read more, or compute more, than the mechanism needs. A
mechanism that has one takes ``fused``: True runs the kernel, or raises where it cannot run; False,
and None where it is left out, run PyTorch's form. None of them has run on a GPU yet, so that nobody
gets one who has not asked for it. Without a GPU, ``TRITON_INTERPRET=1`` runs kernels on the CPU one
program at a time, which is how the tests check them; and `resources` compiles them ahead of time.

Modules here import Triton, which comes with PyTorch's builds for CUDA: import them where `chosen`
has said yes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)  # what `resources` compiles kernels for; others are padded to a power of two
OLDEST = (3, 5)  # Triton: before it the interpreter has no products of float64
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
    """Say whether there is a Triton that kernels are tested on."""
    try:
        import triton
    except ImportError:  # some need setuptools, and do not say so
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, so also on the CPU.

    What Triton makes of a function says so in every version; where it keeps the setting has moved.
    """
    if not available():
        return False
    import triton

    def kernel() -> None: ...

    return not isinstance(triton.jit(kernel), triton.JITFunction)


def chosen(fused: bool | None, *tensors: Tensor) -> bool:
    """Say whether a mechanism is to run its kernel on `tensors`, which have one dtype and device.

    It is where somebody insists, and nowhere else.

    Raises
    ------
    TypeError
        If `fused` is neither None nor a bool.
    ValueError
        If it is True, and the kernel cannot run; under ``torch.compile`` and in a transform of
        ``torch.func``, too, which cannot look into a kernel.
    """
    if not (fused is None or isinstance(fused, bool)):
        raise TypeError(f"fused is of type {type(fused).__name__}; expected True, False or None")
    if fused and (obstacle := _obstacle(tensors)):
        raise ValueError(f"fused is True, and {obstacle}; expected False or None: PyTorch's form")
    return fused is True


def _obstacle(tensors: tuple[Tensor, ...]) -> str:
    """Return what keeps a kernel from running; nothing, if it can."""
    q = tensors[0]
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return "a transform of torch.func is at work"
    if not available():
        return f"there is no Triton {'.'.join(map(str, OLDEST))} or newer here"
    if interpreted():
        return ""
    if not q.is_cuda:
        return f"q is on {q.device}: kernels run on CUDA, or with TRITON_INTERPRET=1"
    if q.dtype not in DTYPES:
        return f"q has dtype {q.dtype}: kernels take float16, bfloat16 and float32"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""
