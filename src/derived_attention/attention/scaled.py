"""Attention-SH and BN+SH: heads that regress on pooled keys and values (chapter 5).

The equation of this module, for head h with the scale s_h and N_h = ⌈M / s_h⌉, is ::

    K_h, V_h = pool(K, s_h), pool(V, s_h)     (N_h, D), (N_h, Dv)
    H_h = softmax(Q_h K_hᵀ / √D) V_h          (N, Dv)

with all queries, and fewer keys and values: eq. 25. In Attention-BN+SH the softmax attention of a
head is Attention-BN with the mean and the variances of its pooled keys: eqs. 49 to 51. A pooling
turns each window of s_h steps into one, by their average, their maximum, or a convolution with
stride s_h; or it clusters the steps by k-means.

The functions pool keys and values. The layers pool X before they project it (remark 5): the same
for averages, which commute with an affine projection, and less work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derived_attention.attention.checks import (
    check_attention,
    check_count,
)
from derived_attention.attention.normalized import (
    Kernel,
    _allowed,
    check_normalisation,
    normalized_attention,
    normalized_attention_reference,
    register_beta,
    show_beta,
)
from derived_attention.attention.pooling import (
    POOLINGS,
    ConvolutionPooling,
    Pool,
    Pooling,
    keep_first,
    kmeans_pooling,
    max_pooling,
    windows,
)
from derived_attention.attention.softmax import (
    MultiheadAttention,
    _merge_masks,
    softmax_attention,
    softmax_attention_reference,
)

# --- the formula: head by head, window by window -------------------------------------------------


def scaled_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    scales: Sequence[int],
    class_token: bool = False,
    kernel: Kernel = softmax_attention_reference,
) -> Tensor:
    """Attention-SH with average pooling, as it is written.

    The arguments, the result and the errors are those of `scaled_attention`.
    """
    heads = _head_by_head(q, k, v, attn_mask, is_causal, scale, scales, class_token)
    outputs = [kernel(*inputs, scale=scale, **masks) for inputs, masks in heads]
    return torch.stack(outputs, -3)


def scaled_normalized_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    scales: Sequence[int],
    class_token: bool = False,
    beta: float | Tensor = 1.0,
    eps: float | None = None,
    kernel: Kernel = softmax_attention_reference,
) -> Tensor:
    """Attention-BN+SH with average pooling, as it is written.

    The arguments, the result and the errors are those of `scaled_normalized_attention`.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_normalisation(beta, eps, q)
    heads = _head_by_head(q, k, v, attn_mask, is_causal, scale, scales, class_token)
    attend = functools.partial(normalized_attention_reference, scale=scale, eps=eps, kernel=kernel)
    outputs = [
        attend(*inputs, beta=_of_heads(beta, [h]), **masks)
        for h, (inputs, masks) in enumerate(heads)
    ]
    return torch.stack(outputs, -3)


def _head_by_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    scales: Sequence[int],
    class_token: bool,
) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Yield for each head its queries, pooled keys and pooled values, and their masks."""
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_scales(scales, q, attn_mask, is_causal)
    for h, s in enumerate(scales):
        k_h, v_h, mask = _average_windows(q, k, v, attn_mask, h, s, class_token)
        yield (q[..., h, :, :], k_h, v_h), {"attn_mask": mask, "is_causal": is_causal}


def _average_windows(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, h: int, s: int, class_token: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values of head h, one window after the other, and their mask."""
    M = k.shape[-2]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], M)[..., h, :, :]  # (..., N, M)
    k, v = k[..., h, :, :], v[..., h, :, :]
    if s == 1 or M == 0 or q.shape[-2] == 0:
        return k, v, attn_mask
    there = torch.ones_like(k[..., 0], dtype=torch.bool)  # (..., M)
    if attn_mask is not None:
        there = _allowed(attn_mask)[..., 0, :]
    spans = [slice(0, 1)] if class_token else []
    spans += [slice(a, a + s) for a in range(len(spans), M, s)]
    pooled: list[list[Tensor]] = [[], []]
    for window in spans:
        steps = there[..., window, None]  # (..., s, 1)
        for x, done in zip((k, v), pooled, strict=True):
            done.append((x[..., window, :] * steps).sum(-2) / steps.sum(-2).clamp(min=1))
    mask = torch.stack([there[..., window].any(-1) for window in spans], -1)
    return torch.stack(pooled[0], -2), torch.stack(pooled[1], -2), mask[..., None, :]


# --- the same, one call for all heads of a scale -------------------------------------------------


def scaled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    scales: Sequence[int],
    pooling: str | Pooling = "average",
    class_token: bool = False,
    kernel: Kernel = softmax_attention,
    positional: bool = False,
) -> Tensor:
    """Attention-SH, eq. 25 of [Nguyen2023]: the heads of one scale are one call of the kernel.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, D)``, ``(..., H, M, D)`` and ``(..., H, M, Dv)``.
    attn_mask : Tensor, optional
        A mask over keys, the same for every query: broadcastable to ``(..., H, 1, M)``. Boolean:
        True where a key may be attended. Floating: 0 or -inf. A key that may not be attended is
        left out of its pooled key, and a pooled key with none left is masked. Any mask where all
        scales are 1.
    is_causal : bool
        True only where all scales are 1: a pooled key holds the future of all its steps but one.
    scale : float, optional
        Factor of the scores, as in `softmax_attention`; not to be taken for `scales`.
    scales : sequence of int
        s_h for each head, at least 1. Keys and values of head h become ⌈M / s_h⌉.
    pooling : str or callable
        ``"average"``, ``"max"``, ``"k-means"``, or a function such as `average_pooling`, or a
        `ConvolutionPooling`. Values follow the keys: with k-means, in the clusters of the keys.
    class_token : bool
        Whether the first key and value stay as they are, and the windows start after them.
    kernel : callable
        `softmax_attention` or another mechanism with its calling convention.
    positional : bool
        Whether `kernel` depends on the positions of queries and keys, as sparse patterns do. It
        then runs on the pooled sequence, where query i stands at ⌊i / s_h⌋. Needs N = M and
        windows of steps: no `class_token`, no k-means.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for `scales` that are not one whole number above 0 for each
        head; an unknown `pooling`; a mask or `is_causal` that cannot be pooled; what `positional`
        does not allow.
    """
    return _by_scale(
        lambda heads, kernel: kernel,
        *(q, k, v, attn_mask, is_causal, scale, scales, pooling, class_token, kernel, positional),
    )


def scaled_normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    scales: Sequence[int],
    pooling: str | Pooling = "average",
    class_token: bool = False,
    beta: float | Tensor = 1.0,
    eps: float | None = None,
    kernel: Kernel = softmax_attention,
    centre_keys: bool | None = None,
    positional: bool = False,
) -> Tensor:
    """Attention-BN+SH, eqs. 49 and 51 of [Nguyen2023]: Attention-BN on pooled keys and values.

    Parameters
    ----------
    q, k, v, attn_mask, is_causal, scale, scales, pooling, class_token, kernel, positional
        As in `scaled_attention`.
    beta, eps, centre_keys
        As in `normalized_attention`; the statistics are those of the pooled keys of each head.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `scaled_attention` and `normalized_attention`.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_normalisation(beta, eps, q)

    def mechanism(heads: list[int], kernel: Kernel) -> Kernel:
        normalized = functools.partial(normalized_attention, eps=eps, centre_keys=centre_keys)
        return functools.partial(normalized, beta=_of_heads(beta, heads), kernel=kernel)

    return _by_scale(
        mechanism,
        *(q, k, v, attn_mask, is_causal, scale, scales, pooling, class_token, kernel, positional),
    )


def _by_scale(
    mechanism: Callable[[list[int], Kernel], Kernel],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    scales: Sequence[int],
    pooling: str | Pooling,
    class_token: bool,
    kernel: Kernel,
    positional: bool,
) -> Tensor:
    """Check, and give the heads of each scale to their mechanism, with pooled keys and values."""
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    check_scales(scales, q, attn_mask, is_causal)
    pool = check_pooling(pooling, class_token)
    check_positions(kernel, positional, q, k, pooling, class_token)
    outputs = []
    for s, heads in head_groups(scales).items():
        q_s, k_s, v_s, mask = _pool_group(q, k, v, attn_mask, s, heads, pool)
        attend = mechanism(heads, _aligned(kernel, s, positional))
        outputs.append(attend(q_s, k_s, v_s, attn_mask=mask, is_causal=is_causal, scale=scale))
    return _in_order(outputs, scales)


def head_groups(scales: Sequence[int]) -> dict[int, list[int]]:
    """Return the heads of each scale: ``[1, 1, 2]`` to ``{1: [0, 1], 2: [2]}``."""
    groups: dict[int, list[int]] = {}
    for h, s in enumerate(scales):
        groups.setdefault(s, []).append(h)
    return groups


def _pool_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    s: int,
    heads: list[int],
    pooling: Pooling,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Take the heads of one scale, and pool their keys, values and mask."""
    q, k, v = (_select(x, heads) for x in (q, k, v))
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
        attn_mask = _select(attn_mask, heads)
    if s == 1:
        return q, k, v, attn_mask
    present = None if attn_mask is None else _present(attn_mask, k.shape[-2])
    pool, present = pooling(k, s, present)
    return q, pool(k), pool(v), None if present is None else present.unsqueeze(-2)


def _select(x: Tensor, heads: list[int]) -> Tensor:
    """Take some heads of (..., H, N, D): a view where they are neighbours."""
    first, last = heads[0], heads[-1]
    neighbours = len(heads) == last - first + 1
    return x[..., first : last + 1, :, :] if neighbours else x[..., heads, :, :]


def _in_order(outputs: list[Tensor], scales: Sequence[int]) -> Tensor:
    """Put the heads of all groups back into their order."""
    order = [h for heads in head_groups(scales).values() for h in heads]
    joined = torch.cat(outputs, -3)
    if order == sorted(order):
        return joined
    return joined[..., [order.index(h) for h in range(len(order))], :, :]


def _of_heads(beta: float | Tensor, heads: list[int]) -> float | Tensor:
    return beta[heads] if isinstance(beta, Tensor) and beta.numel() > 1 else beta


def _aligned(kernel: Kernel, s: int, positional: bool) -> Kernel:
    return functools.partial(_attend_aligned, kernel, s) if positional and s > 1 else kernel


def _attend_aligned(
    kernel: Kernel, s: int, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any, **options: Any
) -> Tensor:
    """Attend with query i at position ⌊i / s⌋ among the pooled keys.

    The queries are dealt out to s sequences, the t-th of which has step t of every window. Each is
    as long as the pooled keys, and in it query and key of a window stand at the same place.
    """
    N = q.shape[-2]
    q = windows(q, s).transpose(-3, -2)  # (..., H, s, N_h, D)
    k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], s, -1, -1) for x in (k, v))
    mask = None if attn_mask is None else attn_mask.unsqueeze(-3)
    H = kernel(q, k, v, attn_mask=mask, **options)  # (..., H, s, N_h, Dv)
    return H.transpose(-3, -2).flatten(-3, -2)[..., :N, :]


# --- checks --------------------------------------------------------------------------------------


def check_scales(
    scales: Sequence[int], q: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> None:
    """Check `scales` against the heads of `q`, and that the masks can be pooled by them."""
    if q.dim() < 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected (..., H, N, D), with its heads")
    check_scale_list(scales, q.shape[-3])
    if max(scales) == 1:
        return
    if is_causal:
        raise ValueError(
            f"is_causal is True with scales {list(scales)}; expected False, or scales of 1: a "
            "pooled key holds steps that come after the query"
        )
    if attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; expected the size 1 in place of N, as "
            "in (B, 1, 1, M): keys are pooled once for all queries"
        )


def check_scale_list(scales: Sequence[int], heads: int) -> None:
    """Check for one whole number, at least 1, per head."""
    if isinstance(scales, str) or not isinstance(scales, Sequence):
        raise TypeError(f"scales is {scales!r}; expected a sequence of whole numbers")
    if len(scales) != heads or heads == 0:
        raise ValueError(
            f"scales is {list(scales)}; expected one number per head, of which there are {heads}"
        )
    for h, s in enumerate(scales):
        check_count(f"scales[{h}]", s, 1)


def check_pooling(pooling: str | Pooling, class_token: bool) -> Pooling:
    """Return the function of a name in `POOLINGS`, made to leave a class token alone."""
    if isinstance(pooling, str) and pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; expected one of {list(POOLINGS)}, or a function")
    function = POOLINGS[pooling] if isinstance(pooling, str) else pooling
    if not callable(function):
        raise TypeError(f"pooling is {pooling!r}; expected a name or a function")
    if not isinstance(class_token, bool):
        raise TypeError(f"class_token is {class_token!r}; expected True or False")
    return functools.partial(keep_first, function) if class_token else function


def check_positions(
    kernel: Kernel,
    positional: bool,
    q: Tensor,
    k: Tensor,
    pooling: str | Pooling,
    class_token: bool,
) -> None:
    """Check `kernel`, and that pooled keys have positions where it needs them."""
    if not callable(kernel):
        raise TypeError(f"kernel is {kernel!r}; expected a function of (q, k, v)")
    if not isinstance(positional, bool):
        raise TypeError(f"positional is {positional!r}; expected True or False")
    if positional and (class_token or pooling in ("k-means", kmeans_pooling)):
        what = "class_token=True" if class_token else "k-means"
        raise ValueError(
            f"positional is True with {what}; expected False: not all keys are windows"
        )
    if positional and q.shape[-2] != k.shape[-2]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; expected as many keys as queries where positional is "
            f"True: {q.shape[-2]}"
        )


def _present(attn_mask: Tensor, M: int) -> Tensor:
    """Turn a mask (..., 1, M) over keys into the steps (..., M) that are there."""
    check_no_bias(attn_mask)
    allowed = _allowed(torch.atleast_2d(attn_mask)).squeeze(-2)
    return allowed.expand(*allowed.shape[:-1], M)


def check_no_bias(attn_mask: Tensor, name: str = "attn_mask") -> None:
    """Refuse a floating mask with numbers other than 0 and -inf; reads data, where that can be."""
    if attn_mask.dtype == torch.bool or torch.compiler.is_compiling() or attn_mask.is_meta:
        return
    if attn_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if not bool(((attn_mask == 0) | (attn_mask == -math.inf)).all()):
        raise ValueError(
            f"{name} has numbers other than 0 and -inf; expected only these: the steps of a pooled "
            "key have no score of their own to add to"
        )


# --- layers --------------------------------------------------------------------------------------


class ScaledAttention(MultiheadAttention):
    """Attention-SH, with the interface and the parameters of ``nn.MultiheadAttention``.

    It pools `key` and `value` before it projects them, once for each scale, and projects for each
    head what that head attends. The attention weights it returns are those of the steps: a pooled
    key's weight is dealt out to its steps as pooling weighs them.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first
        As in `MultiheadAttention`.
    scales : sequence of int
        s_h for each head.
    pooling : str or callable
        As in `scaled_attention`, or ``"convolution"`` for a `ConvolutionPooling` of the layer.
    class_token, kernel, positional
        As in `scaled_attention`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention` and `scaled_attention`. In the forward pass, where a scale is
        above 1, also for any `attn_mask` (padding goes into `key_padding_mask`) and for
        `is_causal`; for `need_weights` with ``"max"``, where steps have no weights.

    Examples
    --------
    >>> layer = ScaledAttention(16, 4, scales=[1, 1, 2, 4])
    >>> x = torch.zeros(2, 5, 16)
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 5, 16])
    """

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
        scales: Sequence[int],
        pooling: str | Pooling = "average",
        class_token: bool = False,
        kernel: Kernel = softmax_attention,
        positional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim,
            vdim,
            batch_first,
            attention=kernel,
            device=device,
            dtype=dtype,
        )
        check_scale_list(scales, num_heads)
        if pooling == "convolution":
            pooling = ConvolutionPooling(scales, device=device, dtype=dtype)
        check_pooling(pooling, class_token)
        self.scales, self.pooling = tuple(scales), pooling
        self.class_token, self.positional = class_token, positional

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
        """Attend from `query` to pooled `key` and `value`; as in `MultiheadAttention.forward`."""
        self._check(query, key, value, attn_mask, key_padding_mask)
        self._check_forward(attn_mask, key_padding_mask, need_weights, is_causal)
        check_positions(self.attention, self.positional, query, key, self.pooling, self.class_token)
        drop = self.dropout if self.training else 0.0
        q = self._project(0, query, list(range(self.num_heads)))  # (B, H, N, D)
        outputs, weights = [], []
        for s, heads in head_groups(self.scales).items():
            pool, mask, causal = self._pool(s, q, key, attn_mask, key_padding_mask, is_causal)
            key_s = pool(key)  # (B, N_h, kdim)
            k = self._project(1, key_s, heads)
            v = self._project(2, key_s if value is key else pool(value), heads)
            attend = functools.partial(
                self._mechanism(s, heads), attn_mask=mask, is_causal=causal, scale=None
            )
            if not need_weights and drop == 0:
                outputs.append(attend(_select(q, heads), k, v))
                continue
            A = F.dropout(attend(_select(q, heads), k, _identity(k)), drop)  # (B, H_s, N, N_h)
            outputs.append(A @ v)
            if need_weights:
                weights.append(A @ pool(_identity(key)).unsqueeze(-3))  # (B, H_s, N, M)
        H = _in_order(outputs, self.scales)
        output = self.out_proj(H.transpose(-3, -2).flatten(-2))  # (B, N, embed_dim)
        if not need_weights:
            return output, None
        A = _in_order(weights, self.scales)
        return output, A.mean(-3) if average_attn_weights else A

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        how = self.pooling if isinstance(self.pooling, str) else "of its own"
        return f"scales={self.scales}, pooling={how}, class_token={self.class_token}"

    def _mechanism(self, s: int, heads: list[int]) -> Kernel:
        return _aligned(self.attention, s, self.positional)

    def _project(self, part: int, x: Tensor, heads: list[int]) -> Tensor:
        """Project query, key or value (part 0, 1, 2) for some heads: to (B, H_s, N, D)."""
        if self.kdim == self.vdim == self.embed_dim:
            weight = self.in_proj_weight.chunk(3)[part]
        else:
            weight = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)[part]
        weight = _select(weight.unflatten(0, (self.num_heads, -1)), heads).flatten(0, 1)
        bias = None
        if self.in_proj_bias is not None:
            bias = self.in_proj_bias.view(3, self.num_heads, -1, 1)[part]
            bias = _select(bias, heads).flatten()
        return F.linear(x, weight, bias).unflatten(-1, (len(heads), -1)).transpose(-3, -2)

    def _pool(
        self,
        s: int,
        q: Tensor,
        key: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[Pool, Tensor | None, bool]:
        """Return the pooling of scale s, and the masks of its keys, True where to attend."""
        if s == 1:
            if attn_mask is None and key_padding_mask is None:
                return _unchanged, None, is_causal
            mask = _merge_masks(attn_mask, key_padding_mask, is_causal, q, key.shape[-2])
            return _unchanged, mask, False
        present = None
        if key_padding_mask is not None:
            padded = key_padding_mask
            present = ~padded if padded.dtype == torch.bool else padded != -math.inf
        pool, present = check_pooling(self.pooling, self.class_token)(key, s, present)
        return pool, None if present is None else present[..., None, None, :], False

    def _check_forward(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> None:
        if max(self.scales) == 1:
            return
        if is_causal or attn_mask is not None:
            what = "is_causal is True" if is_causal else "attn_mask is given"
            raise ValueError(
                f"{what} with scales {list(self.scales)}; expected key_padding_mask only, or "
                "scales of 1: keys are pooled once for all queries, and hold later steps"
            )
        if key_padding_mask is not None:
            check_no_bias(key_padding_mask, "key_padding_mask")
        if need_weights and self.pooling in ("max", max_pooling):
            raise ValueError(
                "need_weights is True with max pooling; expected False: a maximum is no weighted "
                "sum of steps, so steps have no weights"
            )


class ScaledNormalizedAttention(ScaledAttention):
    """Attention-BN+SH, with the interface of ``nn.MultiheadAttention``.

    Its parameters are those of `ScaledAttention`, and ``beta`` where β is learned.

    Parameters
    ----------
    beta, learn_beta, eps, centre_keys
        As in `derived_attention.attention.normalized.NormalizedAttention`; the statistics are those
        of the pooled keys of each head.
    options
        The arguments of `ScaledAttention`.

    Raises
    ------
    TypeError, ValueError
        As in `ScaledAttention` and `normalized_attention`.
    """

    beta: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        beta: float | Sequence[float] = 1.0,
        learn_beta: bool = False,
        eps: float | None = None,
        centre_keys: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **options)
        like = self.out_proj.weight
        register_beta(self, num_heads, beta, learn_beta, eps, device=like.device, dtype=like.dtype)
        self.eps, self.centre_keys = eps, centre_keys

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"{super().extra_repr()}, {show_beta(self.beta)}, eps={self.eps}"

    def _mechanism(self, s: int, heads: list[int]) -> Kernel:
        return functools.partial(
            normalized_attention,
            beta=_of_heads(self.beta, heads),
            eps=self.eps,
            kernel=super()._mechanism(s, heads),
            centre_keys=self.centre_keys,
        )


def _unchanged(x: Tensor) -> Tensor:
    return x


def _identity(x: Tensor) -> Tensor:
    """Return the identity (..., M, M) for the M steps of x: a map applied to it is its weights."""
    one = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    return one.expand(*x.shape[:-1], -1)
