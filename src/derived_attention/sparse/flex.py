"""Window attention by PyTorch's FlexAttention: one kernel, which skips blocks without a pair.

FlexAttention compiles a kernel for a function of two positions that returns whether they attend. It
computes the scores of 128 queries and 128 keys at a time, of all such blocks that hold a pair; a
table of these blocks is made once for a window and its lengths, on the device, without an (N, M)
matrix and without waiting. For a window of w keys that is little more than the pairs themselves.

With ``TRITON_INTERPRET=1``, and on a CPU, where the kernel has no gradients, PyTorch's own formula
of FlexAttention runs in its place, uncompiled, and stores the scores: that is for tests.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.checks import autocasts
from derived_attention.common.kernels import should_run_kernel, uses_interpreter
from derived_attention.common.masks import Mask

BLOCK = 128  # queries and keys of a block, FlexAttention's own choice
ENTRIES = 2**24  # of pairs at a time, where blocks are sought
WIDEST = 256  # features of a query or a value


def runs(fused: bool | None, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> bool:
    """Return whether FlexAttention is to run: if `fused` is True, or None where it was tried.

    Raises
    ------
    TypeError, ValueError
        As `common.kernels.should_run_kernel`; and if `fused` is True for a mask of numbers,
        for more than `WIDEST` features, or under autocast to another dtype than q has.
    """
    if fused is None and not q.is_cuda:
        return False
    obstacle = _obstacle(q, v, mask)

    def problem() -> dict[str, Any] | None:
        if obstacle:
            return None
        kind = "causal" if mask.is_causal else "keys" if mask.given is not None else ""
        return {"kernel": "window", "D": q.shape[-1], "DV": v.shape[-1], "mask": kind}

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
    if (width := max(q.shape[-1], v.shape[-1])) > WIDEST:
        return f"q or v has {width} features; expected at most {WIDEST}"
    if autocasts(q.device) and torch.get_autocast_dtype(q.device.type) != q.dtype:
        return f"autocast is on, and q has dtype {q.dtype}; expected that of autocast, or none"
    return ""


def attend(window: int, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend in a window: q (..., H, N, D), k (..., H or 1, M, D), v (..., H or 1, M, Dv)."""
    N, M, shape = q.shape[-2], k.shape[-2], q.shape[:-1]
    column = None
    if mask.given is not None:  # (B, H or 1, M); the formula has a dimension for each of the four
        column = mask.given.expand(*mask.given.shape[:-1], M).squeeze(-2)
        heads = column.shape[-2:-1] if column.dim() > 1 else (1,)
        column = column.expand(*shape[:-2], *heads, M).reshape(-1, *heads, M)
        column = column.expand(-1, shape[-2] if len(shape) > 1 else 1, -1)
    q, k, v = (_four_dims(x) for x in (q, k, v))
    blocks = _blocks(window, N, M, mask.is_causal, column is not None, q.device)
    if column is not None:
        blocks = copy.copy(blocks)
        blocks.mask_mod = _pair(_window_tensor(q.device, window), mask.is_causal, column)
    run = (
        _formula
        if uses_interpreter() or q.device.type == "cpu"
        else _kernel(
            mask.is_causal,
            column is not None,
            q.dtype,
            q.shape[1::2],
            k.shape[1],
            v.shape[-1],
        )
    )
    return run(q, k, v, blocks, scale or q.shape[-1] ** -0.5).reshape(*shape, v.shape[-1])


def _four_dims(x: Tensor) -> Tensor:
    x = x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=64)
def _window_tensor(device: torch.device, window: int) -> Tensor:
    """Return a window as a tensor: the kernel is compiled for all, not for each."""
    return torch.full((), window, dtype=torch.int32, device=device)


def _pair(window: Tensor, is_causal: bool, column: Tensor | None = None) -> Callable[..., Tensor]:
    """Return what FlexAttention asks for a sequence, a head, a query and a key."""

    def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        keep = (i - j).abs() <= window
        if is_causal:
            keep = keep & (j <= i)
        return keep if column is None else keep & column[b, h, j]

    return attends


@functools.lru_cache(maxsize=64)
def _blocks(
    window: int, N: int, M: int, is_causal: bool, masked: bool, device: torch.device
) -> Any:
    """Return a table of the blocks that hold a pair of a window, a `BlockMask`.

    Blocks of nothing but pairs are listed apart, as they need not ask for each; but for a mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    with torch.inference_mode(False), torch.no_grad():
        pair = _pair(_window_tensor(device, window), is_causal)
        rows, columns = -(-N // BLOCK), -(-M // BLOCK)
        j = torch.arange(columns * BLOCK, dtype=torch.int32, device=device)
        step, some, every = max(1, ENTRIES // (BLOCK * len(j))), [], []
        for first in range(0, rows, step):
            count = min(step, rows - first)
            i = torch.arange(first * BLOCK, (first + count) * BLOCK, device=device)[:, None]
            keep = pair(j, j, i.int(), j) & (i < N) & (j < M)
            keep = keep.view(count, BLOCK, columns, BLOCK)
            some.append(keep.any(3).any(1))
            every.append(keep.all(3).all(1))
        holds, full = torch.cat(some), torch.cat(every) & (not masked)
        how: Any = {"BLOCK_SIZE": BLOCK, "mask_mod": pair, "seq_lengths": (N, M)}
        return BlockMask.from_kv_blocks(*_list_blocks(holds & ~full), *_list_blocks(full), **how)


def _list_blocks(holds: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row has, and a permutation that begins with them."""
    order = holds.int().argsort(dim=-1, descending=True, stable=True)
    return holds.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _call(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)  # type: ignore


@functools.cache
def _kernel(*kind: Any) -> Callable[..., Tensor]:
    """Return a compiled function for problems of a kind.

    It has its own code, as PyTorch counts how often it compiles one, and stops at a limit. One kind
    is compiled for one length, for any, for one sequence and for one block.
    """
    own = types.FunctionType(_call.__code__.replace(co_name="flex_window"), globals())
    return torch.compile(own, fullgraph=True)


def _formula(q: Tensor, k: Tensor, v: Tensor, blocks: Any, scale: float) -> Tensor:
    """Compute what FlexAttention's kernel does by its own formula, which stores all scores."""
    from torch._higher_order_ops.flex_attention import flex_attention

    def score(s: Tensor, *place: Tensor) -> Tensor:
        return s

    return flex_attention(q, k, v, score, blocks.as_tuple(), scale, {})[0]
