"""Argument checks shared by every attention mechanism.

Each check runs before any work, reads shapes, dtypes and devices only, and raises ``TypeError``
(wrong kind: not a tensor, wrong dtype) or ``ValueError`` (wrong shape, device or value) with a
message that names the argument, what it was and what was expected. The one check that must read
data, `check_mask_values`, says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> float:
    """Check the arguments that every mechanism has and return its scale.

    Parameters
    ----------
    q, k, v : Tensor
        Queries ``(..., N, D)``, keys ``(..., M, D)`` and values ``(..., M, Dv)``; `v` may be left
        out by a function that has no values.
    attn_mask : Tensor, optional
        Boolean or floating, broadcastable to ``(..., N, M)``.
    is_causal : bool
        Excludes `attn_mask`, as in PyTorch's ``scaled_dot_product_attention``.
    scale : float, optional
        Finite and positive.

    Returns
    -------
    float
        `scale`, or 1/√D where it is None.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what it was and what was expected.
    """
    check_qkv(q, k, v)
    check_mask(attn_mask, q, k, is_causal)
    return 1 / math.sqrt(q.shape[-1]) if scale is None else check_positive("scale", scale)


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    """Check that queries, keys and values are floating, alike, and of matching shapes."""
    check_floating({"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v})
    if q.dim() < 2 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., N, D) with D at least 1")
    *leading, _, D = q.shape
    M = k.shape[-2] if k.dim() > 1 else "M"
    check_shape("k", k, (*leading, M, D), "the leading dimensions and D of q")
    if v is not None:
        Dv = v.shape[-1] if v.dim() > 0 else "Dv"
        check_shape("v", v, (*leading, M, Dv), "the leading dimensions of q and the M of k")


def check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool = False) -> None:
    """Check a mask against the scores ``(..., N, M)`` of `q` and `k`, and against `is_causal`."""
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal is {is_causal!r}; expected True or False")
    if attn_mask is None:
        return
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True were both given; expected one of them: "
            "fold the causal triangle into attn_mask with `causal_mask`"
        )
    check_mask_kind("attn_mask", attn_mask, q.device)
    scores = (*q.shape[:-1], k.shape[-2])
    sizes = tuple(attn_mask.shape)
    matched = zip(reversed(sizes), reversed(scores), strict=False)
    if len(sizes) > len(scores) or any(have not in (1, want) for have, want in matched):
        raise ValueError(
            f"attn_mask has shape {sizes}; expected one that broadcasts to the scores' "
            f"shape (..., N, M) = {scores}"
        )
    check_mask_values("attn_mask", attn_mask)


def check_mask_kind(name: str, mask: Tensor, device: torch.device) -> None:
    """Check that a mask is a boolean or floating tensor on `device`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is {_kind(mask)}; expected a boolean or floating Tensor")
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise TypeError(f"{name} has dtype {mask.dtype}; expected torch.bool or a floating dtype")
    if mask.device != device:
        raise ValueError(f"{name} is on device {mask.device}; expected {device}, that of the rest")


def check_mask_values(name: str, mask: Tensor) -> None:
    """Refuse NaN and +inf in a floating mask, which would make every output of the row NaN.

    This is the only check that reads data. On a GPU it waits for the device, once per call and
    only for a floating mask: a boolean mask or ``is_causal`` costs nothing. It is skipped where a
    look at the data is impossible: under ``torch.compile``, in a CUDA graph's capture, on "meta".
    """
    if mask.dtype == torch.bool or torch.compiler.is_compiling() or mask.is_meta:
        return
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not bool((mask < math.inf).all()):  # NaN compares false
        bad = "NaN" if bool(mask.isnan().any()) else "+inf"
        raise ValueError(f"{name} contains {bad}; expected finite numbers or -inf")


def check_key_mask(attn_mask: Tensor) -> Tensor:
    """Check that a mask says the same to every query, and return it as ``(..., 1, M)``.

    For forms whose time and memory stay below N M, where a mask of N M numbers would not. The last
    size may be 1, as in the mask that came.
    """
    mask = torch.atleast_2d(attn_mask)
    if mask.shape[-2] != 1:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; expected the size 1 in place of N, as "
            "in (B, 1, 1, M): this form takes a mask over keys, the same for every query; for any "
            "other mask use its reference form"
        )
    return mask


def check_count(name: str, value: int, least: int) -> int:
    """Check that `value` is a whole Python number, at least `least`, and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {_kind(value)}; expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}; expected a whole number, at least {least}")
    return value


def check_positive(name: str, value: float) -> float:
    """Check that `value` is a finite positive Python number and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {_kind(value)}; expected a finite positive Python number")
    if not 0 < value < math.inf:  # NaN compares false
        raise ValueError(f"{name} is {value}; expected a finite positive number")
    return float(value)


def check_floating(tensors: Mapping[str, Tensor]) -> None:
    """Check that named tensors share one floating dtype and one device.

    Under autocast the dtypes may differ, because the operations cast them.
    """
    first = next(iter(tensors))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {_kind(x)}; expected a Tensor")
        if x.dtype not in FLOATING:
            expected = ", ".join(map(str, FLOATING))
            raise TypeError(f"{name} has dtype {x.dtype}; expected one of {expected}")
        wanted = tensors[first]
        if x.device != wanted.device:
            raise ValueError(
                f"{name} is on device {x.device}; expected {wanted.device}, that of {first}"
            )
        if x.dtype != wanted.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} has dtype {x.dtype}; expected {wanted.dtype}, that of {first}")


def check_shape(name: str, x: Tensor, expected: tuple, meaning: str) -> None:
    """Check for an exact shape, explained by `meaning`."""
    if tuple(x.shape) != expected:
        shape = "(" + ", ".join(map(str, expected)) + ")"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}: {meaning}")


def check_sequences(
    query: Tensor, key: Tensor, value: Tensor, *, sizes: tuple[int, int, int], weights: Tensor
) -> None:
    """Check a layer's inputs ``(B, N, ·)`` or ``(N, ·)``: their features are `sizes`.

    Their dtype and device are those of `weights`, a parameter of the layer.
    """
    check_floating({"the layer's weights": weights, "query": query, "key": key, "value": value})
    if query.dim() not in (2, 3):
        raise ValueError(
            f"query has shape {tuple(query.shape)}; expected (batch, length, features), "
            "or (length, features) for one sequence"
        )
    *batch, N, _ = query.shape
    M = key.shape[-2] if key.dim() > 1 else "M"
    check_shape("query", query, (*batch, N, sizes[0]), "the last size is embed_dim")
    check_shape("key", key, (*batch, M, sizes[1]), "the batch of query, and kdim features")
    check_shape("value", value, (*batch, M, sizes[2]), "batch and length of key, vdim features")


def check_layer_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    query: Tensor,
    key: Tensor,
    num_heads: int,
) -> None:
    """Check a layer's masks in ``nn.MultiheadAttention``'s shapes.

    `attn_mask` is ``(N, M)`` or ``(B·H, N, M)``, `key_padding_mask` is ``(B, M)``; without a batch
    ``(H, N, M)`` and ``(M,)``.
    """
    batch, N, M = query.shape[:-2], query.shape[-2], key.shape[-2]
    if attn_mask is not None:
        check_mask_kind("attn_mask", attn_mask, query.device)
        expected = (N, M) if attn_mask.dim() == 2 else (math.prod(batch) * num_heads, N, M)
        check_shape("attn_mask", attn_mask, expected, "(N, M), or (batch x num_heads, N, M)")
        check_mask_values("attn_mask", attn_mask)
    if key_padding_mask is not None:
        check_mask_kind("key_padding_mask", key_padding_mask, query.device)
        check_shape(
            "key_padding_mask", key_padding_mask, (*batch, M), "the batch and length of key"
        )
        check_mask_values("key_padding_mask", key_padding_mask)


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
