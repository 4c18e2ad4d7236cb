"""Costs of attention, counted and measured, and diagnostics of its maps.

Counts accept integers, which give exact integers, and sympy symbols, which give a polynomial.
"""

from __future__ import annotations

import datetime
import gc
import math
import operator
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    import sympy

Count: TypeAlias = "float | sympy.Expr"
Shape = tuple[int, ...]


def attention_flops(
    queries: Count, keys: Count, dim: Count, value_dim: Count | None = None, heads: Count = 1
) -> Any:
    r"""Return the operations of the two products of attention, :math:`QK^\top` and :math:`AV`.

    :math:`2HNM(D + D_v)`: a multiply–add is 2 operations. The softmax between them is not counted;
    `projection_flops` counts the projections around them. Masks are ignored; for heads of different
    lengths, add the counts.

    Parameters
    ----------
    queries, keys : int or sympy expression
        Numbers of queries N and of keys M.
    dim, value_dim : int or sympy expression
        Head dimensions D of queries and keys, and Dv of values; by default Dv = D.
    heads : int or sympy expression, default 1
        Number of heads H.
    """
    return 2 * heads * queries * keys * (dim + (dim if value_dim is None else value_dim))


def projection_flops(length: Count, inputs: Count, outputs: Count) -> Any:
    """Return the operations of a linear map of N tokens: 2 N · inputs · outputs, without a bias.

    An attention layer has four such maps: queries, keys, values and output.
    """
    return 2 * length * inputs * outputs


def stored_bytes(queries: Count, keys: Count, heads: Count = 1, *, fused: bool = False) -> Any:
    """Return the peak memory of attention in float32, in bytes, without inputs and output.

    The N×N form stores scores and weights, 2HNM numbers. The fused form stores the logarithm of
    each row sum, HN numbers, and recomputes the weights from it in the backward pass.
    """
    return 4 * heads * queries * (1 if fused else 2 * keys)


def count_flops(fn: Callable[[], Any]) -> int:
    """Return the operations of the matrix products of ``fn()``, which is called once.

    PyTorch counts them while `fn` runs, backward passes included. A multiply–add is 2 operations;
    elementwise work, such as a softmax, is not counted, and causal masks are ignored. Products that
    are added in place or have a vector, and the fused attention of the CPU, which PyTorch's counter
    omits, are counted here; that attention as 2 products forward and 5 backward, where scores are
    recomputed.
    """
    aten = torch.ops.aten
    more: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward_flops,
        aten.addmm_: _added_flops,
        aten.baddbmm_: _added_flops,
        aten.mv: _vector_flops,
        aten.dot: _vector_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        fn()
    return counter.get_total_flops()


def _added_flops(_: Shape, left: Shape, right: Shape, **__: Any) -> int:
    """Count a product, added in place, from the shapes (..., n, m) and (..., m, p)."""
    return 2 * math.prod(left) * right[-1]


def _vector_flops(left: Shape, right: Shape, **_: Any) -> int:
    """Count the product of a matrix or a vector with a vector."""
    return 2 * math.prod(left)


def _fused_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Count QKᵀ and AV from the shapes (B, H, N, D), (B, H, M, D), (B, H, M, Dv)."""
    return attention_flops(query[2], key[2], query[3], value[3], heads=query[0] * query[1])


def _fused_backward_flops(
    grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
) -> int:
    """Count QKᵀ again, and dV, dA, dQ, dK: three products in D and two in Dv."""
    return _fused_flops(query, key, value) + attention_flops(
        query[2], key[2], 2 * query[3], value[3], heads=query[0] * query[1]
    )


def _operation(kind: str, compute: Callable[..., float]) -> Callable[..., _Counted]:
    """Return a method of `_Counted` that counts its calls as `kind`."""

    def method(self: _Counted, *others: Any) -> _Counted:
        self.counts[kind] += 1
        return type(self)(compute(self.value, *map(float, others)))

    return method


class _Counted:
    """A number that counts the operations on it, in the `counts` of its class.

    It is not a float, so an operation that it does not define raises TypeError.
    """

    counts: Counter[str]
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    __add__ = __radd__ = _operation("add", operator.add)
    __sub__ = _operation("add", operator.sub)
    __rsub__ = _operation("add", lambda a, b: b - a)
    __mul__ = __rmul__ = _operation("multiply", operator.mul)
    __eq__ = __bool__ = None  # type: ignore[assignment]  # neither is counted
    __truediv__ = _operation("divide", operator.truediv)
    __rtruediv__ = _operation("divide", lambda a, b: b / a)
    exp = _operation("exp", math.exp)


def count_operations(fn: Callable[..., Any], *arrays: ArrayLike) -> Counter[str]:
    """Count every scalar operation of ``fn(*arrays)``, for small arrays, to verify formulas.

    `fn` gets NumPy arrays of numbers that count the operations on them. A product of n × m and
    m × p matrices takes nmp multiplications and np(m − 1) additions; a sum of n numbers takes n − 1
    additions. What `fn` converts to plain numbers, by ``x.astype(float)``, is no longer counted.

    Parameters
    ----------
    fn : callable
        Adds, subtracts, multiplies, divides, and may call ``np.exp``.
    arrays : array_like
        Its arguments, real.

    Returns
    -------
    collections.Counter
        Numbers of ``"add"`` (with subtractions), ``"multiply"``, ``"divide"`` and ``"exp"``.

    Raises
    ------
    TypeError
        If `fn` uses any other operation.

    Examples
    --------
    >>> counts = count_operations(lambda a, b: a @ b, np.ones((2, 3)), np.ones((3, 4)))
    >>> sorted(counts.items())
    [('add', 16), ('multiply', 24)]
    """
    counts: Counter[str] = Counter()
    number = type("_Counted", (_Counted,), {"counts": counts, "__slots__": ()})
    wrap = np.frompyfunc(number, 1, 1)
    fn(*(np.asarray(wrap(np.asarray(array, dtype=float)), dtype=object) for array in arrays))
    return counts


class Timing(NamedTuple):
    """Median time of repeated calls, in seconds, and its ratio to that of the first function.

    `ratio` is the median over rounds of this time divided by the first function's time in the
    same round, so that slow phases of the machine cancel.
    """

    median: float
    ratio: float


def compare(
    functions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 20,
    warmup: int = 3,
    device: str | torch.device,
) -> dict[str, Timing]:
    """Time functions in rounds, with one call of each function per round.

    Every round starts with another function, so that no function has a fixed position.

    Parameters
    ----------
    functions : mapping of str to callable
        At least one; called without arguments.
    repeats, warmup : int
        Rounds that are timed, at least 1, and rounds before them that are not, at least 0.
    device : str or torch.device
        Where the functions compute. CUDA is timed by its events, the CPU by the clock.

    Returns
    -------
    dict of str to Timing
        In the order of `functions`.

    Raises
    ------
    ValueError
        If `functions` is empty, or `repeats` or `warmup` is too small.
    """
    if not functions:
        raise ValueError("functions is empty; expected at least one function")
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"repeats is {repeats} and warmup {warmup}; expected at least 1 and at least 0"
        )
    names = list(functions)
    # torch.utils.benchmark has no rounds, and calls one function at least three times in a row.
    clock = _cuda_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    seconds = np.empty((repeats, len(names)))
    for turn in range(-warmup, repeats):
        for i in range(len(names)):
            j = (i + turn) % len(names)
            elapsed = clock(functions[names[j]])
            if turn >= 0:
                seconds[turn, j] = elapsed
    medians = np.median(seconds, axis=0)
    ratios = np.median(seconds / seconds[:, :1], axis=0)
    return {
        name: Timing(*pair)
        for name, pair in zip(names, np.stack([medians, ratios], 1).tolist(), strict=True)
    }


def _cpu_seconds(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _cuda_seconds(fn: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000.0


def peak_bytes(fn: Callable[[], Any], *, device: str | torch.device) -> int:
    """Return the peak memory of PyTorch during `fn()`, in bytes, beyond what it held before.

    It includes buffers inside fused kernels and the result of `fn`; on CUDA it is taken from the
    allocator's statistics, on the CPU from the profiler's log of allocations. It excludes inputs
    that exist already, memory of other libraries, and buffers that CPU worker threads allocate. A
    fused CPU kernel has a buffer per thread, so its peak depends on the number of threads, but not
    on N².

    Parameters
    ----------
    fn : callable
        Called twice without arguments; the first call sets up workspaces and is not measured.
    device : str or torch.device
        Where `fn` computes: memory of another device is not counted.
    """
    device = torch.device(device)
    fn()
    if device.type != "cuda":
        with (
            _without_collector(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log,
        ):
            result = fn()
        return _highest(log)
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _highest(log: profile) -> int:
    """Return the highest running sum of the allocations and releases in a CPU profile."""
    profiler: Any = log.profiler
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    events = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(max(np.cumsum([0, *changes])))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep older garbage until the end, and standard error clear of what the profiler writes."""
    saved, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    collects = gc.isenabled()
    os.dup2(devnull, 2)
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(devnull)


def machine() -> dict[str, Any]:
    """Describe the machine, to be stored with measurements.

    Returns
    -------
    dict
        ``processor``, ``cores`` (available to this process), ``threads`` (of PyTorch),
        ``gpu`` and ``driver`` (None without CUDA), ``torch``, ``python``, ``date`` (ISO 8601).
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cuda = torch.cuda.is_available()
    return {
        "processor": _processor(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _driver() if cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            names = [line.partition(":")[2].strip() for line in info if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return answer.strip().splitlines()[0] if answer.strip() else None


class Call(NamedTuple):
    """The arguments of a layer's mechanism: q, k, v of shapes (B, H, N, D), and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


@contextmanager
def record_calls(model: nn.Module) -> Iterator[list[Call]]:
    """Record the arguments of the mechanisms of a model's attention layers, in the block.

    Parameters
    ----------
    model : nn.Module
        With layers such as `MultiheadAttention`, whose `attention` is a function.

    Yields
    ------
    list of Call
        Initially empty; every call of a mechanism appends one. Its q, k and v are detached.

    Raises
    ------
    ValueError
        If `model` has no such layer.

    Examples
    --------
    >>> from derived_attention import MultiheadAttention
    >>> layer, x = MultiheadAttention(8, 2), torch.zeros(1, 5, 8)
    >>> with record_calls(layer) as calls:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> calls[0].q.shape
    torch.Size([1, 2, 5, 4])
    """
    layers: list[Any] = [m for m in model.modules() if callable(vars(m).get("attention"))]
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__}; expected a layer whose attention is a function"
        )
    calls: list[Call] = []

    def recording(attention: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(attention)
        def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            calls.append(Call(q.detach(), k.detach(), v.detach(), options))
            return attention(q, k, v, **options)

        return call

    originals = [layer.attention for layer in layers]
    try:
        for layer, attention in zip(layers, originals, strict=True):
            layer.attention = recording(attention)
        yield calls
    finally:
        for layer, attention in zip(layers, originals, strict=True):
            layer.attention = attention


def at_least(x: float, digits: int = 2) -> str:
    """Format a lower bound, rounded down to `digits` decimals, so that it remains a bound.

    Raises
    ------
    ValueError
        If `x` is not finite.

    Examples
    --------
    >>> at_least(0.5153), at_most(0.5153), at_most(0.3, 1)
    ('0.51', '0.52', '0.3')
    """
    return _rounded(x, digits, ROUND_FLOOR)


def at_most(x: float, digits: int = 2) -> str:
    """Format an upper bound, rounded up: see `at_least`."""
    return _rounded(x, digits, ROUND_CEILING)


def _rounded(x: float, digits: int, direction: str) -> str:
    if not math.isfinite(x):
        raise ValueError(f"x is {x}; expected a finite number")
    exact = Decimal(f"{float(x):.12g}")  # without rounding errors: 0.1 + 0.2 is 0.3
    return f"{exact.quantize(Decimal(1).scaleb(-digits), direction) + 0:f}"


def numerical_rank(A: ArrayLike | Tensor, tol: float) -> Tensor:
    r"""Count the singular values :math:`\sigma_i > \mathrm{tol} \cdot \sigma_1` of each map.

    Parameters
    ----------
    A : Tensor, shape (..., N, M)
        Attention maps. A map of zeros has rank 0.
    tol : float
        In [0, 1), relative to the largest singular value. Maps computed in float32 have errors
        of about 1e-7 times their size.

    Returns
    -------
    Tensor of int64, shape (...)

    Raises
    ------
    ValueError
        If `tol` is out of range, or `A` is invalid as in `effective_rank`.
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol is {tol}; expected 0 <= tol < 1")
    return torch.linalg.matrix_rank(_maps(A), rtol=tol)


def effective_rank(A: ArrayLike | Tensor) -> Tensor:
    r"""Return the exponential of the entropy of the normalised singular values of each map.

    :math:`\exp(-\sum_i p_i \ln p_i)` with :math:`p_i = \sigma_i / \sum_j \sigma_j`, after Roy
    and Vetterli, *The effective rank: a measure of effective dimensionality*, EUSIPCO 2007. It
    is r for r equal singular values, 1 for a map of rank 1, and 0 for a map of zeros.

    Parameters
    ----------
    A : Tensor, shape (..., N, M)
        Attention maps.

    Returns
    -------
    Tensor of float64, shape (...)

    Raises
    ------
    ValueError
        If `A` has fewer than 2 axes, is empty, or has an entry that is not finite.
    """
    sigma = torch.linalg.svdvals(_maps(A))
    total = sigma.sum(-1, keepdim=True)
    p = sigma / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def _maps(A: ArrayLike | Tensor) -> Tensor:
    """Check `A`, and return it in float64, detached."""
    A = torch.as_tensor(A).detach().double()
    if A.ndim < 2 or A.numel() == 0:
        raise ValueError(f"A has shape {tuple(A.shape)}; expected at least 2 axes and one entry")
    if not A.isfinite().all():
        raise ValueError("A has an entry that is NaN or infinite; expected finite numbers")
    return A
