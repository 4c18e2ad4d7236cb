"""Four attentions whose time is linear in N, which avoid the (N, M) matrix (appendix D).

The equations of this module, for queries Q (N, D), keys K (M, D) and values V (M, Dv), are ::

    Linformer   H = softmax(Q (E K)ᵀ/√D) F V                    E, F: (kept, M)
    Performer   H = diag(φ(Q) φ(K)ᵀ 1)⁻¹ φ(Q) φ(K)ᵀ V           φ(x)_r = exp(w_r·x − ‖x‖²/2)/√R
    FMM         H = near · H_window + far · Σ_φ H_linear(φ)
    Luna        H = softmax(Q K'ᵀ/√D) V',    K' = A' K,  V' = A' V,  A' = softmax(P Kᵀ/√D)

Linformer and Luna shorten the keys and values before the softmax: by learned weights for each
position, and by another attention, whose queries are learned. Performer and FMM keep all keys and
change the kernel: random features whose mean is softmax's kernel, and softmax for near keys with
linear attention for far ones. The layers override `mechanism` only, so that they can be combined
with a layer that overrides `mix`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention import formulas
from derived_attention.common.checks import (
    accumulation_dtype,
    check_callable,
    check_count,
    check_parameter,
    has_concrete_values,
)
from derived_attention.common.convention import (
    extend,
    full_precision,
    mechanism,
    reference,
    reference_of,
)
from derived_attention.common.masks import Mask, cast_mask, masked_softmax
from derived_attention.linear.core import (
    FeatureMap,
    apply_feature_map,
    elu_feature_map,
    linear_attention,
    ratio,
    sums_and_state,
    with_ones,
)
from derived_attention.softmax.core import sdpa
from derived_attention.sparse.core import window_attention

SEGMENT = 256  # positions whose features stay in the cache of a CPU
LONGEST = 2048  # positions of a segment on a GPU

# --- Linformer: fewer keys, by learned weights ---------------------------------------------------


def _rows_of(name: str, value: Any, q: Tensor, columns: str | int) -> Tensor:
    """Check for a matrix (R, columns) with R ≥ 1; if `columns` is a letter, of any number."""
    is_matrix = isinstance(value, Tensor) and value.dim() == 2
    rows = value.shape[0] or "R" if is_matrix else "R"
    size = value.shape[1] if is_matrix and isinstance(columns, str) else columns
    return check_parameter(name, value, q, ((rows, size),), f"(R, {columns}) with R at least 1")


def check_projections(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, key_projection: Any,
    value_projection: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Check E and F, and the mask; return E and F for the M keys, in float32 at least."""
    if mask.is_causal:
        raise ValueError(
            "is_causal is True; expected False: a projected key depends on later tokens, and is "
            "the same for every query"
        )
    M = k.shape[-2]
    E = _rows_of("key_projection", key_projection, q, "n")
    if E.shape[1] < M:
        raise ValueError(
            f"key_projection has shape {tuple(E.shape)}; expected (kept, n) with n at least {M}, "
            "the number of keys"
        )
    G = E
    if value_projection is not None:
        meaning = "the shape of key_projection"
        G = check_parameter("value_projection", value_projection, q, (tuple(E.shape),), meaning)
    E, G = E.to(accumulation_dtype(q)), G.to(accumulation_dtype(q))
    return {"key_projection": E[:, :M], "value_projection": G[:, :M]}


@mechanism(per_key=True, formula=formulas.linformer, checks=check_projections)
def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    key_projection: Tensor,
    value_projection: Tensor,
) -> Tensor:
    """Linformer [Wang2020]: softmax attention to `kept` weighted sums of keys and of values.

    H = softmax(Q (E K)ᵀ/√D) F V, in O((N + M) kept D) time. A = softmax(Q (E K)ᵀ/√D) F has rows
    that need not sum to 1, nor be positive.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: finite, or -inf; -8192 and below count as -inf.
        A single key has no score to which a number m could be added. So the key and its value are
        multiplied by exp(m), divided by the largest exp(m): 0 acts like True, -inf like False.
    is_causal : bool
        Has to be False: a projected key depends on later tokens, and is the same for every query.
    key_projection : Tensor
        E ``(kept, n)``, shared by the heads, with n at least M. Its first M columns are used.
    value_projection : Tensor, optional
        F ``(kept, n)``; E if left out.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> E = torch.randn(3, 10)  # (kept, n)
    >>> linformer_attention(q, k, v, key_projection=E).shape
    torch.Size([2, 4, 10, 8])
    """
    if mask.given is not None:
        share = mask.share(k).unsqueeze(-1)
        k, v = k * share, v * share
    return sdpa(q, _combine(key_projection, k), _combine(value_projection, v), Mask(), scale)


def _combine(E: Tensor, x: Tensor) -> Tensor:
    """E X for all heads, as one product: (kept, M) and (..., M, D) to (..., kept, D)."""
    with full_precision(x.device):
        return F.linear(x.mT.to(E.dtype), E).mT.to(x.dtype)


# --- Performer: features whose mean is the exponential -------------------------------------------


def orthogonal_features(
    D: int,
    count: int,
    generator: torch.Generator | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Draw W ``(count, D)``: standard normal rows, orthogonal to each other in blocks of D.

    Each row alone is a standard normal vector: its direction is that of a row of a random rotation,
    its length that of another such vector. So a mean over rows has the same expectation as with
    independent ones, and less variance [Choromanski2021].

    Parameters
    ----------
    D, count : int
        Features of a head, and number of rows, at least 1.
    generator : torch.Generator, optional
        The source of random numbers; if left out, the default one of the device.
    """
    check_count("D", D, 1)
    check_count("count", count, 1)
    kind: dict[str, Any] = {"device": device, "dtype": torch.float64, "generator": generator}
    rotations, R = torch.linalg.qr(torch.randn(-(-count // D), D, D, **kind))
    rotations = rotations * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # makes them uniform
    lengths = torch.randn(count, D, **kind).norm(dim=-1, keepdim=True)
    W = rotations.mT.flatten(0, 1)[:count] * lengths
    return W.to(torch.get_default_dtype() if dtype is None else dtype)


def check_projection(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, projection: Any
) -> dict[str, Any]:
    """Check W (R, D)."""
    return {"projection": _rows_of("projection", projection, q, q.shape[-1])}


@mechanism(per_key=True, formula=formulas.performer, checks=check_projection)
def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    projection: Tensor,
) -> Tensor:
    """Linear attention with positive random features: Performer, FAVOR+ of [Choromanski2021].

    φ(x)_r = exp(w_r·x − ‖x‖²/2)/√R at x = q/⁴√D and k/⁴√D, so that the mean of φ(q)ᵀφ(k) over w is
    exp(q·k/√D), softmax's kernel. O((N + M) R Dv) operations, causal as in `linear_attention`;
    sums in float32 at least.

    A factor common to all features of a query divides out. One feature of all keys may be divided
    by a number, if the same feature of all queries is multiplied by it. This number is the largest
    value of the feature for any key; with `is_causal`, the largest one before a segment of 256
    positions (on a GPU up to 2048). If a feature grows by more than e⁴⁴ within a segment (e³⁵⁵ in
    float64), that segment takes about four times as much work. Where data cannot be read, as under
    ``torch.compile``, all segments do.

    Parameters
    ----------
    projection : Tensor
        W ``(R, D)``, its rows w_r, shared by the heads: see `orthogonal_features`.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> W = orthogonal_features(8, 32)
    >>> performer_attention(q, k, v, projection=W).shape
    torch.Size([2, 4, 10, 8])
    """
    scale = scale or 1 / math.sqrt(q.shape[-1])
    W = math.sqrt(scale) * projection.to(accumulation_dtype(q))
    attend = _attend_before if mask.is_causal else functools.partial(_attend_all, mask=mask)
    with full_precision(q.device):
        return attend(q, k, v, W, scale).to(q.dtype)


def _rows(W: Tensor, top: Tensor) -> Tensor:
    """[W, 1, top] (..., R, D + 2): what `_queries` and `_keys` are multiplied by."""
    W = W.expand(*top.shape[:-2], *W.shape)
    return torch.cat([W, torch.ones_like(top).mT, top.mT], -1)


def _queries(q: Tensor, rows: Tensor) -> Tensor:
    """Return w_r·q_i + top_r (..., N, R), without −‖q‖²/2, which divides out."""
    zero = rows.new_zeros(()).expand(*q.shape[:-1], 1)
    return torch.cat([q, zero, zero + 1], -1) @ rows.mT


def _keys(k: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Return w_r·k_j − scale ‖k_j‖²/2 − top_r (..., M, R)."""
    squares = -scale / 2 * k.to(rows.dtype).square().sum(-1, keepdim=True)
    return torch.cat([k, squares, -torch.ones_like(squares)], -1) @ rows.mT


def _attend_all(q: Tensor, k: Tensor, v: Tensor, W: Tensor, scale: float, mask: Mask) -> Tensor:
    """Return averages over all keys, whose features are divided by the largest of any key."""
    M, size = k.shape[-2], SEGMENT if q.device.type == "cpu" else max(q.shape[-2], k.shape[-2], 1)
    rows = _rows(W, W.new_zeros(1, len(W)))
    parts = [_keys(x, rows, scale) for x in k.split(size, -2)]  # (..., m, R)
    if mask.given is not None:
        given = mask.given.expand(*mask.given.shape[:-1], M).mT  # (..., M, 1)
        if given.dtype == torch.bool:
            given = W.new_zeros(given.shape).masked_fill(~given, -math.inf)
        added = cast_mask(given, W.dtype).split(size, -2)
        parts = [x + y for x, y in zip(parts, added, strict=True)]
    tops = [x.detach().amax(-2, keepdim=True) for x in parts if M]
    top = functools.reduce(torch.maximum, tops, W.new_full((1, len(W)), -math.inf))
    top = top.masked_fill(top == -math.inf, 0)  # all keys are masked
    pairs = zip(parts, v.split(size, -2), strict=True)
    S = sum(x.sub_(top).exp_().mT @ with_ones(y, x.dtype) for x, y in pairs)
    rows = _rows(W, top)
    return torch.cat([ratio(_queries(x, rows).softmax(-1) @ S) for x in q.split(size, -2)], -2)


def _attend_before(q: Tensor, k: Tensor, v: Tensor, W: Tensor, scale: float) -> Tensor:
    """Return averages over the keys j ≤ i, segment by segment.

    Features are divided by the largest one among the keys before the segment, or by that of the
    first key: by what no later key influences. From the first key on that has a feature larger by
    more than half of the range of a float, `_by_halves` is used, which has no such limit.
    """
    N, n = q.shape[-2], min(q.shape[-2], k.shape[-2])
    sizes = _sizes(n, SEGMENT if q.device.type == "cpu" else LONGEST)
    limits = torch.finfo(W.dtype)
    room, H = math.log(limits.max) / 2, []
    top = W.new_zeros(*q.shape[:-2], 1, len(W))
    if n:  # not -inf, as -inf - -inf is NaN
        top = _keys(k[..., :1, :], _rows(W, top), scale).detach().clamp(min=limits.min / 4)
    state = W.new_zeros(*q.shape[:-2], len(W), v.shape[-1] + 1)
    *queries, rest = q.split([*sizes, N - n], -2)
    keys, values = (x[..., :n, :].split(sizes, -2) for x in (k, v))
    for q_s, k_s, v_s in zip(queries, keys, values, strict=True):
        rows, v_s = _rows(W, top), with_ones(v_s, W.dtype)
        a, logs = _queries(q_s, rows), _keys(k_s, rows, scale)
        growth = logs.detach().amax(-2, keepdim=True).clamp(min=0)
        steep = not has_concrete_values(logs) or bool((growth > room).any())
        K, shrink = (logs.clamp(max=room) if steep else logs).exp_(), (-growth).mT.exp()
        sums, last = sums_and_state(a.softmax(-1), K, v_s, state)
        if steep:
            late = (logs > room).any(-1, keepdim=True).cumsum(-2) > 0
            sums = torch.where(late, _by_halves(a, logs, v_s, state), sums)
            state = shrink * state + (logs - growth).exp_().mT @ v_s
        else:
            state = shrink * last
        H.append(ratio(sums))
        top = top + growth
    if N > n or not H:
        H.append(ratio(_queries(rest, _rows(W, top)).softmax(-1) @ state))
    return torch.cat(H, -2)


def _sizes(n: int, most: int) -> list[int]:
    """Cut n tokens into segments, each as long as all before it, but between limits.

    So features rarely exceed the largest ones before the segment by much.
    """
    sizes: list[int] = []
    while (left := n - sum(sizes)) > 0:
        sizes.append(min(left, max(SEGMENT, sum(sizes)), most))
    return sizes


def _powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(x − t), in place, and t, the largest number of each row."""
    t = x.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min / 4)
    return x.sub_(t).exp_(), t


def _by_halves(a: Tensor, logs: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """Return sums (..., n, Dv + 1) up to a factor of each query, for keys of any length.

    A query attends itself, the keys before the segment, and for each power of 2, if it is in the
    second half of a block of that size, the keys of the first half. The features of each group are
    divided by the largest one in it, and all of it lies in the past of the query.
    """
    n, size, half, low = a.shape[-2], 1, 1, torch.finfo(a.dtype).min / 4
    while size < n:
        size *= 2
    a, v, logs = (extend(x, size - n, value=y) for x, y in ((a, 0), (v, 0), (logs, -math.inf)))
    own, own_top = _powers(a + logs)
    past, past_top = _powers(a.clone())
    sums, tops = [own.sum(-1, keepdim=True) * v, past @ state], [own_top, past_top]
    while half < size:
        queries, keys, values = (x.unflatten(-2, (-1, 2, half)) for x in (a, logs, v))
        keys = keys[..., 0, :, :]
        most = keys.detach().amax(-2, keepdim=True).clamp(min=low)
        Q, t = _powers(queries[..., 1, :, :] + most)
        part = (Q @ (keys - most).exp_().mT) @ values[..., 0, :, :]
        sums.append(extend(part, 0, before=half).flatten(-3, -2))  # zeros for the first halves
        tops.append(extend(t, 0, before=half, value=low).flatten(-3, -2))
        half *= 2
    most = functools.reduce(torch.maximum, tops)
    parts = [(t - most).exp() * part for t, part in zip(tops, sums, strict=True)]
    return functools.reduce(torch.add, parts)[..., :n, :]


# --- FMM: softmax for near keys, features for far ones -------------------------------------------


def flipped_elu_feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(−x) + 1, entry by entry: the mirror image of `elu_feature_map`."""
    return elu_feature_map(-x)


@mechanism(per_key=True)
def fmm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float | None,
    *,
    window: int,
    near: Any,
    far: Any,
    feature_maps: Any = (elu_feature_map,),
) -> Tensor:
    """FMMformer [Nguyen2021]: softmax in a band, plus linear attention to everything.

    The matrix of attention is near · (softmax of a band) + far · (a sum of matrices of low rank),
    and its rows sum to near + far · (number of feature maps). O(N (window + F)) time.

    Parameters
    ----------
    scale : float, optional
        Finite and positive; replaces 1/√D for near keys, and multiplies q for far ones.
    window : int
        Keys on each side that are near, at least 0.
    near, far : Tensor
        The two weights, ``()`` for all heads or ``(H,)``, one for each.
    feature_maps : sequence of callable
        At least one; each as in `linear_attention`, for one matrix of low rank.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> half = torch.tensor(0.5)
    >>> fmm_attention(q, k, v, window=2, near=half, far=half).shape
    torch.Size([2, 4, 10, 8])
    """
    near, far, maps = check_fields(q, near, far, feature_maps)
    H = near * window_attention.form(q, k, v, mask, scale, window=window)  # type: ignore
    return (H + far * sum(_far_field(phi, q, k, v, mask, scale) for phi in maps)).to(q.dtype)


def _far_field(
    phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
) -> Any:
    """Return `linear_attention`; a mirror image of elu + 1 as elu + 1, which has a kernel."""
    if phi is flipped_elu_feature_map:
        phi, q, k = elu_feature_map, -q, -k
    return linear_attention.form(q, k, v, mask, scale, feature_map=phi)  # type: ignore


def check_maps(feature_maps: Any) -> tuple[FeatureMap, ...]:
    """Check for a sequence of functions, not empty, and return it."""
    if isinstance(feature_maps, str) or not isinstance(feature_maps, Iterable):
        actual = f"feature_maps is {feature_maps!r}"
        raise TypeError(f"{actual}; expected a sequence of functions from (..., D)")
    maps = tuple(feature_maps)
    if not maps:
        raise ValueError("feature_maps is empty; expected at least one function from (..., D)")
    for i, phi in enumerate(maps):
        if not callable(phi):
            check_callable(f"feature_maps[{i}]", phi, "a function from (..., D)")
    return maps


def check_fields(
    q: Tensor, near: Any, far: Any, feature_maps: Any
) -> tuple[Tensor, Tensor, tuple[FeatureMap, ...]]:
    """Check the weights of the fields, and return them as (..., 1, 1), and the feature maps."""
    maps, shapes = check_maps(feature_maps), ((), tuple(q.shape[-3:-2]))
    dtype, meaning = torch.promote_types(q.dtype, torch.float32), "one number, or one for each head"
    near = check_parameter("near", near, q, shapes, meaning, "finite").to(dtype)
    far = check_parameter("far", far, q, shapes, meaning, "finite").to(dtype)
    return near[..., None, None], far[..., None, None], maps


# --- Luna: fewer keys, by another attention ------------------------------------------------------


def check_packed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, packed: Any
) -> dict[str, Any]:
    """Check P, and the mask."""
    if mask.is_causal:
        raise ValueError(
            "is_causal is True; expected False: a packed key depends on later tokens, and is the "
            "same for every query"
        )
    D = q.shape[-1]
    size = packed.shape[-2] or "l" if isinstance(packed, Tensor) and packed.dim() > 1 else "l"
    shapes = (size, D), (*q.shape[-3:-2], size, D)
    mask.per_key()
    packed = check_parameter("packed", packed, q, shapes, "l ≥ 1 rows, for all heads or for each")
    return {"packed": packed}


@mechanism(per_key=True, formula=formulas.luna, checks=check_packed)
def luna_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, packed: Tensor
) -> Tensor:
    """Luna [Ma2021]: l packed queries P attend all keys, and the queries attend their results.

    H = softmax(Q K'ᵀ/√D) V' with K' = A' K, V' = A' V and A' = softmax(P Kᵀ/√D), in
    O((N + M) l D) time. Rows of A = softmax(Q K'ᵀ/√D) A' sum to 1.

    The original packs the tokens, Y = A' X, and projects Y to keys and values. That is the same:
    rows of A' sum to 1, so A' (X W + 1 bᵀ) = (A' X) W + 1 bᵀ. But it has separate projections for
    the packed tokens, and Y is the P of the next layer; here P is learned for each layer.

    Parameters
    ----------
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: added to the scores P Kᵀ/√D.
    is_causal : bool
        Has to be False: a packed key depends on later tokens, and is the same for every query.
    packed : Tensor
        P ``(l, D)`` for all heads or ``(H, l, D)`` for each, l at least 1.

    Examples
    --------
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)  # each (B, H, N, D)
    >>> P = torch.randn(3, 8)
    >>> luna_attention(q, k, v, packed=P).shape
    torch.Size([2, 4, 10, 8])
    """
    dtype = accumulation_dtype(q)
    with full_precision(q.device):
        scores = (scale or 1 / math.sqrt(q.shape[-1])) * packed.to(dtype) @ k.to(dtype).mT
        A = masked_softmax(scores, mask.per_key())  # (..., l, M), zeros if no key is present
        K, V = ((A @ x.to(dtype)).to(q.dtype) for x in (k, v))  # (..., l, D)
    return sdpa(q, K, V, Mask(), scale)


# --- the formulas, with the same arguments ---


linformer_attention_reference = reference_of(linformer_attention)
performer_attention_reference = reference_of(performer_attention)
luna_attention_reference = reference_of(luna_attention)


@reference(fmm_attention, formulas.fmm)
def fmm_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, *, window: Any, near: Any,
    far: Any, feature_maps: Any = (elu_feature_map,),
) -> dict[str, Any]:  # fmt: skip
    """Check both fields."""
    near, far, maps = check_fields(q, near, far, feature_maps)
    maps = tuple(functools.partial(apply_feature_map, phi) for phi in maps)
    window = check_count("window", window, 0)
    return {"near": near, "far": far, "window": window, "feature_maps": maps}
