"""Attention-Conv1D and -Conv2D: convolve queries and keys, then attend (chapter 6).

The equation of this module, eqs. 43 and 45 of [Nguyen2023], is ::

    h_i = Σ_j softmax_j( Conv(Q)_iᵀ Conv(K)_j / √D ) v_j

where Conv is a convolution along the sequence, or along the two sides of a grid of tokens, that
treats all D channels alike. So it is one matrix C that mixes the tokens, Conv(Q) = C Q, and ::

    H = softmax(C Q Kᵀ Cᵀ / √D) V

Softmax sees the scores convolved on both sides, and C commutes with any projection W that has no
bias: (C X) W = C (X W). A convolution with a filter for each channel is no such matrix.

`mixing_matrix_1d` and `mixing_matrix_2d` are C, the references multiply by it, and
`conv1d_attention` and `conv2d_attention` never store it: they add up shifted copies of Q and K.
As in PyTorch, "convolution" slides the filter without flipping it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention.attention.checks import (
    check_attention,
    check_count,
    check_floating,
    check_qkv,
)
from derived_attention.attention.linear import full_precision
from derived_attention.attention.normalized import Kernel, _allowed
from derived_attention.attention.softmax import (
    MultiheadAttention,
    _masks,
    _merge_masks,
    softmax_attention,
    softmax_attention_reference,
)

Offsets = tuple[tuple[int, ...], ...]

# --- the formula: one matrix that mixes the tokens -----------------------------------------------


def mixing_matrix_1d(weight: Tensor, N: int, causal: bool = False) -> Tensor:
    """Matrix C (N, N) of a convolution: (C X)_i = Σ_t w_t x_{i + t − p}, with zeros outside.

    Parameters
    ----------
    weight : Tensor
        Filter w ``(..., s)``, such as ``(H, s)`` with one filter for each head.
    N : int
        Length of the sequence, 0 or more.
    causal : bool
        False: p = ⌊(s − 1) / 2⌋, the "same" padding of ``torch.nn.functional.conv1d``; where s is
        even, the filter reaches one step further after i than before it. True: p = s − 1, so that
        the last number of the filter is for i itself and the others for what comes before.

    Returns
    -------
    Tensor
        ``(..., N, N)``, constant along its diagonals (Toeplitz), with at most s of them not 0.

    Raises
    ------
    TypeError, ValueError
        For a `weight` that is no floating tensor with at least one number in a filter, a wrong `N`.
    """
    check_floating({"weight": weight})
    _check_sides("weight", weight, 1)
    _check_flag("causal", causal)
    at = torch.arange(check_count("N", N, 0), device=weight.device)
    s = weight.shape[-1]
    tap = at - at[:, None] + _before(s, causal)  # (N, N): j − i + p
    inside = (tap >= 0) & (tap < s)
    return torch.where(inside, weight[..., tap.clamp(0, s - 1)], 0)


def mixing_matrix_2d(weight: Tensor, grid: tuple[int, int], class_token: bool = False) -> Tensor:
    """Matrix C (N, N) of a convolution on a grid, whose tokens are numbered row by row.

    Parameters
    ----------
    weight : Tensor
        Filter ``(..., s1, s2)``.
    grid : (int, int)
        Rows N_H and columns N_W.
    class_token : bool
        Whether a token comes before those of the grid, which C leaves as it is.

    Returns
    -------
    Tensor
        ``(..., N, N)`` with N = N_H N_W, and 1 more with `class_token`: Toeplitz blocks.

    Raises
    ------
    TypeError, ValueError
        As in `mixing_matrix_1d`; for a `grid` that is not two whole numbers.
    """
    check_floating({"weight": weight})
    _check_sides("weight", weight, 2)
    _check_flag("class_token", class_token)
    rows, columns = _check_grid(grid)
    at = torch.arange(rows * columns, device=weight.device)
    taps, inside = [], torch.ones(len(at), len(at), dtype=torch.bool, device=weight.device)
    for place, s in zip((at // columns, at % columns), weight.shape[-2:], strict=True):
        tap = place - place[:, None] + _before(s)
        inside = inside & (tap >= 0) & (tap < s)
        taps.append(tap.clamp(0, s - 1))
    C = torch.where(inside, weight[..., taps[0], taps[1]], 0)
    if not class_token:
        return C
    alone = torch.ones(1, 1, dtype=C.dtype, device=C.device)
    return F.pad(C, (1, 0, 1, 0)) + F.pad(alone, (0, len(at), 0, len(at)))


def _before(s: int, causal: bool = False) -> int:
    """Numbers of a filter that stand before the one for the position itself: p."""
    return s - 1 if causal else (s - 1) // 2


def conv1d_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    weight: Tensor,
    key_weight: Tensor | None = None,
    kernel: Kernel = softmax_attention_reference,
) -> Tensor:
    """H = softmax(C Q (C_k K)ᵀ / √D) V, with all matrices in memory.

    The arguments, the result and the errors are those of `conv1d_attention`.
    """

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return _multiply(mixing_matrix_1d(weight, x.shape[-2], is_causal), x)

    return _attend(*(convolve, 1, q, k, v, attn_mask, is_causal, scale, weight, key_weight, kernel))


def conv2d_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    weight: Tensor,
    key_weight: Tensor | None = None,
    grid: tuple[int, int],
    class_token: bool = False,
    kernel: Kernel = softmax_attention_reference,
) -> Tensor:
    """H = softmax(C Q (C_k K)ᵀ / √D) V, with all matrices in memory.

    The arguments, the result and the errors are those of `conv2d_attention`.
    """
    check_qkv(q, k, v)
    _check_places({"q": q, "k": k}, grid, class_token, is_causal)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return _multiply(mixing_matrix_2d(weight, grid, class_token), x)

    return _attend(*(convolve, 2, q, k, v, attn_mask, is_causal, scale, weight, key_weight, kernel))


def _multiply(C: Tensor, x: Tensor) -> Tensor:
    """C X for each head, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with full_precision(x.device):
        return (C.to(dtype) @ x.to(dtype)).to(x.dtype).view_as(x)


def _attend(
    convolve: Callable[[Tensor, Tensor], Tensor],
    sides: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    weight: Tensor,
    key_weight: Tensor | None,
    kernel: Kernel,
) -> Tensor:
    """Check all arguments, convolve queries and keys, and give them to the kernel."""
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    _check_kernel(kernel, attn_mask)
    weight = _per_head("weight", weight, q, sides)
    key_weight = weight if key_weight is None else _per_head("key_weight", key_weight, q, sides)
    q, k = convolve(q, weight), convolve(_without_masked(k, attn_mask), key_weight)
    return kernel(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def _without_masked(x: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Set the tokens to 0 that are masked, so that they add nothing to their neighbours."""
    if attn_mask is None:
        return x
    return x.masked_fill(~_allowed(torch.atleast_2d(attn_mask)).mT, 0)


# --- the same, as a sum of shifted copies --------------------------------------------------------


def conv1d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    weight: Tensor,
    key_weight: Tensor | None = None,
    kernel: Kernel = softmax_attention,
) -> Tensor:
    """Attention-Conv1D, eq. 45 of [Nguyen2023]: s additions for each query and key, then a kernel.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, D)``, ``(..., H, M, D)`` and ``(..., H, M, Dv)``, as in `softmax_attention`.
        What stands in padded queries reaches the queries next to them: set them to 0, as
        `Conv1DAttention` does.
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. A key that
        may not be attended counts as 0 in the convolution of its neighbours.
    is_causal : bool
        Query i attends keys j ≤ i, and the filter ends at the position itself. The padding on both
        sides, as eq. 45 has it, would show queries and keys what comes after them.
    scale : float, optional
        Factor of the scores, as in `softmax_attention`.
    weight : Tensor
        Filter ``(s,)`` for all heads or ``(H, s)`` for each, in the dtype of `q`, s at least 1. It
        is laid on the sequence as in `mixing_matrix_1d`.
    key_weight : Tensor, optional
        Filter of the keys, ``(s',)`` or ``(H, s')``, if it is another one. The derivation of eq. 45
        has one for both, since one feature map is applied to training and to new inputs.
    kernel : callable
        What to do with the convolved queries and keys: `softmax_attention` or another mechanism
        with its calling convention.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for filters that are not as above, a mask that differs between
        queries, a `kernel` that cannot be called.
    """

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return _convolve(x, weight, is_causal)

    return _attend(*(convolve, 1, q, k, v, attn_mask, is_causal, scale, weight, key_weight, kernel))


def conv2d_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    weight: Tensor,
    key_weight: Tensor | None = None,
    grid: tuple[int, int],
    class_token: bool = False,
    kernel: Kernel = softmax_attention,
) -> Tensor:
    """Attention-Conv2D, eq. 43 of [Nguyen2023], for tokens that lie on a grid, row by row.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, D)`` twice and ``(..., H, N, Dv)``: queries and keys have places on one grid.
    attn_mask, scale, kernel
        As in `conv1d_attention`.
    is_causal : bool
        False: a grid has no past.
    weight, key_weight : Tensor
        Filters ``(s1, s2)`` for all heads or ``(H, s1, s2)`` for each, as in `conv1d_attention`,
        laid on the grid as in `mixing_matrix_2d`.
    grid : (int, int)
        Rows N_H and columns N_W, with N = N_H N_W.
    class_token : bool
        Whether one more token comes first, N = 1 + N_H N_W, which is not convolved.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `conv1d_attention`; for a `grid` with fewer or more places than there are queries or
        keys; for `is_causal`.
    """
    check_qkv(q, k, v)
    _check_places({"q": q, "k": k}, grid, class_token, is_causal)

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return _convolve_grid(x, weight, grid, class_token)

    return _attend(*(convolve, 2, q, k, v, attn_mask, is_causal, scale, weight, key_weight, kernel))


def _convolve_grid(x: Tensor, weight: Tensor, grid: tuple[int, int], class_token: bool) -> Tensor:
    """Convolve (..., H, N, D) on its grid, but for a class token."""
    places = x[..., int(class_token) :, :].unflatten(-2, grid)  # (..., H, N_H, N_W, D)
    mixed = _convolve(places, weight).flatten(-3, -2)
    return torch.cat([x[..., :1, :], mixed], -2) if class_token else mixed


def _convolve(x: Tensor, weight: Tensor, causal: bool = False) -> Tensor:
    """Convolve (..., H, N, D) with (H or 1, s), or (..., H, N_H, N_W, D) with (H or 1, s1, s2)."""
    before = [_before(s, causal) for s in weight.shape[1:]]
    steps = [range(-p, s - p) for p, s in zip(before, weight.shape[1:], strict=True)]
    heads = x if x.dim() > weight.dim() else x.unsqueeze(0)
    return _ShiftedSum.apply(heads, weight.flatten(1), tuple(itertools.product(*steps))).view_as(x)


class _ShiftedSum(torch.autograd.Function):
    """C X as Σ_t w_t · (X shifted by the t-th offset), with no copy stored but the sum.

    The gradient with respect to X is Cᵀ G: the same sum, with the offsets reversed.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
        """Take X (..., H, ·, D), weight (H or 1, taps), and an offset along · for each tap."""
        return _shifted_sum(x, weight, offsets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, ctx.offsets = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients with respect to X and weight."""
        (grad,), (x, weight) = grads, ctx.saved_tensors
        reverse = tuple(tuple(-o for o in offset) for offset in ctx.offsets)
        dx = _shifted_sum(grad, weight, reverse) if ctx.needs_input_grad[0] else None
        dw = _products(grad, x, ctx.offsets) if ctx.needs_input_grad[1] else None
        return dx, None if dw is None else dw.sum_to_size(weight.shape).to(weight.dtype), None


def _shifted_sum(x: Tensor, weight: Tensor, offsets: Offsets) -> Tensor:
    """Σ_t w_t x_{i + o_t}, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype).T.reshape(*weight.T.shape, *(1,) * (len(offsets[0]) + 1))
    wide = x.to(dtype).contiguous()
    here = offsets.index((0,) * len(offsets[0]))
    out = wide * taps[here]
    for t, offset in enumerate(offsets):
        if t != here:
            to, source = _overlap(x, offset)
            out[to].addcmul_(wide[source], taps[t])
    return out.to(x.dtype)


def _products(grad: Tensor, x: Tensor, offsets: Offsets) -> Tensor:
    """Σ_i g_i · x_{i + o_t} for each head and tap: (H, taps)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    grad, x = grad.to(dtype), x.to(dtype)
    head = x.dim() - len(offsets[0]) - 2
    others = [d for d in range(x.dim()) if d != head]
    overlaps = [_overlap(x, offset) for offset in offsets]
    return torch.stack([(grad[to] * x[source]).sum(others) for to, source in overlaps], -1)


def _overlap(x: Tensor, offset: tuple[int, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Select the places i for which i + offset is a place too, and select these."""
    to, source = [], []
    for n, o in zip(x.shape[-1 - len(offset) : -1], offset, strict=True):
        first, last = max(0, -o), max(0, -o, min(n, n - o))
        to.append(slice(first, last))
        source.append(slice(first + o, last + o))
    return (..., *to, slice(None)), (..., *source, slice(None))


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
    check_floating({"q": q, name: weight})
    _check_sides(name, weight, sides)
    heads = q.shape[-3] if q.dim() > 2 else 1
    if weight.dim() > sides and tuple(weight.shape[:-sides]) != (heads,):
        size = ("s", "s1, s2")[sides - 1]
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; expected ({size}), or ({heads}, {size}) with "
            "a filter for each head of q"
        )
    return weight if weight.dim() > sides else weight.unsqueeze(0)


def _check_kernel(kernel: Kernel, attn_mask: Tensor | None) -> None:
    """Check that the kernel can be called, and that the mask is one over keys."""
    if not callable(kernel):
        raise TypeError(f"kernel is {kernel!r}; expected a function of (q, k, v)")
    if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; expected the size 1 in place of N, as "
            "in (B, 1, 1, M): a convolved key holds its neighbours, and is the same for every "
            "query; for a causal mask say is_causal=True to conv1d_attention"
        )


def _check_grid(grid: tuple[int, int], least: int = 0) -> tuple[int, int]:
    if not isinstance(grid, Sequence) or isinstance(grid, str):
        raise TypeError(f"grid is {grid!r}; expected two whole numbers, (rows, columns)")
    if len(grid) != 2:
        raise ValueError(f"grid is {grid!r}; expected two whole numbers, (rows, columns)")
    return check_count("grid[0]", grid[0], least), check_count("grid[1]", grid[1], least)


def _check_places(
    tokens: dict[str, Tensor], grid: tuple[int, int], class_token: bool, is_causal: bool
) -> None:
    """Check that all tokens (..., N, D) have a place on the grid."""
    rows, columns = _check_grid(grid)
    _check_flag("class_token", class_token)
    if is_causal:
        raise ValueError(f"is_causal is {is_causal}; expected False: a grid has no past")
    N = rows * columns + class_token
    for name, x in tokens.items():
        if x.shape[-2] != N:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; expected {N} tokens, for the grid {rows} x "
                f"{columns} with{'' if class_token else 'out'} a class token"
            )


def _check_flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


# --- layers --------------------------------------------------------------------------------------


class _ConvolvedAttention(MultiheadAttention):
    """What Attention-Conv1D and -Conv2D have in common: filters for each head, a kernel."""

    def __init__(
        self, *args: Any, size: tuple[int, ...], shared: bool, causal: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        _check_flag("shared", shared)
        _check_flag("causal", causal)
        start = self.out_proj.weight.new_zeros(self.num_heads, *size)
        at: tuple[Any, ...] = (slice(None), *(_before(s, causal) for s in size))
        start[at] = 1  # the identity
        self.weight = nn.Parameter(start)
        self.key_weight = None if shared else nn.Parameter(start.clone())
        self.causal = causal

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return _convolve(x, weight, self.causal)

    def _check_forward(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `MultiheadAttention.forward` does; `attn_mask` has to be None.

        Padded keys count as 0 in a convolution. Where `query` and `key` are the same tensor, padded
        queries do too.
        """
        self._check(query, key, value, attn_mask, key_padding_mask)
        _check_no_mask("attn_mask", attn_mask)
        self._check_forward(query, key, is_causal)
        q, k, v = self._heads(query, key, value)  # (B, H, N, D), (B, H, M, D) twice
        if key_padding_mask is not None:
            present = _merge_masks(None, key_padding_mask, False, q, key.shape[-2])  # (B, 1, 1, M)
            q = _without_masked(q, present if query is key else None)
            k = _without_masked(k, present)
        masks = _masks(None, key_padding_mask, is_causal, q, key.shape[-2])
        q = self._convolve(q, self.weight)
        k = self._convolve(k, self.weight if self.key_weight is None else self.key_weight)
        return self._attend(q, k, v, masks, need_weights, average_attn_weights)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"filters={tuple(self.weight.shape)}, shared={self.key_weight is None}"


def _check_no_mask(name: str, mask: Tensor | None) -> None:
    if mask is not None:
        raise ValueError(
            f"{name} is given; expected None: a convolved token holds its neighbours, and is the "
            "same for every query"
        )


class Conv1DAttention(_ConvolvedAttention):
    """Attention-Conv1D in H heads, with the interface of ``nn.MultiheadAttention``.

    Its parameters are those of `MultiheadAttention`, the filters ``weight`` (H, s), and
    ``key_weight`` where keys have their own. A filter starts as the identity, so that the layer
    starts as softmax attention.

    Parameters
    ----------
    embed_dim, num_heads, args, options
        The arguments of `MultiheadAttention`, but for `attention`.
    kernel_size : int
        s, at least 1.
    shared : bool
        Whether queries and keys have one filter, as in the derivation of eq. 45.
    causal : bool
        Whether the filters end at the position itself. The forward pass has to be told the same, by
        `is_causal`.
    kernel : callable
        As in `conv1d_attention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention` and `conv1d_attention`. In the forward pass, also for any
        `attn_mask` (padding goes into `key_padding_mask`), and where `is_causal` is not `causal`.

    Examples
    --------
    >>> layer = Conv1DAttention(16, 4, kernel_size=3)
    >>> x = torch.zeros(2, 5, 16)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        kernel_size: int = 5,
        shared: bool = True,
        causal: bool = False,
        kernel: Kernel = softmax_attention,
        **options: Any,
    ) -> None:
        size = (check_count("kernel_size", kernel_size, 1),)
        filters: dict[str, Any] = {"size": size, "shared": shared, "causal": causal}
        super().__init__(embed_dim, num_heads, *args, attention=kernel, **filters, **options)

    def _check_forward(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        if is_causal != self.causal:
            raise ValueError(
                f"is_causal is {is_causal}; expected {self.causal}, the `causal` of the layer, "
                "which says how its filters are laid on the sequence"
            )


class Conv2DAttention(_ConvolvedAttention):
    """Attention-Conv2D in H heads, with the interface of ``nn.MultiheadAttention``.

    Its parameters are those of `Conv1DAttention`, with filters (H, s, s), and start as there.

    Parameters
    ----------
    embed_dim, num_heads, args, options
        The arguments of `MultiheadAttention`, but for `attention`.
    grid, class_token
        As in `conv2d_attention`.
    kernel_size, shared, kernel
        As in `Conv1DAttention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention` and `conv2d_attention`. In the forward pass, also for any
        `attn_mask`.

    Examples
    --------
    >>> layer = Conv2DAttention(16, 4, grid=(2, 3), kernel_size=2)
    >>> x = torch.zeros(2, 6, 16)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 6, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        grid: tuple[int, int],
        class_token: bool = False,
        kernel_size: int = 3,
        shared: bool = True,
        kernel: Kernel = softmax_attention,
        **options: Any,
    ) -> None:
        size = (check_count("kernel_size", kernel_size, 1),) * 2
        grid = _check_grid(grid)
        _check_flag("class_token", class_token)
        filters: dict[str, Any] = {"size": size, "shared": shared, "causal": False}
        super().__init__(embed_dim, num_heads, *args, attention=kernel, **filters, **options)
        self.grid, self.class_token = grid, class_token

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return _convolve_grid(x, weight, self.grid, self.class_token)

    def _check_forward(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        _check_places({"query": query, "key": key}, self.grid, self.class_token, is_causal)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"{super().extra_repr()}, grid={self.grid}, class_token={self.class_token}"


class CvTAttention(MultiheadAttention):
    """Convolutional projections, as in the vision transformer CvT of [Wu2021], then a kernel.

    Queries, keys and values are each ``BatchNorm(Conv(X)) Wᵀ``: a convolution on the grid with a
    filter for each feature, without bias, then the linear map of `MultiheadAttention`. That is what
    remark 7 of [Nguyen2023] means. In eq. 44 as printed, the feature map Φ of the kernel stands
    where BatchNorm and W are, and there is no stride. Unlike eq. 43, it convolves before it
    projects, features do not share a filter, and values are convolved too.

    Parameters
    ----------
    embed_dim, num_heads, args, options
        The arguments of `MultiheadAttention`, but for `attention`.
    grid : (int, int)
        Rows and columns of the tokens of query and key, each at least 1.
    class_token : bool
        Whether one more token comes first, which is not convolved.
    kernel_size : int
        s, at least 1: filters are s x s.
    kv_stride : int
        Step of the filters of keys and values along both sides of the grid: with 2 there are
        ⌈N_H / 2⌉ ⌈N_W / 2⌉ of them.
    kernel : callable
        As in `conv2d_attention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention`, and for a `grid` that does not fit. In the forward pass, also
        for `is_causal` and for any mask.

    Examples
    --------
    >>> layer = CvTAttention(16, 4, grid=(3, 3), kv_stride=2)
    >>> x = torch.zeros(2, 9, 16)
    >>> output, weights = layer(x, x, x)
    >>> output.shape, weights.shape
    (torch.Size([2, 9, 16]), torch.Size([2, 9, 4]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        grid: tuple[int, int],
        class_token: bool = False,
        kernel_size: int = 3,
        kv_stride: int = 1,
        kernel: Kernel = softmax_attention,
        **options: Any,
    ) -> None:
        s = check_count("kernel_size", kernel_size, 1)
        step = check_count("kv_stride", kv_stride, 1)
        grid = _check_grid(grid, least=1)
        _check_flag("class_token", class_token)
        super().__init__(embed_dim, num_heads, *args, attention=kernel, **options)
        self.grid, self.class_token = grid, class_token
        like = {"device": self.out_proj.weight.device, "dtype": self.out_proj.weight.dtype}
        widths = ((embed_dim, 1), (self.kdim, step), (self.vdim, step))
        self.convolutions = nn.ModuleList(_depthwise(E, s, stride, **like) for E, stride in widths)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `MultiheadAttention.forward` does, without masks.

        The weights are those of the keys that the stride leaves, with a class token first.
        """
        self._check(query, key, value, None, None)
        _check_no_mask("key_padding_mask", key_padding_mask)
        _check_no_mask("attn_mask", attn_mask)
        _check_places({"query": query, "key": key}, self.grid, self.class_token, is_causal)
        return super().forward(
            query, key, value, need_weights=need_weights, average_attn_weights=average_attn_weights
        )

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(inputs, self.convolutions, strict=True)
        return super()._heads(*(self._convolve(x, convolution) for x, convolution in pairs))

    def _convolve(self, x: Tensor, convolution: nn.Module) -> Tensor:
        """Convolve (B, N, E) or (N, E) on its grid, but for a class token."""
        first = int(self.class_token)
        image = x[..., first:, :].mT.unflatten(-1, self.grid)  # (B, E, N_H, N_W)
        image = convolution(image) if x.dim() > 2 else convolution(image[None])[0]
        return torch.cat([x[..., :first, :], image.flatten(-2).mT], -2)

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"grid={self.grid}, class_token={self.class_token}"


def _depthwise(E: int, s: int, stride: int, **factory: Any) -> nn.Sequential:
    """Build a convolution with a filter for each of E features, "same" padding, and BatchNorm."""
    left, right = _before(s), s - 1 - _before(s)
    return nn.Sequential(
        nn.ZeroPad2d((left, right, left, right)),
        nn.Conv2d(E, E, s, stride, groups=E, bias=False, **factory),
        nn.BatchNorm2d(E, **factory),
    )
