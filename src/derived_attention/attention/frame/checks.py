"""Argument checks, and the calling convention that every mechanism shares.

A check runs before any work, reads shapes, dtypes and devices only, and raises ``TypeError``
(wrong kind: not a tensor, wrong dtype) or ``ValueError`` (wrong shape, device or value) with a
message that names the argument, what it was and what was expected. The one check that must read
data, `check_mask_values`, says what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

POOLED = "the steps of a pooled key have no score of their own to add to"
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Mechanism = Callable[..., Any]  # (q, k, v, attn_mask, ...) to H; for a model also a class of layers


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None, components: bool = False) -> None:
    """Check that queries, keys and values are floating, alike, and of matching shapes.

    Keys with `components` are ``(..., R, M, D)``, else ``(..., M, D)``.
    """
    check_floating({"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v})
    if q.dim() < 2 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., N, D) with D at least 1")
    *leading, _, D = q.shape
    M = k.shape[-2] if k.dim() > 1 else "M"
    if components:
        R = k.shape[-3] if k.dim() > 2 and k.shape[-3] else "R"
        meaning = "R ≥ 1 keys for each of M tokens, and the rest as in q"
        check_shape("k", k, (*leading, R, M, D), meaning)
    else:
        check_shape("k", k, (*leading, M, D), "the leading dimensions and D of q")
    if v is not None:
        Dv = v.shape[-1] if v.dim() > 0 else "Dv"
        check_shape("v", v, (*leading, M, Dv), "the leading dimensions of q and the M of k")


def check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool = False) -> None:
    """Check a mask against the scores ``(..., N, M)`` of `q` and `k`, and against `is_causal`."""
    check_flag("is_causal", is_causal)
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
    if not broadcasts(sizes, scores):
        raise ValueError(
            f"attn_mask has shape {sizes}; expected one that broadcasts to the scores' "
            f"shape (..., N, M) = {scores}"
        )
    check_mask_values("attn_mask", attn_mask)


def broadcasts(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Say whether a tensor of some sizes broadcasts to a shape."""
    if len(sizes) > len(shape):
        return False
    matched = zip(sizes, shape[len(shape) - len(sizes) :], strict=True)
    return all([have in (1, want) for have, want in matched])  # of a list: old compilers trace it


def check_mask_kind(name: str, mask: Tensor, device: torch.device) -> None:
    """Check that a mask is a boolean or floating tensor on `device`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is {_kind(mask)}; expected a boolean or floating Tensor")
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise TypeError(f"{name} has dtype {mask.dtype}; expected torch.bool or a floating dtype")
    if mask.device != device:
        raise ValueError(f"{name} is on device {mask.device}; expected {device}, that of the rest")


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype of sums: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def may_look_at(x: Tensor) -> bool:
    """Say whether data can be read.

    Not under a compiler, in the capture of a CUDA graph, of a tensor on "meta" or a fake one, and
    not in a transform of ``torch.func``, where one tensor may stand for many.
    """
    if torch.compiler.is_compiling() or not has_data(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def is_symbolic(*sizes: int) -> bool:
    """Say whether a size stands for many: ``torch.export`` hands on a dynamic dimension so.

    Then what is cut into so many pieces, or compared with a number, would hold for this size alone.
    """
    return any(isinstance(n, torch.SymInt) for n in sizes)


def cut_any_length(x: Tensor, size: int, count: int, fill: float = 0.0, before: int = 0) -> Tensor:
    """Cut (..., n, D) into (..., count, size, D), with `fill` before and after, if n `is_symbolic`.

    By places, as views ask whether n is divisible.
    """
    at = torch.arange(count, device=x.device)[:, None] * size - before
    at = at + torch.arange(size, device=x.device)
    n = x.shape[-2]
    there = ((at >= 0) & (at < n)).unsqueeze(-1)
    return x[..., at.clamp(min=0).minimum(at.new_full((), n - 1)), :].masked_fill(~there, fill)


def has_data(x: Tensor) -> bool:
    """Say whether a tensor has numbers: not on "meta", not a fake one, not one in a transform."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not (x.is_meta or hasattr(x, "fake_mode") or wrapped)


def check_mask_values(name: str, mask: Tensor) -> None:
    """Refuse NaN and +inf in a floating mask, which would make every output of the row NaN.

    On a GPU it waits for the device, once per call and only for a floating mask: a boolean mask or
    ``is_causal`` costs nothing. It is skipped where `may_look_at` says so.
    """
    if mask.dtype != torch.bool and may_look_at(mask) and not bool((mask < math.inf).all()):
        bad = "NaN" if bool(mask.isnan().any()) else "+inf"
        raise ValueError(f"{name} contains {bad}; expected finite numbers or -inf")


def check_no_bias(name: str, mask: Tensor, because: str = POOLED) -> None:
    """Refuse a floating mask with numbers other than 0 and -inf; reads data, where that can be."""
    if mask.dtype == torch.bool or not may_look_at(mask):
        return
    if not bool(((mask == 0) | (mask == -math.inf)).all()):
        raise ValueError(
            f"{name} has numbers other than 0 and -inf; expected only these: {because}"
        )


def check_query_mask(query_mask: Tensor | None, q: Tensor) -> None:
    """Check for None, or a boolean mask that is False where a query of q (..., N, D) is padding."""
    if query_mask is None:
        return
    if not isinstance(query_mask, Tensor) or query_mask.dtype != torch.bool:
        kind = type(query_mask).__name__
        kind = f"has dtype {query_mask.dtype}" if kind == "Tensor" else f"is of type {kind}"
        raise TypeError(f"query_mask {kind}; expected a torch.bool Tensor")
    sizes, queries = tuple(query_mask.shape), tuple(q.shape[:-1])
    if not broadcasts(sizes, queries):
        raise ValueError(
            f"query_mask has shape {sizes}; expected one that broadcasts to {queries}, the queries'"
        )


def check_count(name: str, value: int, least: int) -> int:
    """Check that `value` is a whole Python number, at least `least`, and return it."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
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


def check_probability(name: str, value: float) -> None:
    """Check for a Python number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {_kind(value)}; expected a probability, from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; expected a probability, from 0 to 1")


def check_flag(name: str, value: bool) -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def check_callable(name: str, value: Mechanism, expected: str = "a function of (q, k, v)") -> None:
    """Check for something that can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r}; expected {expected}")


def check_floating(tensors: Mapping[str, Any]) -> None:
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
        if x.dtype != wanted.dtype and not autocasts(x.device):
            raise TypeError(f"{name} has dtype {x.dtype}; expected {wanted.dtype}, that of {first}")


def autocasts(device: torch.device) -> bool:
    """Say whether autocast is on for a device; "meta" has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_shape(name: str, x: Tensor, expected: tuple, meaning: str) -> None:
    """Check for an exact shape, explained by `meaning`."""
    if tuple(x.shape) != expected:
        shape = "(" + ", ".join(map(str, expected)) + ")"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}: {meaning}")


def check_parameter(name: str, value: Any, q: Tensor, shapes: tuple, meaning: str) -> Tensor:
    """Check for a floating tensor of one of some shapes, on the device of `q`."""
    if not isinstance(value, Tensor) or value.dtype not in FLOATING:
        kind = f"of dtype {value.dtype}" if isinstance(value, Tensor) else _kind(value)
        raise TypeError(f"{name} is {kind}; expected a floating Tensor")
    if value.device != q.device:
        raise ValueError(f"{name} is on device {value.device}; expected {q.device}, that of q")
    if tuple(value.shape) not in shapes:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected one of {shapes}: {meaning}"
        )
    return value


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
