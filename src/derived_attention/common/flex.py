"""Softmax attention under a pattern by PyTorch's FlexAttention, which skips blocks without a pair.

A pattern is a function of a query's position i, a key's position j and some whole numbers, such as
the width of a window. FlexAttention compiles it into a kernel. The kernel computes the scores of
128 queries and 128 keys at a time, for those blocks that hold a pair. A table lists these blocks.
It is made once for a pattern, its numbers and the lengths, on the device, without an (N, M) matrix
and without waiting, and then kept. The numbers are tensors, so that one kernel serves all of them.

``torch.compile`` compiles a function again for each new shape, layout and mode of gradients. After
eight times it falls back silently to the eager form, which stores (N, M) scores. So each kind of
call has a compiled function of its own here. A kind includes the shapes, and sees one of each:
FlexAttention's kernels are faster for a length that they know to be a multiple of 128. A kind of
call that has met `STATIC` shapes compiles one more function, for shapes of any size. Each compiled
function has to be one graph, so that an excess of recompilations raises an error.

With ``TRITON_INTERPRET=1``, and on a CPU, where the kernel has no gradients, PyTorch's own formula
of FlexAttention runs instead, uncompiled, and stores the scores: that is for tests.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from derived_attention.common import kernels
from derived_attention.common.checks import autocasts
from derived_attention.common.kernels import should_run_kernel, uses_interpreter
from derived_attention.common.masks import Mask

BLOCK = 128  # queries and keys of a block, FlexAttention's own choice
ENTRIES = 2**24  # of pairs at a time, where blocks are sought
NARROWEST, WIDEST = 16, 256  # features of a query or a value on a GPU
STATIC = 8  # shapes for which a kind of call has kernels of their own
UNLIMITED = 2**30  # a number that is larger than any distance

Pattern = Callable[..., Tensor]  # of i, j and the numbers: whether query i attends key j


def runs(kernel: str, fused: bool | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
    """Return whether FlexAttention runs: if `fused` is True, or None where a trial agreed.

    `kernel` is the name of the mechanism in the registry, which the trial calls.

    Raises
    ------
    TypeError, ValueError
        As `common.kernels.should_run_kernel`; and if `fused` is True for a mask of numbers, for a
        number of features that the kernel does not take, or under autocast to another dtype than
        that of q.
    """
    if fused is None and q.device.type not in kernels.GPUS:
        return False
    obstacle = _obstacle(q, v, mask)

    def problem() -> dict[str, Any] | None:
        if obstacle:
            return None
        kind = "causal" if mask.is_causal else "keys" if mask.given is not None else ""
        return {"kernel": kernel, "D": q.shape[-1], "DV": v.shape[-1], "mask": kind}

    given = (q, k, v) if mask.given is None else (q, k, v, mask.given)
    if not should_run_kernel(fused, *given, problem=problem):
        return False
    if obstacle:
        raise ValueError(f"fused is True, and {obstacle}")
    return 0 not in (q.numel(), k.numel(), v.numel())


def _obstacle(q: Tensor, v: Tensor, mask: Mask) -> str:
    """Return what FlexAttention does not take, or nothing."""
    if mask.given is not None and mask.given.dtype != torch.bool:
        return f"attn_mask has dtype {mask.given.dtype}; expected torch.bool"
    widths, least = sorted((q.shape[-1], v.shape[-1])), NARROWEST if q.is_cuda else 1
    if widths[0] < least or widths[1] > WIDEST:
        return f"q and v have {widths} features; expected from {least} to {WIDEST}"
    if autocasts(q.device) and torch.get_autocast_dtype(q.device.type) != q.dtype:
        return f"autocast is on, and q has dtype {q.dtype}; expected that of autocast, or none"
    return ""


def attend(
    pattern: Pattern, numbers: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor,
    keys: Tensor | None = None, scale: float | None = None, *, lse: bool = False,
) -> Any:  # fmt: skip
    """Attend under a pattern: q (..., H, N, D), k (..., H or 1, M, D), v (..., H or 1, M, Dv).

    Parameters
    ----------
    pattern : callable
        A function of a module, ``pattern(i, j, *numbers)``.
    numbers : tuple of int
        The numbers of the pattern.
    keys : Tensor, optional
        Boolean, (..., H or 1, 1, M): which keys may be attended.
    lse : bool
        Whether to return the pair of the result and the logarithms (..., H, N) of the sums of the
        exponentials of all scores, -inf for a query without a key. Both have gradients.
    """
    N, M, shape = q.shape[-2], k.shape[-2], q.shape[:-1]
    q, k, v = (_four_dims(x) for x in (q, k, v))
    blocks, tensors = _blocks(pattern, numbers, N, M, keys is not None, q.device)
    if keys is not None:
        keys = keys.expand(*shape[:-2], *keys.shape[-3:-2], 1, M).reshape(len(q), -1, M)
        blocks = copy.copy(blocks)
        blocks.mask_mod = _pair(pattern, tensors, keys.expand(-1, q.shape[1], -1))
    scale, run = scale or q.shape[-1] ** -0.5, _call
    if uses_interpreter() or q.device.type == "cpu":
        run = _formula
    elif not torch.compiler.is_compiling():
        run = _kernel_for((pattern, keys is None, scale, lse), q, k, v)
    out, logs = run(q, k, v, blocks, scale, lse)
    out = out.reshape(*shape, v.shape[-1])
    return (out, logs.reshape(shape)) if lse else out


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merge the results of `attend`, with their logarithms, for two disjoint sets of keys."""
    (a, log_a), (b, log_b) = one, other
    share = (log_b - log_a.clamp(min=-1e30)).sigmoid()  # of the other; 0 if both have no key
    return a.lerp(b, share.unsqueeze(-1).to(a.dtype))


def _four_dims(x: Tensor) -> Tensor:
    x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _pair(pattern: Pattern, numbers: tuple[Tensor, ...], keys: Tensor | None = None) -> Pattern:
    """Return what FlexAttention calls for a sequence, a head, a query and a key."""

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        keep = pattern(i, j, *numbers)
        return keep if keys is None else keep & keys[b, h, j]

    return attends


@functools.lru_cache(maxsize=64)
def _blocks(
    pattern: Pattern, numbers: tuple[int, ...], N: int, M: int, masked: bool, device: torch.device
) -> tuple[Any, tuple[Tensor, ...]]:
    """Return a `BlockMask` of the blocks that hold a pair, and the numbers as tensors.

    Blocks of nothing but pairs are listed apart, unless keys are masked, because the kernel does
    not call the pattern for them.
    """
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False), torch.no_grad():
        tensors = tuple(torch.full((), n, dtype=torch.int32, device=device) for n in numbers)
        rows, columns = -(-N // BLOCK), -(-M // BLOCK)
        j = torch.arange(columns * BLOCK, dtype=torch.int32, device=device)
        step, some, every = max(1, ENTRIES // (BLOCK * len(j))), [], []
        for first in range(0, rows * BLOCK, step * BLOCK):
            i = torch.arange(first, min(first + step * BLOCK, rows * BLOCK), device=device)[:, None]
            keep = pattern(i.int(), j, *tensors) & (i < N) & (j < M)
            keep = keep.view(-1, BLOCK, columns, BLOCK)
            some.append(keep.any(3).any(1))
            every.append(keep.all(3).all(1))
        holds, full = torch.cat(some), torch.cat(every) & (not masked)
        lists = *_list_blocks(holds & ~full), *_list_blocks(full)
        return BlockMask.from_kv_blocks(*lists, BLOCK, _pair(pattern, tensors), (N, M)), tensors


def _list_blocks(holds: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and a permutation that begins with them."""
    order = holds.int().argsort(dim=-1, descending=True, stable=True)
    return holds.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _call(
    q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, lse: bool
) -> tuple[Tensor, Any]:
    from torch.nn.attention import flex_attention as flex

    how: Any = {"block_mask": blocks, "scale": scale, "enable_gqa": True}
    if not lse:
        return flex.flex_attention(q, k, v, **how), None
    request = getattr(flex, "AuxRequest", None)  # since PyTorch 2.9
    how |= {"return_aux": request(lse=True)} if request else {"return_lse": True}
    out, logs = flex.flex_attention(q, k, v, **how)
    return out, getattr(logs, "lse", logs)


_shapes: dict[Any, set[Any]] = {}  # those with a kernel of their own, by the kind of call


def _kernel_for(kind: tuple[Any, ...], *tensors: Tensor) -> Callable[..., Any]:
    """Return the compiled function for a kind of call with q, k and v of these shapes."""
    q, k, _ = tensors
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocasts(q.device)
    kind += (*modes, q.dtype, q.device, *((x.requires_grad, x.shape[1::2]) for x in tensors))
    own = tuple((x.shape, x.stride()) for x in tensors)
    known = _shapes.setdefault(kind, set())
    if len(known) < STATIC:
        known.add(own)
    if own in known:
        return _kernel(False, kind, own)
    N, M = q.shape[-2], k.shape[-2]  # a compiler distinguishes what follows at any size
    special = len(q) == 1, N == M, N <= BLOCK, M <= BLOCK, *(x.is_contiguous() for x in tensors)
    return _kernel(True, kind, special)


@functools.cache
def _kernel(dynamic: bool, *kind: Any) -> Callable[..., Any]:
    """Return a compiled function with its own code, because PyTorch counts compilations by code."""
    own = types.FunctionType(_call.__code__.replace(co_name="flex_attention_of_a_kind"), globals())
    return torch.compile(own, fullgraph=True, dynamic=dynamic)


def _formula(
    q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float, lse: bool
) -> tuple[Tensor, Tensor]:
    """Compute what FlexAttention's kernel does by its own formula, which stores all scores."""
    from torch._higher_order_ops.flex_attention import flex_attention

    def score(s: Tensor, *place: Tensor) -> Tensor:
        return s

    out, logs, *_ = flex_attention(q, k, v, score, blocks.as_tuple(), scale, {})
    return out, logs * math.log(2)
