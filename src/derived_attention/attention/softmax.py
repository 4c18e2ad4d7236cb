"""Softmax attention: the formula, its fused form, and the multi-head layer (chapter 1).

The equation of this module, for queries Q (N, D), keys K (M, D) and values V (M, Dv), is ::

    A = softmax(Q Kᵀ / √D)      (N, M), softmax over each row
    H = A V                     (N, Dv)

`attention_weights` is the first line and `softmax_attention_reference` both, as they stand.
`softmax_attention` gives the same H without ever storing A. `MultiheadAttention` runs it, or any
other mechanism with its calling convention, in H heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention.attention.checks import (
    check_attention,
    check_count,
    check_layer_masks,
    check_sequences,
)


def causal_mask(N: int, M: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean (N, M) mask that lets query i attend the keys j ≤ i, counted from the top left."""
    return torch.ones(N, M, dtype=torch.bool, device=device).tril()


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention matrix A = softmax(Q Kᵀ / √D), with a row of zeros where nothing may be attended.

    Parameters
    ----------
    q, k : Tensor
        Queries ``(..., H, N, D)`` and keys ``(..., H, M, D)``; ``(N, D)`` and ``(M, D)`` do too.
    attn_mask, is_causal, scale
        As in `softmax_attention`.

    Returns
    -------
    Tensor
        ``(..., H, N, M)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`.
    """
    scale = check_attention(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    scores = scale * q @ k.transpose(-2, -1)  # (..., H, N, M)
    if is_causal:
        attn_mask = causal_mask(q.shape[-2], k.shape[-2], q.device)
    if attn_mask is None:
        return scores.softmax(-1)
    attn_mask, alive = _open_dead_rows(attn_mask, scores.dtype)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    return scores.softmax(-1).masked_fill(~alive, 0)


def softmax_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """H = softmax(Q Kᵀ / √D) V with the whole matrix in memory.

    Arguments, result and errors are those of `softmax_attention`.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    return attention_weights(q, k, attn_mask=attn_mask, is_causal=is_causal, scale=scale) @ v


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """H = softmax(Q Kᵀ / √D) V without the (N, M) matrix in memory.

    The calling convention of ``torch.nn.functional.scaled_dot_product_attention``, which every
    mechanism of the package shares. It differs in one thing: a query that may attend nothing gets
    zeros, and zero gradients, on every device and in every dtype.

    Parameters
    ----------
    q, k, v : Tensor
        Queries ``(..., H, N, D)``, keys ``(..., H, M, D)`` and values ``(..., H, M, Dv)`` with
        equal leading dimensions (there may be none), in one of float32, float64, bfloat16, float16.
        B, N and M may be 0; with no key the result is 0.
    attn_mask : Tensor, optional
        Broadcastable to ``(..., H, N, M)``. Boolean: True where a query may attend. Floating: added
        to the scores, finite or -inf. A floating mask that requires a gradient makes PyTorch store
        the (N, M) matrix.
    is_causal : bool
        Query i attends keys j ≤ i, counted from the top left also where N ≠ M. Excludes
        `attn_mask`.
    scale : float, optional
        Finite and positive; replaces 1/√D.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError
        For an argument that is not a tensor, or not floating, or of another dtype than `q` (under
        autocast dtypes may differ), a mask that is neither boolean nor floating, a `scale` that is
        not a number.
    ValueError
        For shapes or devices that do not fit, a mask that holds NaN or +inf (not looked at under
        ``torch.compile``), `attn_mask` with `is_causal`, a `scale` that is not finite and positive.
    """
    scale = check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    return sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's fused attention, kept off the (N, M) path: for mechanisms that reduce to softmax.

    `softmax_attention` without its checks. PyTorch falls back, silently, to a path that stores the
    matrix when the last stride is not 1, when Dv ≠ D, when inputs are not four-dimensional. So this
    function copies, pads with zero columns (which change no score) and reshapes first.
    """
    Dv = v.shape[-1]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    width, value_width = _fused_widths(q.shape[-1], Dv, q.device.type)
    alive = None
    if attn_mask is not None:
        attn_mask, alive = _open_dead_rows(attn_mask, q.dtype)
        if q.dim() > 4 and attn_mask.dim() > 3:  # its leading dimensions are flattened with q's
            attn_mask = attn_mask.expand(*q.shape[:-3], *attn_mask.shape[-3:])
    H = F.scaled_dot_product_attention(
        _four_dims(_widen(q, width)),
        _four_dims(_widen(k, width)),
        _four_dims(_widen(v, value_width)),
        attn_mask=None if attn_mask is None else _four_dims(attn_mask),
        is_causal=is_causal,
        scale=scale,
    )
    H = H[..., :Dv].reshape(*q.shape[:-1], Dv)
    return H if alive is None else H.masked_fill(~alive, 0)


def _open_dead_rows(attn_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Let a row that may attend nothing attend everything; its output is set to zero afterwards.

    Softmax of a row of -inf is 0/0, and kernels disagree on what that is. Here no kernel meets one,
    and the zero written afterwards stops the gradient too. Returns the mask, and (..., N, 1) alive.
    """
    if attn_mask.dtype == torch.bool:
        alive = attn_mask.any(-1, keepdim=True)
        return attn_mask | ~alive, alive
    attn_mask = attn_mask.to(dtype)  # a finite number may become -inf: before the next line
    alive = (attn_mask != -math.inf).any(-1, keepdim=True)
    return attn_mask.masked_fill(~alive, 0), alive


def _fused_widths(D: int, Dv: int, device_type: str) -> tuple[int, int]:
    """Last dimensions of (q, k) and of v for which a kernel exists that stores no matrix."""
    if device_type == "cpu":
        return max(D, Dv), max(D, Dv)  # the CPU kernel wants one width for all
    return D + -D % 8, Dv + -Dv % 8  # the CUDA kernels want multiples of 8


def _widen(x: Tensor, width: int) -> Tensor:
    """Append zero columns up to `width` and make the last stride 1."""
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    # clone, because contiguous() leaves the odd stride of a dimension of size 1 as it is
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def _four_dims(x: Tensor) -> Tensor:
    """View as (B, H, ·, ·): the fused kernels take no more and no fewer dimensions."""
    return x.flatten(0, -4) if x.dim() > 4 else x[(None,) * (4 - x.dim())]


def _masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    q: Tensor,
    M: int,
) -> dict[str, Any]:
    """Return the masks of a mechanism's call from a layer's."""
    if attn_mask is None and key_padding_mask is None:
        return {"attn_mask": None, "is_causal": is_causal}
    merged = _merge_masks(attn_mask, key_padding_mask, is_causal, q, M)
    return {"attn_mask": merged, "is_causal": False}


def _merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    q: Tensor,
    M: int,
) -> Tensor:
    """One mask as mechanisms want it (True: may attend) from a layer's (True: may not)."""
    masks = []
    if attn_mask is not None:  # (N, M) or (B, H, N, M)
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(*q.shape[:-1], M))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[..., None, None, :])  # (B, 1, 1, M)
    if is_causal:
        masks.append(~causal_mask(q.shape[-2], M, q.device))
    if all(mask.dtype == torch.bool for mask in masks):
        return ~functools.reduce(torch.logical_or, masks)
    added = (torch.where(x, -math.inf, 0.0) if x.dtype == torch.bool else x for x in masks)
    return functools.reduce(torch.add, added)


class MultiheadAttention(nn.Module):
    """Attention in H heads, with the interface and the parameters of ``nn.MultiheadAttention``.

    ``MultiHead(X) = Concat(H_1, ..., H_H) W_Oᵀ`` with ``H_h = attention(X W_Qᵀ, X W_Kᵀ, X W_Vᵀ)``
    on the h-th slice of D columns, D = embed_dim / H unless you say another `head_dim`.
    ``load_state_dict`` takes what PyTorch's layer has saved, and the results are the same, with
    three differences:

    - a query that may attend nothing gets zeros from its heads, where PyTorch's layer gives NaN;
    - ``is_causal=True`` needs no `attn_mask`, and where there is one, both hold;
    - no `add_bias_kv`, no `add_zero_attn`, and batch first.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of the layer, and number of heads H, which divides it where `head_dim` is left out.
    dropout : float
        Probability of dropping an attention weight in training. Any value above 0 makes the layer
        store the (N, M) matrix in training, at the cost that `need_weights` has in `forward`.
    bias : bool
        Whether the projections have biases.
    kdim, vdim : int, optional
        Features of key and value; `embed_dim` where left out.
    batch_first : bool
        True; there is no other layout here.
    attention : callable
        A mechanism with the calling convention of `softmax_attention`; a module's parameters
        become the layer's.
    head_dim : int, optional
        D, the features of a head; the output projection maps H D features to `embed_dim`.
    kv_heads : int, optional
        Number G of heads that keys and values have, which divides H: head h attends with those of
        head ``h // (H / G)``. 1 is multi-query attention [Shazeer2019]; H where left out.

    Raises
    ------
    TypeError, ValueError
        For a size that does not fit, a `dropout` outside [0, 1], `batch_first=False`, an
        `attention` that cannot be called.
    """

    # nn.TransformerEncoderLayer reads this name: False keeps it from replacing, in evaluation, our
    # forward by its own fused softmax attention, whatever the mechanism is.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        *,
        attention: Callable[..., Tensor] = softmax_attention,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim < 1 or num_heads < 1 or (head_dim is None and embed_dim % num_heads):
            raise ValueError(
                f"embed_dim is {embed_dim} and num_heads {num_heads}; "
                "expected positive numbers, embed_dim a multiple of num_heads"
            )
        D = embed_dim // num_heads if head_dim is None else check_count("head_dim", head_dim, 1)
        groups = num_heads if kv_heads is None else check_count("kv_heads", kv_heads, 1)
        if num_heads % groups:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of num_heads {num_heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout is {dropout}; expected a probability, from 0 to 1")
        if not batch_first:
            raise ValueError(
                "batch_first is False; expected True: inputs here are (batch, length, features), "
                "so transpose the first two dimensions of yours"
            )
        if not callable(attention):
            raise TypeError(f"attention is {attention!r}; expected a function of (q, k, v)")
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        self.attention = attention
        self.head_dim, self.kv_heads = D, groups

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # The same draws in the same order as PyTorch's layer: a seed gives the same weights.
        self.out_proj = nn.Linear(num_heads * D, embed_dim, bias=bias, **factory)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(nn.init.xavier_uniform_(torch.empty(*shape, **factory)))

        self._widths = (num_heads * D, groups * D, groups * D)  # of all queries, keys and values
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = weight(sum(self._widths), embed_dim)
        else:
            self.q_proj_weight = weight(num_heads * D, embed_dim)
            self.k_proj_weight = weight(groups * D, self.kdim)
            self.v_proj_weight = weight(groups * D, self.vdim)
        zeros = torch.zeros(sum(self._widths), **factory)
        self.in_proj_bias = nn.Parameter(zeros) if bias else None
        if bias:
            nn.init.zeros_(self.out_proj.bias)

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
        """Attend from `query` to `key` and `value`.

        Parameters
        ----------
        query, key, value : Tensor
            ``(B, N, embed_dim)``, ``(B, M, kdim)``, ``(B, M, vdim)``, or all three without B.
        key_padding_mask : Tensor, optional
            ``(B, M)``. Boolean: True where a key is padding, not to be attended. Floating: added.
        need_weights : bool
            Whether to return the weights as well; True, PyTorch's default, stores (N, M) matrices.
            Another mechanism than softmax is asked for its A with the identity in the place of V,
            as A I = A: exact where it is linear in V, in O(N M²) operations. Say False for a
            mechanism that is not linear in V.
        attn_mask : Tensor, optional
            ``(N, M)``, or ``(B·H, N, M)``. Boolean: True where a query may **not** attend, the
            opposite of `softmax_attention`. Floating: added to the scores.
        average_attn_weights : bool
            Whether the weights returned are the mean over the heads.
        is_causal : bool
            Query i attends keys j ≤ i only.

        Returns
        -------
        output : Tensor
            ``(B, N, embed_dim)``
        weights : Tensor or None
            ``(B, N, M)`` if averaged, else ``(B, H, N, M)``; after dropout, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what it was and what was expected.
        """
        self._check(query, key, value, attn_mask, key_padding_mask)
        q, k, v = self._heads(query, key, value)  # (B, H, N, D), (B, H, M, D) twice
        masks = _masks(attn_mask, key_padding_mask, is_causal, q, key.shape[-2])
        return self._attend(q, k, v, masks, need_weights, average_attn_weights)

    def extra_repr(self) -> str:
        """Show what the parameters do not; a checkpoint tells two layers apart by this text."""
        shared = f", kv_heads={self.kv_heads}" if self.kv_heads != self.num_heads else ""
        return f"num_heads={self.num_heads}{shared}"

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
    ) -> None:
        sizes = (self.embed_dim, self.kdim, self.vdim)
        check_sequences(query, key, value, sizes=sizes, weights=self.out_proj.weight)
        check_layer_masks(attn_mask, key_padding_mask, query, key, self.num_heads)

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Project query, key and value, and split each into heads: (B, N, ·) to (B, H, N, D)."""
        if self.kdim == self.vdim == self.embed_dim:
            weights = self.in_proj_weight.split(self._widths)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        no_biases = (None,) * 3
        biases = no_biases if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
        return tuple(self._head(*xwb) for xwb in zip(inputs, weights, biases, strict=True))

    def _head(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x, split it into heads, and repeat those that queries share: (B, H, N, D)."""
        x = F.linear(x, weight, bias).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
        if x.shape[-3] == self.num_heads:
            return x
        shared = x.unsqueeze(-3).expand(*x.shape[:-2], self.num_heads // x.shape[-3], *x.shape[-2:])
        return shared.flatten(-4, -3)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: dict[str, Any],
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in each head, join the heads and project: what `forward` returns."""
        if need_weights or (self.training and self.dropout > 0):
            A = F.dropout(self._weights(q, k, **masks), self.dropout, self.training)
            H = A @ v  # (B, H, N, M) @ (B, H, M, D)
        else:
            H = self.attention(q, k, v, **masks)  # (B, H, N, D)
        output = self.out_proj(H.transpose(-3, -2).flatten(-2))  # (B, N, embed_dim)
        if not need_weights:
            return output, None
        return output, A.mean(-3) if average_attn_weights else A

    def _weights(self, q: Tensor, k: Tensor, **masks: Any) -> Tensor:
        """Return A (B, H, N, M): what the mechanism makes of V = I."""
        if self.attention is softmax_attention:
            return attention_weights(q, k, **masks)
        identity = torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)  # (M, M)
        return self.attention(q, k, identity.expand(*k.shape[:-1], -1), **masks)
