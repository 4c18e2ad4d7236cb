"""Attention-BN: attention from a primal layer that batch-normalises its input (chapter 5).

The equation of this module, for the mean μ and the variances σ² of the keys, is ::

    h_i = Σ_j softmax_j( ((q_i − β μ) ⊙ s⁻¹)ᵀ ((k_j − β μ) ⊙ s⁻¹) / √D ) v_j

with s⁻¹ = 1/√(σ² + ε) for each feature and β = 1 in the full form (eq. 22), with s = 1 and any β
in the recentred form (eq. 26). The keys that query i may attend are its training set, so μ and σ²
are taken over them: padding does not count, and a causal query sees the mean of its past.

Softmax does not change when a number is added to all scores of a query. So centring the keys
changes nothing, s⁻¹ can be applied twice to the query, and Attention-BN is one call of softmax
attention with another query, ``(q_i − β μ) / (σ² + ε)``. `normalized_attention_reference` is the
formula as it stands, `normalized_attention` that call.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from derived_attention.attention.checks import FLOATING, check_attention, check_positive
from derived_attention.attention.softmax import (
    MultiheadAttention,
    causal_mask,
    softmax_attention,
    softmax_attention_reference,
)

Kernel = Callable[..., Tensor]


def normalized_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    beta: float | Tensor = 1.0,
    eps: float | None = None,
    kernel: Kernel = softmax_attention_reference,
) -> Tensor:
    """Attention-BN as it is written: every query centres and scales its own copy of the keys.

    Takes O(N M D) memory. The arguments, the result and the errors are those of
    `normalized_attention`; `kernel` may be any, because all keys are centred.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    beta, eps = check_normalisation(beta, eps, q)
    N, M = q.shape[-2], k.shape[-2]
    if is_causal:
        attn_mask = causal_mask(N, M, q.device)
    allowed = torch.ones(N, M, dtype=torch.bool, device=q.device)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], M)
        allowed, attn_mask = _allowed(attn_mask), attn_mask.unsqueeze(-2)
    inside = allowed[..., None].to(k.dtype)  # (..., N, M, 1)
    count = inside.sum(-2, keepdim=True).clamp(min=1)
    keys = k.unsqueeze(-3)  # (..., 1, M, D): the same for every query
    mean = (inside * keys).sum(-2, keepdim=True) / count  # (..., N, 1, D)
    shift = (beta[..., None] if isinstance(beta, Tensor) else beta) * mean
    queries, centred = q.unsqueeze(-2) - shift, keys - shift  # (..., N, 1, D), (..., N, M, D)
    if eps is not None:
        squares = (inside * (keys - mean).square()).sum(-2, keepdim=True)
        inverse = (squares / count + eps).rsqrt()  # s⁻¹
        queries, centred = queries * inverse, centred * inverse
    values = v.unsqueeze(-3).expand(*centred.shape[:-1], -1)
    queries, centred = queries.to(q.dtype), centred.to(k.dtype)
    return kernel(queries, centred, values, attn_mask=attn_mask, scale=scale).squeeze(-2)


def normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    beta: float | Tensor = 1.0,
    eps: float | None = None,
    kernel: Kernel = softmax_attention,
    centre_keys: bool | None = None,
) -> Tensor:
    """Attention-BN, eqs. 22 and 26 of [Nguyen2023], at the cost of the kernel that it is given.

    Parameters
    ----------
    q, k, v : Tensor
        ``(..., H, N, D)``, ``(..., H, M, D)`` and ``(..., H, M, Dv)``, as in `softmax_attention`.
    attn_mask, is_causal, scale
        As in `softmax_attention`. They also say what μ and σ² are taken over: for each query, the
        keys it may attend. A floating mask excludes where it is -inf. A mask that is the same for
        all queries (padding) costs nothing; another one costs two products with it.
    beta : float or Tensor
        Weight β of the mean, finite. A tensor, of one element or of shape ``(H,)`` for one β per
        head, gets a gradient. β = 0 without `eps` is the kernel itself.
    eps : float, optional
        Positive. Given, features are divided by √(σ² + ε): with β = 1 this is eq. 22. Left out,
        they are only centred: eq. 26.
    kernel : callable
        What to do with the normalised queries and keys: `softmax_attention` or another mechanism
        with its calling convention. A sparse one's own pattern does not enter the statistics.
    centre_keys : bool, optional
        False: normalise the query alone. Exact for every kernel that is a softmax of q·k, such as a
        sparse one. True: normalise the keys too, as the linear kernel needs; in the causal form key
        j then gets the statistics of the keys up to j, since statistics of each query's own would
        take N copies of the keys. None: False for `softmax_attention`, else True, which has to be
        confirmed in the causal form, where the two differ.

    Returns
    -------
    Tensor
        ``(..., H, N, Dv)``, in the dtype of `q`.

    Raises
    ------
    TypeError, ValueError
        As in `softmax_attention`; for a `beta` or `eps` that is not as above, a `kernel` that
        cannot be called; for keys that have to be centred under a mask that differs between
        queries, or, with `centre_keys` left out, causally.

    Notes
    -----
    Statistics are computed in float32 for half precision. In float16, gradients overflow where keys
    are so alike that 1/(σ² + ε) nears 10⁵: take an `eps` of 10⁻³ or more there.

    The causal form uses running sums; the printed μ, over all keys, would show a query its future.
    """
    check_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    beta, eps = check_normalisation(beta, eps, q)
    centre_keys = _check_kernel(kernel, centre_keys, attn_mask, is_causal)
    masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal}
    if k.shape[-2] == 0:  # no statistics, and nothing to attend
        return kernel(q, k, v, scale=scale, **masks)
    mean, variance, count = key_statistics(k, variance=eps is not None, **masks)
    if centre_keys:
        k = _normalise(k, mean, variance, count, beta, eps)
    if is_causal:
        mean, count = (_at_queries(x, q.shape[-2]) for x in (mean, count))
        variance = None if variance is None else _at_queries(variance, q.shape[-2])
    q = _normalise(q, mean, variance, count, beta, eps, twice=not centre_keys)
    return kernel(q, k, v, scale=scale, **masks)


def key_statistics(
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    variance: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mean and variance of the keys that each query may attend, and how many these are.

    Parameters
    ----------
    k : Tensor
        Keys ``(..., M, D)``, M at least 1.
    attn_mask : Tensor, optional
        As in `normalized_attention`; queries without a key get zeros.
    is_causal : bool
        Return the running statistics of keys 1 to j, for every j.
    variance : bool
        Whether to compute the variance too.

    Returns
    -------
    mean, variance : Tensor
        ``(..., R, D)``, at least float32; `variance` divides by the number of keys, or is None. R
        is 1 where all queries have the same keys, M if causal, else N.
    count : Tensor
        Broadcastable to ``(..., R, 1)``.
    """
    k = k.to(torch.promote_types(k.dtype, torch.float32))
    if is_causal:
        return _running_statistics(k, variance)
    if attn_mask is not None:
        with _no_autocast(k.device.type):
            return _masked_statistics(k, _allowed(attn_mask), variance)
    mean = k.mean(-2, keepdim=True)
    spread = (k - mean).square().mean(-2, keepdim=True) if variance else None
    return mean, spread, k.new_full((1, 1), k.shape[-2])


def _at_queries(running: Tensor, N: int) -> Tensor:
    """Take a row for each query: query i has seen the keys up to i, or all, if they are fewer."""
    M = running.shape[-2]
    if N <= M:
        return running[..., :N, :]
    last = running[..., -1:, :].expand(*running.shape[:-2], N - M, -1)
    return torch.cat([running, last], -2)


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Keep products in float32, where the device has autocast at all."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def _running_statistics(k: Tensor, variance: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Statistics of keys 1..j for each j, by Welford's recurrence written as a running sum.

    Its terms, (k_j − μ_j)² j/(j−1), are never negative, so nothing cancels, however large μ is.
    """
    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype, device=k.device)[:, None]  # (M, 1)
    mean = k.cumsum(-2) / count
    if not variance:
        return mean, None, count
    terms = (k - mean).square() * (count / (count - 1).clamp(min=1))  # the first one is 0
    return mean, terms.cumsum(-2) / count, count


def _masked_statistics(
    k: Tensor, allowed: Tensor, variance: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Statistics over the keys where `allowed` (..., R, M) is True, R = 1 or N."""
    if allowed.dim() < 2 or allowed.shape[-1] < k.shape[-2]:
        rows = allowed.shape[-2] if allowed.dim() > 1 else 1
        allowed = allowed.expand(*allowed.shape[:-2], rows, k.shape[-2])
    count = allowed.sum(-1, keepdim=True)  # (..., R, 1)
    share = allowed.to(k.dtype) / count.clamp(min=1)  # (..., R, M)
    mean = _weighted_sum(share, k)  # (..., H, R, D)
    if not variance:
        return mean, None, count
    # E(k−c)² − (μ−c)² for any c; a c near μ keeps it from cancelling. The mean of the keys that
    # all queries share is one: with padding it is μ, and with a causal mask it is no future key.
    common = (allowed | (count == 0)).all(-2, keepdim=True)
    shared = common.to(k.dtype) / common.sum(-1, keepdim=True).clamp(min=1)
    c = _weighted_sum(shared, k.detach())  # (..., H, 1, D)
    spread = _weighted_sum(share, (k - c).square()) - (mean - c).square()
    return mean, spread.clamp(min=0), count


def _weighted_sum(weights: Tensor, x: Tensor) -> Tensor:
    """Sum Σ_j weights_rj x_j: (..., R, M) and (..., H, M, D) to (..., H, R, D).

    Weights that all heads share meet all heads in one product, without a copy for each.
    """
    shared = weights.dim() < 3 or weights.shape[-3] == 1
    if x.dim() < 3 or weights.shape[-2] == 1 or not shared:
        return weights @ x
    weights = weights.squeeze(-3) if weights.dim() > 2 else weights
    columns = x.transpose(-3, -2).flatten(-2)  # (..., M, H·D)
    return (weights @ columns).unflatten(-1, (x.shape[-3], x.shape[-1])).transpose(-3, -2)


def _normalise(
    x: Tensor,
    mean: Tensor,
    variance: Tensor | None,
    count: Tensor,
    beta: float | Tensor,
    eps: float | None,
    twice: bool = False,
) -> Tensor:
    """Centre and scale queries or keys; `twice` scales for the other side of q·k too."""
    if isinstance(beta, Tensor):
        out = x - beta * mean  # (..., H, N, D)
    else:
        out = torch.sub(x, mean, alpha=beta)  # the same in one pass
    if eps is not None and variance is not None:
        # A score on a single key has no weight to change, and would be as large as 1/ε: here 0.
        spread = variance + torch.where(count > 1, variance.new_full((), eps), math.inf)
        out = out / (spread if twice else spread.sqrt())
    if x.dtype != out.dtype:  # 1/ε may be more than float16 holds
        limit = torch.finfo(x.dtype).max
        out = out.clamp(-limit, limit).to(x.dtype)
    return out


def _allowed(attn_mask: Tensor) -> Tensor:
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf


def check_normalisation(
    beta: float | Tensor, eps: float | None, q: Tensor
) -> tuple[float | Tensor, float | None]:
    """Check β against the heads of `q`, and ε; return β as a float, or as () or (H, 1, 1)."""
    eps = None if eps is None else check_positive("eps", eps)
    if isinstance(beta, Tensor):
        check_beta_tensor(beta, q)
        shape = () if beta.numel() == 1 else (-1, 1, 1)
        return beta.to(torch.promote_types(q.dtype, torch.float32)).reshape(shape), eps
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        kind = type(beta).__name__
        raise TypeError(f"beta is of type {kind}; expected a finite number, or a Tensor")
    if not math.isfinite(beta):
        raise ValueError(f"beta is {beta}; expected a finite number")
    return float(beta), eps


def check_beta_tensor(beta: Tensor, q: Tensor) -> None:
    """Check a β per head by dtype, device and shape; its values are not looked at."""
    if beta.dtype not in FLOATING:
        raise TypeError(f"beta has dtype {beta.dtype}; expected a floating dtype")
    if beta.device != q.device:
        raise ValueError(f"beta is on device {beta.device}; expected {q.device}, that of q")
    heads = (q.shape[-3],) if q.dim() > 2 else (1,)
    if tuple(beta.shape) not in ((), (1,), heads):
        raise ValueError(
            f"beta has shape {tuple(beta.shape)}; expected one element, or one per head of q: "
            f"{heads}"
        )


def _check_kernel(
    kernel: Kernel,
    centre_keys: bool | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> bool:
    """Check `kernel` and settle whether its keys are centred."""
    if not callable(kernel):
        raise TypeError(f"kernel is {kernel!r}; expected a function of (q, k, v)")
    if centre_keys is None:
        target = kernel.func if isinstance(kernel, functools.partial) else kernel
        centre_keys = target not in (softmax_attention, softmax_attention_reference)
        if centre_keys and is_causal:
            raise ValueError(
                "centre_keys is None with is_causal=True and a kernel that is not "
                "softmax_attention; expected False for a softmax of q·k, True for any other kernel"
            )
    if not isinstance(centre_keys, bool):
        raise TypeError(f"centre_keys is {centre_keys!r}; expected True, False or None")
    if centre_keys and attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}, one row per query, and the keys are to "
            "be centred; expected one row for all queries, or centre_keys=False where the kernel "
            "is a softmax of q·k"
        )
    return centre_keys


def register_beta(
    module: nn.Module,
    heads: int,
    beta: float | Sequence[float],
    learn_beta: bool,
    eps: float | None,
    **factory: Any,
) -> None:
    """Give `module` a ``beta`` (H,): a parameter if it is learned, else a buffer saved nowhere."""
    betas = list(beta) if isinstance(beta, Sequence) else [beta] * heads
    if len(betas) != heads:
        raise ValueError(f"beta is {betas}; expected one number, or one for each of {heads} heads")
    for b in betas:
        check_normalisation(b, eps, torch.empty(0))
    start = torch.tensor([float(b) for b in betas], **factory)
    if learn_beta:
        module.register_parameter("beta", nn.Parameter(start))
    else:
        module.register_buffer("beta", start, persistent=False)


def show_beta(beta: Tensor) -> str:
    """Describe a ``beta`` for ``extra_repr``, without a number that training changes."""
    return "beta=learned" if isinstance(beta, nn.Parameter) else f"beta={beta.tolist()}"


class Normalized(nn.Module):
    """`normalized_attention` with its β, as a mechanism for `MultiheadAttention`.

    Parameters
    ----------
    heads : int
        H.
    beta : float or sequence of float
        β, one for all heads or one for each.
    learn_beta : bool
        Whether β is a parameter, of shape ``(H,)``, that starts there. Else it is saved nowhere.
    eps, kernel, centre_keys
        As in `normalized_attention`.
    """

    beta: Tensor

    def __init__(
        self,
        heads: int,
        *,
        beta: float | Sequence[float] = 1.0,
        learn_beta: bool = False,
        eps: float | None = None,
        kernel: Kernel = softmax_attention,
        centre_keys: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        register_beta(self, heads, beta, learn_beta, eps, device=device, dtype=dtype)
        self.eps, self.kernel, self.centre_keys = eps, kernel, centre_keys

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend with `normalized_attention`; `options` are its masks and its scale."""
        return normalized_attention(
            q,
            k,
            v,
            beta=self.beta,
            eps=self.eps,
            kernel=self.kernel,
            centre_keys=self.centre_keys,
            **options,
        )

    def extra_repr(self) -> str:
        """Show what the parameters do not."""
        return f"{show_beta(self.beta)}, eps={self.eps}, kernel={self.kernel}"


class NormalizedAttention(MultiheadAttention):
    """Attention-BN in H heads, with the interface of ``nn.MultiheadAttention``.

    Its parameters are those of `MultiheadAttention`, and ``attention.beta`` where β is learned.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first
        As in `MultiheadAttention`.
    beta, learn_beta, eps, kernel, centre_keys
        As in `Normalized`.

    Raises
    ------
    TypeError, ValueError
        As in `MultiheadAttention` and `normalized_attention`.

    Examples
    --------
    >>> layer = NormalizedAttention(16, 4, learn_beta=True)
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
        beta: float | Sequence[float] = 1.0,
        learn_beta: bool = False,
        eps: float | None = None,
        kernel: Kernel = softmax_attention,
        centre_keys: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        mechanism = Normalized(
            num_heads,
            beta=beta,
            learn_beta=learn_beta,
            eps=eps,
            kernel=kernel,
            centre_keys=centre_keys,
            device=device,
            dtype=dtype,
        )
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim,
            vdim,
            batch_first,
            attention=mechanism,
            device=device,
            dtype=dtype,
        )
