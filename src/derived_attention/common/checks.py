"""Argument checks.

A check runs before any work, reads shapes, dtypes and devices only, and raises ``TypeError``
(wrong kind: not a tensor, wrong dtype) or ``ValueError`` (wrong shape, device or value) with a
message that names the argument, what it was and what was expected. Three checks must read data:
`check_mask_values`, `check_no_bias` and `check_numbers`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

POOLED = "the steps of a pooled key have no scores to which it could be added"
LARGEST = sys.float_info.max
POSITIVE = (math.ulp(0.0), LARGEST)  # the smallest number above 0, and the largest
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Mechanism = Callable[..., Any]  # (q, k, v, attn_mask, ...) to H; for a model also a class of layers
RANGES: dict[str, Callable[[Tensor], Tensor]] = {  # which numbers a parameter may have
    "finite": torch.isfinite,
    "finite and positive": lambda x: (x > 0) & (x < math.inf),
    "finite and at least 0": lambda x: (x >= 0) & (x < math.inf),
    "finite and at most 0": lambda x: (x <= 0) & (x > -math.inf),
}


def check_qkv(q: Tensor, k: Tensor, v: Tensor | None = None, components: bool = False) -> None:
    """Check that queries, keys and values share a floating dtype and device, and that shapes match.

    Keys with `components` are ``(..., R, M, D)``, else ``(..., M, D)``.
    """
    check_floating({"q": q, "k": k} if v is None else {"q": q, "k": k, "v": v})
    if q.dim() < 2 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., N, D) with D at least 1")
    *leading, _, D = q.shape
    M = k.shape[-2] if k.dim() > 1 else "M"
    if components:
        R = k.shape[-3] if k.dim() > q.dim() and k.shape[-3] else "R"
        meaning = "R ≥ 1 keys for each of M tokens, the rest as in q; use k.unsqueeze(-3) for R = 1"
        check_shape("k", k, (*leading, R, M, D), meaning)
    else:
        meaning = "the leading dimensions and D of q; enable_gqa=True allows fewer heads"
        check_shape("k", k, (*leading, M, D), meaning)
    if v is not None:
        Dv = v.shape[-1] if v.dim() > 0 else "Dv"
        check_shape("v", v, (*leading, M, Dv), "the leading dimensions of q and the M of k")


def check_keys(k: Tensor, v: Tensor, components: bool = False) -> None:
    """Check keys ``(..., M, D)``, or ``(..., R, M, D)`` with `components`, and values."""
    check_floating({"k": k, "v": v})
    least = 2 + components
    if k.dim() < least or k.shape[-1] == 0:
        sizes = "(..., R, M, D)" if components else "(..., M, D)"
        raise ValueError(f"k has shape {tuple(k.shape)}; expected {sizes} with D at least 1")
    Dv = v.shape[-1] if v.dim() else "Dv"
    check_shape("v", v, (*k.shape[:-least], k.shape[-2], Dv), "a value for each token of k")


def check_causal_state(state: object, is_causal: bool) -> None:
    """Check that a state, if there is one, comes before causal queries."""
    if state is not None and not is_causal:
        raise ValueError(
            "state is given, and is_causal is False; expected is_causal=True: a state holds the "
            "keys before the first query"
        )


def check_parts(state: Any, kind: type, like: Tensor, *shapes: tuple) -> None:
    """Check that a state is a tuple of this kind, with floating tensors of these shapes."""
    if not isinstance(state, kind):
        raise TypeError(f"state is {_kind(state)}; expected a {kind.__name__}")
    for name, x, shape in zip(kind._fields, state, shapes, strict=True):  # type: ignore
        check_parameter(f"state.{name}", x, like, (shape,), "the batch and sizes of the keys")


def check_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool = False) -> None:
    """Check a mask against the scores ``(..., N, M)`` of `q` and `k`, and against `is_causal`."""
    check_flag("is_causal", is_causal)
    if attn_mask is None:
        return
    if is_causal:
        raise ValueError(
            "attn_mask and is_causal=True were both given; expected one of them: "
            "merge the causal triangle into attn_mask with `causal_mask`"
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
    """Return whether a tensor with these sizes broadcasts to a shape."""
    if len(sizes) > len(shape):
        return False
    matched = zip(sizes, shape[len(shape) - len(sizes) :], strict=True)
    return all([have in (1, want) for have, want in matched])  # a list, for torch.compile


def check_mask_kind(name: str, mask: Tensor, device: torch.device) -> None:
    """Check that a mask is a boolean or floating tensor on `device`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is {_kind(mask)}; expected a boolean or floating Tensor")
    if mask.dtype != torch.bool and mask.dtype not in FLOATING:
        raise TypeError(f"{name} has dtype {mask.dtype}; expected torch.bool or a floating dtype")
    if mask.device != device:
        raise ValueError(f"{name} is on device {mask.device}; expected {device}, that of the query")


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of x are taken: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of factors whose sums are in float32 at least: on a GPU, that of x."""
    return torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype


def has_concrete_values(x: Tensor) -> bool:
    """Return whether the numbers of x can be read by Python code.

    They cannot under a compiler, during the capture of a CUDA graph, of a meta or fake tensor, or
    in a transform of ``torch.func``, where one tensor may stand for many.
    """
    if torch.compiler.is_compiling() or x.is_meta or hasattr(x, "fake_mode"):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def check_mask_values(name: str, mask: Tensor) -> None:
    """Refuse NaN and +inf in a floating mask, which would make every output of the row NaN.

    On a GPU it waits for the device, once per call and only for a floating mask: a boolean mask or
    ``is_causal`` costs nothing. It is skipped where `has_concrete_values` is False.
    """
    if mask.dtype != torch.bool and has_concrete_values(mask) and not bool((mask < math.inf).all()):
        bad = "NaN" if bool(mask.isnan().any()) else "+inf"
        raise ValueError(f"{name} contains {bad}; expected finite numbers or -inf")


def check_no_bias(name: str, mask: Tensor, because: str = POOLED) -> None:
    """Refuse a floating mask with numbers other than 0 and -inf, if it has concrete values.

    On a GPU it waits for the device.
    """
    if mask.dtype == torch.bool or not has_concrete_values(mask):
        return
    if not bool(((mask == 0) | (mask == -math.inf)).all()):
        raise ValueError(f"{name} has numbers other than 0 and -inf; expected no others: {because}")


def check_numbers(name: str, x: Tensor, kind: str = "finite") -> None:
    """Refuse numbers of a parameter that are outside of a range in `RANGES`, and NaN.

    A softmax or a division could turn them into a plausible result. The check is skipped on a GPU,
    where every training step would have to wait for it, and where `has_concrete_values` is False.
    """
    if x.device.type != "cpu" or not has_concrete_values(x):
        return
    if not bool((right := RANGES[kind](x.detach())).all()):
        wrong = float(x.detach()[~right][0])
        raise ValueError(f"{name} contains {wrong:.3g}; expected numbers that are {kind}")


def check_query_mask(query_mask: Tensor | None, q: Tensor) -> None:
    """Check for None, or a boolean mask that is False where a query of q (..., N, D) is padding."""
    if query_mask is None:
        return
    if not isinstance(query_mask, Tensor):
        raise TypeError(f"query_mask is {_kind(query_mask)}; expected a torch.bool Tensor")
    if query_mask.dtype != torch.bool:
        raise TypeError(f"query_mask has dtype {query_mask.dtype}; expected a torch.bool Tensor")
    sizes, queries = tuple(query_mask.shape), tuple(q.shape[:-1])
    if not broadcasts(sizes, queries):
        raise ValueError(
            f"query_mask has shape {sizes}; expected one that broadcasts to {queries}, "
            "the shape of the queries"
        )


def check_count(name: str, value: int, least: int) -> int:
    """Check that `value` is a whole number, at least `least`, and return it."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} is {_kind(value)}; expected a whole number")
    if value < least:
        raise ValueError(f"{name} is {value}; expected a whole number, at least {least}")
    return value


def check_number(name: str, value: float, expected: str, low: float, high: float) -> float:
    """Check for a Python number from `low` to `high`, as `expected` says, and return a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {_kind(value)}; expected {expected}")
    if not low <= value <= high:  # NaN compares false
        raise ValueError(f"{name} is {value}; expected {expected}")
    return float(value)


def check_positive(name: str, value: float) -> float:
    """Check that `value` is a finite positive Python number and return it as a float."""
    if value.__class__ is float and 0 < value < math.inf:
        return value
    return check_number(name, value, "a finite positive number", *POSITIVE)


def check_finite(name: str, value: float) -> float:
    """Check for a finite Python number, where a tensor would do too, and return it as a float."""
    return check_number(name, value, "a finite number or a floating Tensor", -LARGEST, LARGEST)


def check_probability(name: str, value: float) -> None:
    """Check for a Python number from 0 to 1."""
    check_number(name, value, "a probability, from 0 to 1", 0, 1)


def check_flag(name: str, value: bool) -> None:
    """Check for True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; expected True or False")


def check_flags(**flags: bool) -> None:
    """Check for True or False, by name."""
    for name, value in flags.items():
        if value is not True and value is not False:
            check_flag(name, value)


def check_callable(name: str, value: Mechanism, expected: str = "a function of (q, k, v)") -> None:
    """Check that `value` can be called."""
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
    """Return whether autocast is on for a device; it never is for "meta"."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_shape(name: str, x: Tensor, expected: tuple, meaning: str) -> None:
    """Check that x has the shape `expected`, explained by `meaning`."""
    if tuple(x.shape) != expected:
        shape = "(" + ", ".join(map(str, expected)) + ")"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {shape}: {meaning}")


def check_parameter(
    name: str, value: Any, q: Tensor, shapes: tuple = (), meaning: str = "", kind: str = ""
) -> Tensor:
    """Check for a floating tensor with one of these shapes on the device of `q`, and return it.

    Without `shapes` it may have any. Its numbers are of a `kind` in `RANGES`, if one is given.
    Matrices and states have none, because a NaN in them makes results NaN, as in `q`.
    """
    if not isinstance(value, Tensor) or value.dtype not in FLOATING:
        kind = f"of dtype {value.dtype}" if isinstance(value, Tensor) else _kind(value)
        raise TypeError(f"{name} is {kind}; expected a floating Tensor")
    if value.device != q.device:
        raise ValueError(f"{name} is on device {value.device}; expected {q.device}, that of q")
    if shapes and tuple(value.shape) not in shapes:
        wanted = ("one of " if len(shapes) > 1 else "") + ", ".join(str((*x,)) for x in shapes)
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected {wanted}: {meaning}")
    if kind:
        check_numbers(name, value, kind)
    return value


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
