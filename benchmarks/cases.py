"""What is timed: PyTorch's own attention, and each mechanism of the package beside it.

To add a mechanism, add an entry to `CASES`: everything else follows from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention.convolutional import (
    conv1d_attention,
    conv1d_attention_reference,
    conv2d_attention,
    conv2d_attention_reference,
)
from derived_attention.attention.linear import linear_attention, linear_attention_reference
from derived_attention.attention.mixture import (
    linear_mixture_attention,
    linear_mixture_attention_reference,
    mixture_attention,
)
from derived_attention.attention.normalized import (
    normalized_attention,
    normalized_attention_reference,
)
from derived_attention.attention.scaled import (
    scaled_attention,
    scaled_attention_reference,
    scaled_normalized_attention,
    scaled_normalized_attention_reference,
)
from derived_attention.attention.shifted_mixture import shifted_keys, shifted_mixture_attention
from derived_attention.attention.softmax import causal_mask, softmax_attention_reference
from derived_attention.attention.sparse import (
    fixed_attention,
    fixed_attention_reference,
    strided_attention,
    strided_attention_reference,
    window_attention,
    window_attention_reference,
)

Attention = Callable[..., Tensor]  # (q, k, v, **options) -> output
HEADS = 8
GOAL_LENGTH = 4096  # goals are for this length: forward, in float32, on one thread of a CPU


@dataclass(frozen=True)
class Case:
    """A mechanism to time.

    Attributes
    ----------
    label : str
        What a table calls it.
    fast, reference : callable
        Its two forms, functions of q, k, v and `options`.
    options : callable
        The options at a sequence length N. Tensors among them are parameters: they are brought to
        the inputs' dtype and device, and get a gradient.
    baseline : str
        The name in `CASES` of what it is beside.
    goal : float, optional
        Largest time as a share of the baseline's, at `GOAL_LENGTH`.
    reference_length : int
        Longest N for which to measure the reference's memory at N and 2N.
    """

    label: str
    fast: Attention
    reference: Attention
    options: Callable[[int], dict[str, Any]] = lambda N: {}
    baseline: str = "sdpa"
    goal: float | None = None
    reference_length: int = 1024


def grid(N: int) -> tuple[int, int]:
    """Rows and columns of the squarest image of N pixels."""
    rows = next(r for r in range(math.isqrt(N), 0, -1) if N % r == 0)
    return rows, N // rows


def near_root(N: int) -> int:
    """Largest power of two up to √N, the cheapest stride of sparse patterns."""
    return 1 << (N.bit_length() - 1) // 2


def is_causal(N: int) -> dict[str, Any]:
    """Options of a causal case without others."""
    return {"is_causal": True}


def second_keys(k: Tensor) -> Tensor:
    """Keys of a second component: as many and as random as the first, and other ones."""
    return k.flip(-2)


def dense_mixture(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, hard: bool = False
) -> Tensor:
    """Eq. 7 with an (N, M) matrix for each step, as it is mostly programmed, but safely."""
    logarithms = []
    for key in k.unbind(-3):
        lengths = q.square().sum(-1, keepdim=True) + key.square().sum(-1).unsqueeze(-2)
        s = (q @ key.mT - lengths / 2) / math.sqrt(q.shape[-1])  # −‖q − k‖²/2σ²
        if is_causal:
            s = s.masked_fill(~causal_mask(*s.shape[-2:], s.device), -math.inf)
        logarithms.append(s)
    most = functools.reduce(torch.maximum, logarithms).amax(-1, keepdim=True)
    terms = [(s - most).exp() for s in logarithms]
    total = functools.reduce(torch.maximum if hard else torch.add, terms)
    return total / total.sum(-1, keepdim=True) @ v


def two_keys(form: Attention) -> Attention:
    """Give a mixture two keys for each token."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return form(q, torch.stack([k, second_keys(k)], -3), v, **options)

    return attend


def two_shifts(form: Attention) -> Attention:
    """Give a mixture of shifted keys two shifts: as random as keys, since they are keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return form(q, k, v, shifts=k[0, :, :2], **options)

    return attend


def dense_shifted_mixture(
    q: Tensor, k: Tensor, v: Tensor, *, shifts: Tensor, **options: Any
) -> Tensor:
    """Make R keys of each one first."""
    return dense_mixture(q, shifted_keys(k, shifts), v, **options)


def two_heads(form: Attention) -> Attention:
    """Attend with twice the heads, one for each key of a mixture of two, and add up in pairs."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        keys = torch.cat([k, second_keys(k)], -3)
        both = form(torch.cat([q, q], -3), keys, torch.cat([v, v], -3), **options)
        first, second = both.chunk(2, -3)
        return first + second

    return attend


def hard(N: int) -> dict[str, Any]:
    """Options of a mixture with the hard E-step."""
    return {"hard": True}


_scales = [1, 1, 2, 2, 4, 4, 8, 8]  # of HEADS heads
_sdpa = (F.scaled_dot_product_attention, softmax_attention_reference)
_linear = (linear_attention, linear_attention_reference)
_normalized = (normalized_attention, normalized_attention_reference)  # its formula takes N²D
_double = tuple(map(two_heads, _sdpa))
_mixture = tuple(map(two_keys, (mixture_attention, dense_mixture)))
_shifted = tuple(map(two_shifts, (shifted_mixture_attention, dense_shifted_mixture)))
_linear_mixture = tuple(
    map(two_keys, (linear_mixture_attention, linear_mixture_attention_reference))
)
_short, _long = 128, 2048

CASES: dict[str, Case] = {
    "sdpa": Case("SDPA", *_sdpa),
    "sdpa_causal": Case("SDPA, causal", *_sdpa, is_causal, "sdpa_causal"),
    "linear": Case("linear", *_linear),
    "linear_causal": Case("linear, causal", *_linear, is_causal, "sdpa_causal", goal=0.15),
    "window": Case(
        "window of 64",
        *(window_attention, window_attention_reference),
        lambda N: {"window": 64},
        goal=0.10,
    ),
    "strided": Case(
        "strided, every √N-th",
        *(strided_attention, strided_attention_reference),
        lambda N: {"stride": near_root(N)},
    ),
    "fixed": Case(
        "fixed, blocks of √N",
        *(fixed_attention, fixed_attention_reference),
        lambda N: {"stride": near_root(N)},
    ),
    "normalized": Case("BN, recentred", *_normalized, goal=1.05, reference_length=_short),
    "normalized_causal": Case(
        "BN, recentred, causal",
        *_normalized,
        is_causal,
        "sdpa_causal",
        goal=1.10,
        reference_length=_short,
    ),
    "normalized_full": Case(
        "BN, full",
        *_normalized,
        lambda N: {"eps": 1e-5},
        goal=1.05,
        reference_length=_short,
    ),
    "normalized_full_causal": Case(
        "BN, full, causal",
        *_normalized,
        lambda N: {"eps": 1e-5, "is_causal": True},
        "sdpa_causal",
        goal=1.10,
        reference_length=_short,
    ),
    "scaled": Case(
        "SH",
        *(scaled_attention, scaled_attention_reference),
        lambda N: {"scales": _scales},
        goal=0.52,
    ),
    "scaled_normalized": Case(
        "BN+SH",
        *(scaled_normalized_attention, scaled_normalized_attention_reference),
        lambda N: {"scales": _scales},
        goal=0.52,
        reference_length=_short,
    ),
    "conv1d": Case(
        "Conv1D, 5 taps",
        *(conv1d_attention, conv1d_attention_reference),
        lambda N: {"weight": torch.linspace(0.1, 0.3, 5)},
        goal=1.10,
    ),
    "conv2d": Case(
        "Conv2D, 3×3 taps",
        *(conv2d_attention, conv2d_attention_reference),
        lambda N: {"weight": torch.linspace(0.05, 0.2, 9).view(3, 3), "grid": grid(N)},
    ),
    "sdpa_double": Case("SDPA, twice the heads", *_double, baseline="sdpa_double"),
    "sdpa_double_causal": Case(
        "SDPA, twice the heads, causal", *_double, is_causal, "sdpa_double_causal"
    ),
    "mixture": Case(
        "MGK, 2 keys", *_mixture, baseline="sdpa_double", goal=1.15, reference_length=_long
    ),
    "mixture_causal": Case(
        "MGK, 2 keys, causal",
        *_mixture,
        is_causal,
        "sdpa_double_causal",
        goal=1.20,
        reference_length=_long,
    ),
    "mixture_hard": Case(
        "MGK, 2 keys, hard", *_mixture, hard, "sdpa_double", goal=1.10, reference_length=_long
    ),
    "mixture_shifted": Case(
        "sMGK, 2 shifts", *_shifted, baseline="sdpa_double", goal=1.00, reference_length=_long
    ),
    "mixture_shifted_causal": Case(
        "sMGK, 2 shifts, causal", *_shifted, is_causal, "sdpa_double_causal", reference_length=_long
    ),
    "linear_mixture": Case("MLK, 2 keys", *_linear_mixture, baseline="sdpa_double"),
    "linear_mixture_causal": Case(
        "MLK, 2 keys, causal", *_linear_mixture, is_causal, "sdpa_double_causal", goal=0.15
    ),
}
