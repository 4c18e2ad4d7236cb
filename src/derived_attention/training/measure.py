"""What attention costs, counted and measured, and what its maps look like.

Counts are plain arithmetic: integers give exact integers, sympy symbols give the polynomial.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import platform
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode


def attention_flops(queries, keys, dim, value_dim=None, heads=1):
    r"""Operations of the two products of attention, :math:`QK^\top` and :math:`AV`.

    :math:`2HNM(D + D_v)`: a multiply–add is 2 operations. The softmax between them is counted by
    `normalisation_flops`, the projections around them by `projection_flops`. A mask saves
    nothing here; for heads of different lengths, add the counts.

    Parameters
    ----------
    queries, keys : int or sympy expression
        Numbers of queries N and of keys M.
    dim, value_dim : int or sympy expression
        Head dimensions D of queries and keys, and Dv of values; Dv = D if not given.
    heads : int or sympy expression, default 1
        Number of heads H.

    Returns
    -------
    int or sympy expression
        Floating-point operations.
    """
    return 2 * heads * queries * keys * (dim + (dim if value_dim is None else value_dim))


def normalisation_flops(queries, keys, heads=1):
    """Operations of a row-wise softmax: scale, maximum, subtract, exp, sum, divide.

    A row of M scores takes M multiplications by the scale, M − 1 comparisons, M subtractions,
    M exponentials, M − 1 additions and M divisions: H N (6M − 2). Each counts as 1, although an
    exponential takes longer than an addition.
    """
    return heads * queries * (6 * keys - 2)


def projection_flops(length, inputs, outputs):
    """Operations of a linear map of `length` tokens from `inputs` to `outputs` features.

    2 N (inputs · outputs); adding a bias would be N · outputs more. A layer of attention has
    four of them: queries, keys, values and output.
    """
    return 2 * length * inputs * outputs


def stored_bytes(queries, keys, heads=1, *, itemsize=4, fused=False):
    """Bytes that attention holds at its peak, besides inputs and output.

    Scores and weights, 2HNM numbers, in the N×N form; one logarithm of a row sum per query,
    HN numbers, in the fused form, which recomputes the weights from it in the backward pass.
    """
    return itemsize * heads * queries * (1 if fused else 2 * keys)


def count_flops(fn: Callable[[], Any]) -> int:
    """Operations of the matrix products that `fn` runs, counted by PyTorch while it runs.

    A multiply–add is 2 operations; elementwise work, such as a softmax, is not counted, and
    neither is what a causal mask saves. Backward passes inside `fn` are. PyTorch's counter does
    not know products that are added in place, nor the fused attention of the CPU, so their counts
    are added here; for the latter 2 products forward, 5 backward, where the scores are computed
    again.

    Parameters
    ----------
    fn : callable
        Called once, without arguments.
    """
    aten = torch.ops.aten
    more: dict[Any, Any] = {
        aten._scaled_dot_product_flash_attention_for_cpu: _fused_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _fused_backward_flops,
        aten.addmm_: _added_flops,
        aten.baddbmm_: _added_flops,
    }
    with FlopCounterMode(display=False, custom_mapping=more) as counter:
        fn()
    return counter.get_total_flops()


def _added_flops(_, left, right, **__) -> int:
    """Count a product, added in place, from the shapes (..., n, m) and (..., m, p)."""
    return 2 * math.prod(left) * right[-1]


def _fused_flops(query, key, value, *_, **__) -> int:
    """Count QKᵀ and AV from the shapes (B, H, N, D), (B, H, M, D), (B, H, M, Dv)."""
    return attention_flops(query[2], key[2], query[3], value[3], heads=query[0] * query[1])


def _fused_backward_flops(grad, query, key, value, *_, **__) -> int:
    """Count QKᵀ again, and dV, dA, dQ, dK: three products in D and two in Dv."""
    return _fused_flops(query, key, value) + attention_flops(
        query[2], key[2], 2 * query[3], value[3], heads=query[0] * query[1]
    )


class _Counted:
    """A number that counts the operations done with it, in the `counts` of its class.

    It is no float: an operation that it does not know raises TypeError, and is not overlooked.
    """

    counts: Counter[str]
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def _do(self, kind: str, value: float) -> _Counted:
        self.counts[kind] += 1
        return type(self)(value)

    def __add__(self, other: Any) -> _Counted:
        return self._do("add", self.value + float(other))

    def __sub__(self, other: Any) -> _Counted:
        return self._do("add", self.value - float(other))

    def __rsub__(self, other: Any) -> _Counted:
        return self._do("add", float(other) - self.value)

    def __mul__(self, other: Any) -> _Counted:
        return self._do("multiply", self.value * float(other))

    def __truediv__(self, other: Any) -> _Counted:
        return self._do("divide", self.value / float(other))

    def __rtruediv__(self, other: Any) -> _Counted:
        return self._do("divide", float(other) / self.value)

    __radd__, __rmul__ = __add__, __mul__

    def exp(self) -> _Counted:
        return self._do("exp", math.exp(self.value))


def count_operations(fn: Callable[..., Any], *arrays) -> Counter[str]:
    """Count every operation of ``fn(*arrays)``, one by one, while NumPy does them.

    The arrays are handed over as NumPy arrays of numbers that count. A product of matrices, of
    n × m by m × p, takes npm multiplications and np(m − 1) additions; a sum of n numbers n − 1
    additions. What `fn` turns into plain numbers, by ``x.astype(float)``, counts no more. An
    operation for each scalar: meant for small arrays, as a judge of formulas.

    Parameters
    ----------
    fn : callable
        Adds, subtracts, multiplies, divides, and may call ``np.exp``; nothing else.
    arrays : array_like
        Its arguments, real.

    Returns
    -------
    collections.Counter
        How many of each kind: ``"add"`` (subtractions too), ``"multiply"``, ``"divide"``,
        ``"exp"``. ``counts.total()`` is the number of all.

    Raises
    ------
    TypeError
        For an operation of `fn` that is none of these.

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


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated calls, in seconds, and the number of calls.

    `ratio` is the median over rounds of this time divided by the first function's time in the
    same round, so that a slow minute of the machine cancels; 1 for a function timed alone.
    """

    median: float
    q1: float
    q3: float
    repeats: int
    ratio: float = 1.0


def time_call(
    fn: Callable[[], Any],
    *,
    repeats: int = 20,
    warmup: int = 3,
    device: str | torch.device | None = None,
) -> Timing:
    """Time `fn()`: median and quartiles over `repeats` calls after `warmup` calls.

    Parameters
    ----------
    fn : callable
        Called without arguments.
    repeats, warmup : int
        Calls that are timed, at least 1, and calls before them that are not, at least 0.
    device : str or torch.device, optional
        Where `fn` works. CUDA is timed by its own events, everything else by the clock. By
        default CUDA where there is one.

    Raises
    ------
    ValueError
        If `repeats` or `warmup` is too small.
    """
    return compare({"fn": fn}, repeats=repeats, warmup=warmup, device=device)["fn"]


def compare(
    functions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int = 20,
    warmup: int = 3,
    device: str | torch.device | None = None,
) -> dict[str, Timing]:
    """Time several functions in one run, a call of each per round.

    Every round starts with another function, so that none has a place of its own in the order.
    Parameters and errors are those of `time_call`; `functions` must not be empty.

    Returns
    -------
    dict of str to Timing
        In the order of `functions`; each `ratio` is to the first.
    """
    if not functions:
        raise ValueError("functions must hold at least one function, got none")
    if repeats < 1 or warmup < 0:
        raise ValueError(
            f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}"
        )
    names = list(functions)
    # torch.utils.benchmark has no rounds, and makes three calls at least of one function at a time.
    clock = _cuda_seconds if _device(device).type == "cuda" else _cpu_seconds
    seconds = np.empty((repeats, len(names)))
    for turn in range(-warmup, repeats):
        for i in range(len(names)):
            j = (i + turn) % len(names)
            taken = clock(functions[names[j]])
            if turn >= 0:
                seconds[turn, j] = taken
    q1, median, q3 = np.quantile(seconds, [0.25, 0.5, 0.75], axis=0)
    ratio = np.median(seconds / seconds[:, :1], axis=0)
    return {
        name: Timing(float(median[j]), float(q1[j]), float(q3[j]), repeats, float(ratio[j]))
        for j, name in enumerate(names)
    }


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


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


def peak_bytes(fn: Callable[[], Any], *, device: str | torch.device | None = None) -> int:
    """Most memory that PyTorch holds during `fn()` beyond what it held before.

    Counts every allocation of PyTorch's allocator on the device, buffers inside fused kernels
    and the result of `fn` included: on CUDA from its statistics, on the CPU from the profiler's
    log of allocations. Not counted: inputs that exist already, memory of other libraries, and
    CPU buffers that worker threads allocate for themselves. A fused CPU kernel has a buffer per
    thread, so its peak depends on the number of threads, but not on N².

    Parameters
    ----------
    fn : callable
        Called twice without arguments; the first call sets up workspaces and is not counted.
    device : str or torch.device, optional
        Where `fn` works, by default CUDA where there is one.

    Returns
    -------
    int
        Bytes, at least 0.
    """
    device = _device(device)
    fn()
    gc.collect()
    if device.type != "cuda":
        with (
            _quiet_stderr(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log,
        ):
            result = fn()
        return _highest(log)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def _highest(log: profile) -> int:
    """Highest running sum of the allocations and releases that the profiler saw on the CPU."""
    seen: Any = log.profiler
    events = [e for e in seen.kineto_results.events() if e.name() == "[memory]"]
    events = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return int(max(np.cumsum([0, *changes])))


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Silence the profiler, which writes tracing lines to the file of standard error."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def machine() -> dict[str, Any]:
    """Describe where numbers come from: to be stored beside them.

    Returns
    -------
    dict
        ``processor``, ``cores`` (that this process may use), ``threads`` (that PyTorch uses),
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
    """What a layer handed to its mechanism: q, k, v of shapes (B, H, N, D), and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """Record what the attention layers in `model` hand to their mechanisms, while it runs.

    Parameters
    ----------
    model : nn.Module
        With layers such as `MultiheadAttention`, whose `attention` is a function.

    Yields
    ------
    list of Call
        Empty at first; every call of a mechanism adds one, in order. Tensors are detached.

    Raises
    ------
    ValueError
        If there is no such layer in `model`.

    Examples
    --------
    >>> from derived_attention import MultiheadAttention
    >>> layer, x = MultiheadAttention(8, 2), torch.zeros(1, 5, 8)
    >>> with recorded(layer) as calls:
    ...     _ = layer(x, x, x, need_weights=False)
    >>> calls[0].q.shape
    torch.Size([1, 2, 5, 4])
    """
    layers: list[Any] = [m for m in model.modules() if callable(vars(m).get("attention"))]
    if not layers:
        raise ValueError(
            f"model is a {type(model).__name__} without a layer whose attention is a function"
        )
    calls: list[Call] = []

    def watched(attention: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(attention)
        def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            calls.append(Call(q.detach(), k.detach(), v.detach(), options))
            return attention(q, k, v, **options)

        return call

    before = [layer.attention for layer in layers]
    try:
        for layer, attention in zip(layers, before, strict=True):
            layer.attention = watched(attention)
        yield calls
    finally:
        for layer, attention in zip(layers, before, strict=True):
            layer.attention = attention


def head_distance(A) -> Tensor:
    r"""Mean distance between the attention maps of two heads, per query.

    .. math::

        \binom{H}{2}^{-1} \sum_{g<h} \frac{\lVert A^g - A^h \rVert_F}{\sqrt N}

    The Frobenius norm is divided by √N, so that the distance is the root mean square over the
    queries of the Euclidean distance between two rows, and lengths can be compared. For rows
    that sum to 1 it lies between 0 and √2. Papers report head distances without a definition;
    multiply by √N for plain Frobenius norms. Padding counts like everything else: slice it off
    first, ``A[:, :n, :n]``.

    Parameters
    ----------
    A : Tensor, shape (..., H, N, M)
        Attention maps of H ≥ 2 heads.

    Returns
    -------
    Tensor, shape (...)
        In float64.

    Raises
    ------
    ValueError
        If `A` has fewer than 3 axes or 2 heads, is empty, or has an entry that is not finite.
    """
    A = _maps(A, 3)
    heads, queries = A.shape[-3:-1]
    if heads < 2:
        raise ValueError(f"A must have at least 2 heads, got shape {tuple(A.shape)}")
    g, h = torch.triu_indices(heads, heads, offset=1)
    distances = torch.linalg.matrix_norm(A[..., g, :, :] - A[..., h, :, :])  # (..., pairs)
    return distances.mean(-1) / math.sqrt(queries)


def at_least(x: float, digits: int = 2) -> str:
    """Write a lower bound: rounded down, so that what is shown is true as well.

    Parameters
    ----------
    x : float
        The bound.
    digits : int
        Behind the point.

    Raises
    ------
    ValueError
        If `x` is not finite.

    Examples
    --------
    >>> at_least(0.5153), at_most(0.5153), at_most(0.3, 1)
    ('0.51', '0.52', '0.3')
    """
    return _written(x, digits, ROUND_FLOOR)


def at_most(x: float, digits: int = 2) -> str:
    """Write an upper bound, rounded up: see `at_least`."""
    return _written(x, digits, ROUND_CEILING)


def _written(x: float, digits: int, towards: str) -> str:
    if not math.isfinite(x):
        raise ValueError(f"x must be finite, got {x}")
    meant = Decimal(f"{float(x):.12g}")  # what is behind is rounding: 0.1 + 0.2 is 0.3
    return f"{meant.quantize(Decimal(1).scaleb(-digits), towards) + 0:f}"


def numerical_rank(A, tol: float) -> Tensor:
    r"""Count the singular values :math:`\sigma_i > \mathrm{tol} \cdot \sigma_1` of each map.

    Parameters
    ----------
    A : Tensor, shape (..., N, M)
        Attention maps. A map of zeros has rank 0.
    tol : float
        Between 0 and 1, relative to the largest singular value. Maps computed in float32 carry
        noise of about 1e-7 times their size.

    Returns
    -------
    Tensor of int64, shape (...)

    Raises
    ------
    ValueError
        If `tol` is not between 0 and 1, or `A` has fewer than 2 axes, is empty, or has an entry
        that is not finite.
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least 0 and below 1, got {tol}")
    return torch.linalg.matrix_rank(_maps(A, 2), rtol=tol)


def effective_rank(A) -> Tensor:
    r"""Exponential of the entropy of the normalised singular values.

    :math:`\exp(-\sum_i p_i \ln p_i)` with :math:`p_i = \sigma_i / \sum_j \sigma_j`, after Roy
    and Vetterli, *The effective rank: a measure of effective dimensionality*, EUSIPCO 2007. It
    is r for r equal singular values, and 1 for a map of rank 1; a map of zeros gets 0.

    Parameters
    ----------
    A : Tensor, shape (..., N, M)
        Attention maps.

    Returns
    -------
    Tensor, shape (...)
        In float64.

    Raises
    ------
    ValueError
        As for `head_distance`, but 2 axes are enough.
    """
    sigma = torch.linalg.svdvals(_maps(A, 2))
    total = sigma.sum(-1, keepdim=True)
    p = sigma / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(p).sum(-1).exp(), 0.0)


def _maps(A, axes: int) -> Tensor:
    """Return `A` in float64, away from autograd, after its checks."""
    A = torch.as_tensor(A).detach().double()
    if A.ndim < axes or A.numel() == 0:
        raise ValueError(
            f"A must have at least {axes} axes and an entry, got shape {tuple(A.shape)}"
        )
    if not A.isfinite().all():
        raise ValueError("A must be finite, got an entry that is NaN or infinite")
    return A
