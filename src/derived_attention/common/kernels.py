"""When a mechanism runs its Triton kernel, and how a compiler is told of one.

A family has a kernel where PyTorch's own would read more, or compute more, than the mechanism
needs. Its mechanism takes ``fused``: True runs the kernel, or raises where it cannot run; False
runs PyTorch's form. None, the default, runs the kernel on a GPU where it has been tried: the first
call of a kind compares the two on a small problem, as `common.kernel_selftest` says.

Compilers keep a kernel as one operator, as `derived_attention.common.operators` makes it.
But while ``torch.compile`` traces, nothing is tried, and the default is the kernel only where a
call has tried it before, in this process or, where the user's cache folder can be written, in any.
So call a model once, forward, before you compile it; what was compiled stays as it is.

GPUs of compute capability 8.0 and above have kernels. Older ones, such as the T4 of free notebooks,
get PyTorch's form: they have no products of bfloat16, 64 KiB of shared memory instead of at
least 99, for which other tiles are necessary, and they are untested. Without a GPU,
``TRITON_INTERPRET=1`` runs kernels on the CPU, one program at a time, where a caller asks for them,
as the tests do; `benchmarks.gpu.resources` compiles them ahead of time.

The modules called ``triton`` import Triton, which comes with PyTorch's builds for CUDA: import them
where `should_run_kernel` has returned True.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from derived_attention.common.checks import has_concrete_values

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRIED = 300  # tokens of a problem on which a kernel is tried: several of any block
GPUS = ("cuda",)  # types of devices that may try kernels
OLDEST = (3, 5)  # Triton: the interpreter of older ones has no products of float64
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}

Problem = Callable[[], Mapping[str, Any] | None]


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a compiler call a function, and take its result for a constant, in place of tracing it.

    As ``torch.compiler.assume_constant_result`` does, which would import the compiler here.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def available() -> bool:
    """Return whether a version of Triton is installed that the kernels are tested on."""
    try:
        import triton
    except ImportError:
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST


def versions() -> dict[str, str]:
    """Return the versions of what compiles and calls kernels."""
    import triton

    found = {"triton": triton.__version__, "torch": torch.__version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["fla-core"] = importlib.metadata.version("fla-core")
    return found


@constant
def uses_interpreter() -> bool:
    """Return whether kernels run in Triton's interpreter, and so on the CPU too."""
    return available() and _has_interpreter()


@functools.cache
def _has_interpreter() -> bool:
    """Ask Triton: the type of a compiled function says so in every version; the setting has moved.

    Once: it reads the source of that function, which takes longer than to launch a kernel.
    """
    import triton

    def kernel() -> None: ...

    return not isinstance(triton.jit(kernel), triton.JITFunction)


def should_run_kernel(fused: bool | None, *tensors: Tensor, problem: Problem | None = None) -> bool:
    """Return whether to run a kernel on `tensors`, which share a dtype and a device.

    Parameters
    ----------
    fused : bool, optional
        What the caller asked for.
    *tensors : Tensor
        q, and all others that the kernel reads.
    problem : callable, optional
        Returns the fields of a `common.kernel_cases.Trial` that say what is asked,
        but for its dtype, or None where the kernel cannot do it. Without it the default is
        PyTorch's form.

    Raises
    ------
    TypeError
        If `fused` is neither None nor a bool.
    ValueError
        If it is True and the kernel cannot run; also in a transform of ``torch.func``, which cannot
        look into a kernel.
    """
    if not (fused is None or isinstance(fused, bool)):
        raise TypeError(f"fused is of type {type(fused).__name__}; expected True, False or None")
    if fused is None:
        on_gpu = tensors[0].device.type in GPUS
        return problem is not None and on_gpu and _is_trusted(tensors, problem)
    if fused and (obstacle := _obstacle(tensors)):
        raise ValueError(f"fused is True, and {obstacle}; expected False or None: PyTorch's form")
    return fused


def _is_trusted(tensors: tuple[Tensor, ...], problem: Problem) -> bool:
    """Return whether a kernel runs where nobody has asked for one."""
    if not (_may_try(tensors) and all(x.numel() for x in tensors)):
        return False
    fields = problem()
    if fields is None:
        return False
    numbers = {x: y if isinstance(y, (bool, str)) else operator.index(y) for x, y in fields.items()}
    first = not torch.compiler.is_compiling()  # a compiler traces; it computes nothing yet
    return _agrees(tensors[0].device, tensors[0].dtype, first, **numbers)


@constant
def _agrees(device: torch.device, dtype: torch.dtype, first: bool, **fields: Any) -> bool:
    """Return whether a kernel has agreed, or agrees now if this may be the `first` call."""
    trust = importlib.import_module(
        "derived_attention.common.kernel_selftest"
    )  # which calls mechanisms
    sizes = {"N": TRIED, "M": TRIED + fields.get("prefix", 0)}
    trial = trust.Trial(dtype=NAMES[dtype], **sizes | fields)
    return bool(trust.is_trusted(trial, device, first))


def _may_try(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether a kernel could run on a GPU here, and be tried first."""
    q = tensors[0]
    if q.dtype not in DTYPES:
        return False
    if not torch.compiler.is_compiling():
        if not all(map(has_concrete_values, tensors)):
            return False  # nothing to try it on; and captured graphs must not wait for a trial
        if any(unpack_dual(x).tangent is not None for x in tensors):
            return False  # kernels have no forward mode
        if is_in_torch_dispatch_mode():
            return False  # what counts operations, say, sees none of a kernel's
    return not (uses_interpreter() or _obstacle(tensors))


def _obstacle(tensors: tuple[Tensor, ...]) -> str:
    """Return what keeps a kernel from running, or nothing."""
    if torch.compiler.is_compiling():  # which cannot ask a tensor
        transformed = torch._C._are_functorch_transforms_active()
    else:
        transformed = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    if transformed:
        return "a transform of torch.func is at work"
    return str(_missing_support(tensors[0].device, tensors[0].dtype))


@constant
def _missing_support(device: torch.device, dtype: torch.dtype) -> str:
    """Return what this machine or a tensor q lacks for the kernels, or an empty string."""
    if not available():
        return f"Triton {'.'.join(map(str, OLDEST))} or newer is not installed"
    if uses_interpreter():
        return ""
    if device.type != "cuda":
        return f"q is on {device}: kernels run on CUDA, or with TRITON_INTERPRET=1"
    if dtype not in DTYPES:
        return f"q has dtype {dtype}: kernels take float16, bfloat16 and float32"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return ""
