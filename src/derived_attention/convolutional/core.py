"""Attention-Conv1D and -Conv2D: convolve queries and keys, then attend (chapter 6).

The equation of this module, eqs. 43 and 45 of [Nguyen2023], is ::

    h_i = Σ_j softmax_j( Conv(Q)_iᵀ Conv(K)_j / √D ) v_j

where Conv is a convolution along the sequence, or along the two sides of a grid of tokens, that
treats all D channels alike. So it is one matrix C that mixes the tokens, Conv(Q) = C Q, and ::

    H = softmax(C Q Kᵀ Cᵀ / √D) V

The scores are convolved on both sides, and C commutes with any projection W that has no bias:
(C X) W = C (X W). A convolution with a filter for each channel is no such matrix.

`formulas.mixing_matrix` returns C, and the references multiply by it. So do `conv1d_attention` and
`conv2d_attention` for few tokens; for more they add shifted copies of Q and K, and do not store C.
As in PyTorch, "convolution" slides the filter without flipping it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    accumulation_dtype,
    check_callable,
    check_count,
    check_flag,
    check_floating,
    check_query_mask,
)
from derived_attention.common.convention import (
    call,
    full_precision,
    is_short,
    mechanism,
    plain,
    reference,
)
from derived_attention.common.masks import Mask
from derived_attention.common.pooling import blank
from derived_attention.softmax.core import softmax_attention, softmax_attention_reference

SHORT = 64  # tokens up to which a product with C is faster than sums of shifted copies
Offsets = tuple[tuple[int, ...], ...]

# --- the formula: one matrix that mixes the tokens -----------------------------------------------


def mixing_matrix_1d(weight: Tensor, N: int, causal: bool = False) -> Tensor:
    """Return the matrix C of a convolution: (C X)_i = Σ_t w_t x_{i + t − p}, with zeros outside.

    `weight` is a filter w ``(..., s)``, such as ``(H, s)`` with one for each head, and C is
    ``(..., N, N)``, constant along its diagonals (Toeplitz), with at most s of them not 0. p is
    ⌊(s − 1) / 2⌋, the "same" padding of ``torch.nn.functional.conv1d``; if s is even, the filter
    reaches one step further after i than before it. If `causal`, p is s − 1, so that the last
    number of the filter belongs to i itself and the others to earlier steps.
    """
    check_flag("causal", causal)
    check_floating({"weight": weight})
    _check_sides("weight", weight, 1)
    return formulas.mixing_matrix(weight, (check_count("N", N, 0),), causal)


# --- the mechanisms, by sums of shifted copies ---------------------------------------------------


@mechanism(per_key=True, alone=False)
def conv1d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    weight: Any,
    key_weight: Any = None,
    query_mask: Any = None,
    attention: Any = softmax_attention,
) -> Tensor:
    """Attention-Conv1D, eq. 45 of [Nguyen2023]: s additions for each query and key, then attention.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. A masked
        key counts as 0 in the convolution of its neighbours.
    is_causal : bool
        Query i attends keys j ≤ i, and the filter ends at the position itself. With padding on both
        sides, as in eq. 45, queries and keys would depend on later tokens.
    weight : Tensor
        Filter ``(s,)`` for all heads or ``(H, s)`` for each, in the dtype of `q`, s at least 1. It
        is laid on the sequence as in `mixing_matrix_1d`.
    key_weight : Tensor, optional
        Another filter for the keys, ``(s',)`` or ``(H, s')``. The derivation of eq. 45 has one for
        both, since one feature map is applied to training and to new inputs.
    query_mask : Tensor, optional
        Boolean, broadcastable to ``(..., H, N)``: False where a query is padding, which then counts
        as 0 in the convolution of its neighbours.
    attention : callable
        The mechanism for the convolved queries and keys: `softmax_attention` or another one with
        its calling convention.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> weight = torch.tensor([0.2, 0.6, 0.2])
    >>> conv1d_attention(q, k, v, weight=weight).shape
    torch.Size([2, 4, 10, 8])
    """
    check_callable("attention", attention)
    w, w_k, q, k = _filters(q, k, mask, 1, weight, key_weight, query_mask)
    q, k = convolve(q, w, mask.is_causal), convolve(k, w_k, mask.is_causal)
    return call(attention, q, k, v, mask, scale)


@mechanism(per_key=True, alone=False)
def conv2d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    weight: Any,
    key_weight: Any = None,
    query_mask: Any = None,
    grid: Any,
    class_token: bool = False,
    attention: Any = softmax_attention,
) -> Tensor:
    """Attention-Conv2D, eq. 43 of [Nguyen2023], for tokens that lie on a grid, row by row.

    Queries and keys lie on one grid, so M = N. A grid has no past, so `is_causal` has to be False.

    Parameters
    ----------
    weight, key_weight : Tensor
        Filters ``(s1, s2)`` for all heads or ``(H, s1, s2)`` for each, as in `conv1d_attention`,
        laid along both sides of the grid as in `mixing_matrix_1d`.
    grid : (int, int)
        Rows N_H and columns N_W, with N = N_H N_W.
    class_token : bool
        Whether one more token comes first, N = 1 + N_H N_W, which is not convolved.
    query_mask, attention
        As in `conv1d_attention`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> weight = torch.full((3, 3), 1 / 9)
    >>> conv2d_attention(q, k, v, weight=weight, grid=(2, 5)).shape
    torch.Size([2, 4, 10, 8])
    """
    check_callable("attention", attention)
    check_places({"q": q, "k": k}, grid, class_token, mask.is_causal)
    w, w_k, q, k = _filters(q, k, mask, 2, weight, key_weight, query_mask)
    q, k = convolve_grid(q, w, grid, class_token), convolve_grid(k, w_k, grid, class_token)
    return call(attention, q, k, v, mask, scale)


def _filters(
    q: Tensor, k: Tensor, mask: Mask, sides: Any, weight: Any, key_weight: Any, query_mask: Any
) -> tuple[Tensor, ...]:
    """Return the filters of queries and keys, checked, and q and k with 0 for absent tokens."""
    w = w_k = _per_head("weight", weight, q, sides)
    if key_weight is not None:
        w_k = _per_head("key_weight", key_weight, q, sides)
    if query_mask is not None:
        check_query_mask(query_mask, q)
        q = blank(q, query_mask)
    return w, w_k, q, k if mask.given is None else blank(k, mask.present(k.shape[-2]))


def convolve_grid(x: Tensor, weight: Tensor, grid: tuple[int, int], class_token: bool) -> Tensor:
    """Convolve (..., H, N, D) on its grid, and leave a class token as it is."""
    places = x[..., int(class_token) :, :].unflatten(-2, grid)  # (..., H, N_H, N_W, D)
    mixed = convolve(places, weight).flatten(-3, -2)
    return torch.cat([x[..., :1, :], mixed], -2) if class_token else mixed


def convolve(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    """Convolve (..., H, N, D) with (H or 1, s), or (..., H, N_H, N_W, D) with (H or 1, s1, s2)."""
    heads = x if x.dim() > weight.dim() else x.unsqueeze(0)
    tokens = heads.flatten(-weight.dim(), -2)  # (..., H, N, D)
    if is_short(tokens, tokens, SHORT):
        C = formulas.mixing_matrix(weight, x.shape[-weight.dim() : -1], causal)
        with full_precision(x.device):
            dtype = accumulation_dtype(x)
            return (C.to(dtype) @ tokens.to(dtype)).to(x.dtype).view_as(x)
    offsets = tap_offsets(tuple(weight.shape[1:]), causal)
    return _ShiftedSum.apply(heads, weight.flatten(1), offsets).view_as(x)


@functools.cache
def tap_offsets(sizes: tuple[int, ...], causal: bool) -> Offsets:
    """Return the step from a position to the one that each tap multiplies, along each side."""
    steps = (range(-taps_before(s, causal), s - taps_before(s, causal)) for s in sizes)
    return tuple(itertools.product(*steps))


def taps_before(s: int, causal: bool = False) -> int:
    """Return how many taps of a filter precede the one for the position itself: p."""
    return s - 1 if causal else (s - 1) // 2


class _ShiftedSum(torch.autograd.Function):
    """C X as Σ_t w_t · (X shifted by the t-th offset), with no copy stored but the sum.

    The gradient with respect to X is Cᵀ G: the same sum, with the offsets reversed.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
        """Return C X for X (..., H, ·, D), weight (H or 1, taps), computed in float32 at least."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        taps = weight.to(dtype).T.reshape(*weight.T.shape, *(1,) * (len(offsets[0]) + 1))
        inputs = x.to(dtype).contiguous()
        centre = offsets.index((0,) * len(offsets[0]))
        out = inputs * taps[centre]
        for t, (target, source) in enumerate(_overlaps(out, inputs, offsets)):
            if t != centre:
                target.addcmul_(source, taps[t])
        return out.to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors of the backward pass."""
        x, weight, ctx.offsets = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to X and weight."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        reverse = tuple(tuple(-o for o in offset) for offset in ctx.offsets)
        dx = _ShiftedSum.apply(grad, weight, reverse) if ctx.needs_input_grad[0] else None
        dw = _products(grad, x, ctx.offsets) if ctx.needs_input_grad[1] else None
        return dx, None if dw is None else dw.sum_to_size(weight.shape).to(weight.dtype), None


def _products(grad: Tensor, x: Tensor, offsets: Offsets) -> Tensor:
    """Return Σ_i g_i · x_{i + o_t} for each head and tap: (H, taps)."""
    grad, x = grad.to(accumulation_dtype(x)), x.to(accumulation_dtype(x))
    head = x.dim() - len(offsets[0]) - 2
    others = [d for d in range(x.dim()) if d != head]
    pairs = _overlaps(grad, x, offsets)
    return torch.stack([(g * source).sum(others) for g, source in pairs], -1)


def _overlaps(y: Tensor, x: Tensor, offsets: Offsets) -> list[tuple[Tensor, Tensor]]:
    """View, for each offset, the positions i of y (..., ·, D) with i + offset in x, and those."""
    views = []
    for offset in offsets:
        target, source = y, x
        for dim, o in enumerate(offset, -1 - len(offset)):
            n = x.shape[dim]
            length = max(0, n - abs(o))
            target = target.narrow(dim, min(max(0, -o), n), length)
            source = source.narrow(dim, min(max(0, o), n), length)
        views.append((target, source))
    return views


# --- checks --------------------------------------------------------------------------------------


def _check_sides(name: str, weight: Tensor, sides: int) -> None:
    """Check for filters (..., s) or (..., s1, s2) with at least one number each."""
    if weight.dim() < sides or 0 in weight.shape[-sides:]:
        expected = ("(..., s)", "(..., s1, s2)")[sides - 1]
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; expected {expected}, with at least one number"
        )


def _per_head(name: str, weight: Tensor, q: Tensor, sides: int) -> Tensor:
    """Check a filter against q, and return it as (H, ...), or (1, ...) for all heads."""
    heads = q.shape[-3] if q.dim() > 2 else 1
    if (
        isinstance(weight, Tensor) and weight.dim() == sides and weight.numel()
        and weight.dtype == q.dtype and weight.device == q.device
    ):  # fmt: skip
        return weight.unsqueeze(0)
    check_floating({"q": q, name: weight})
    _check_sides(name, weight, sides)
    if weight.dim() > sides and tuple(weight.shape[:-sides]) != (heads,):
        size = ("s,", "s1, s2")[sides - 1]
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; expected ({size}), or "
            f"({heads}, {size.rstrip(',')}) with a filter for each head of q"
        )
    return weight if weight.dim() > sides else weight.unsqueeze(0)


def check_grid(grid: tuple[int, int], least: int = 0) -> tuple[int, int]:
    """Check for two whole numbers, each at least `least`."""
    is_sequence = isinstance(grid, Sequence) and not isinstance(grid, str)
    if not is_sequence or len(grid) != 2:
        error = ValueError if is_sequence else TypeError
        raise error(f"grid is {grid!r}; expected two whole numbers, (rows, columns)")
    for i, value in enumerate(grid):
        if value.__class__ is not int or value < least:
            check_count(f"grid[{i}]", value, least)
    return grid[0], grid[1]


def check_places(
    tokens: dict[str, Tensor], grid: tuple[int, int], class_token: bool, is_causal: bool
) -> None:
    """Check that all tokens (..., N, D) have a place on the grid."""
    rows, columns = check_grid(grid)
    if class_token.__class__ is not bool:
        check_flag("class_token", class_token)
    if is_causal:
        raise ValueError("is_causal is True; expected False: tokens on a grid have no order")
    N = rows * columns + class_token
    for name, x in tokens.items():
        if x.shape[-2] != N:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected {N} tokens, for the grid "
                f"{rows} x {columns} with{'' if class_token else 'out'} a class token"
            )


# --- the formulas, with the same arguments ---


@reference(conv1d_attention, formulas.conv1d, alone=False)
def conv1d_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, weight: Any, key_weight:
    Any = None, query_mask: Any = None, attention: Any = softmax_attention_reference,
) -> dict[str, Any]:  # fmt: skip
    """Check the filters."""
    weight, key_weight, *_ = _filters(q, k, mask, 1, weight, key_weight, query_mask)
    filters = {"weight": weight, "key_weight": key_weight, "query_mask": query_mask}
    return filters | {"attention": plain(attention)}


@reference(conv2d_attention, formulas.conv2d, alone=False)
def conv2d_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, weight: Any, key_weight:
    Any = None, query_mask: Any = None, grid: Any, class_token: Any = False, attention: Any =
    softmax_attention_reference,
) -> dict[str, Any]:  # fmt: skip
    """Check the filters, and that tokens have places."""
    check_places({"q": q, "k": k}, grid, class_token, mask.is_causal)
    weight, key_weight, *_ = _filters(q, k, mask, 2, weight, key_weight, query_mask)
    filters = {"weight": weight, "key_weight": key_weight, "query_mask": query_mask}
    return filters | {"grid": grid, "class_token": class_token, "attention": plain(attention)}
