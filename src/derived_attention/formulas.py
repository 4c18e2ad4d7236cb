"""Every attention of the book under its equation, in the order of the chapters.

Queries q are (..., N, D), keys k (..., M, D), values v (..., M, Dv); where heads
differ, they are the dimension before N. `mask` says which keys a query may attend,
and `scale` replaces 1/√D; it is None if the caller gave none. Each function stores
all intermediate results, and most store an (N, M) matrix. The fast forms, in the
folders of the chapters, add checks, dtypes and defaults.

An `attention` that a formula is given has the arguments of `softmax` here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from derived_attention.common.masks import Mask

# Lines have 84 characters, as the book shows them.
# fmt: off

# --- chapter 1: softmax attention -------------------------------------------------


def scores(q, k, scale):
    """s_ij = q_i·k_j / √D."""
    return (scale or 1 / math.sqrt(q.shape[-1])) * q @ k.mT  # (..., N, M)


def softmax(q, k, v, mask, scale):
    """H = softmax(Q Kᵀ / √D) V."""
    return mask.softmax(scores(q, k, scale)) @ v


# --- chapter 4: linear and sparse attention ---------------------------------------


def scaled(q, scale):
    """Multiply q by the scale, if there is one: only softmax has a factor 1/√D."""
    return q if scale is None else scale * q


def linear(q, k, v, mask, scale, *, feature_map):
    """H = diag(φ(Q) φ(K)ᵀ 1)⁻¹ φ(Q) φ(K)ᵀ V."""
    return mask.normalize(feature_map(scaled(q, scale)) @ feature_map(k).mT) @ v


def places(q, k):
    """Return the positions of queries, (N, 1), and of keys, (M,)."""
    i = torch.arange(q.shape[-2], device=q.device)
    return i[:, None], torch.arange(k.shape[-2], device=k.device)


def window(q, k, v, mask, scale, *, window):
    """Softmax over S(i) = {j : −window ≤ i − j ≤ window}."""
    i, j = places(q, k)
    return mask.softmax(scores(q, k, scale), (i - j).abs() <= window) @ v


def strided(q, k, v, mask, scale, *, stride):
    """S(i) = {j : −stride < i − j < stride, or i − j is a multiple of stride}."""
    i, j = places(q, k)
    return mask.softmax(
        scores(q, k, scale), ((i - j).abs() < stride) | ((i - j) % stride == 0)) @ v


def fixed(q, k, v, mask, scale, *, stride, summary=1):
    """S(i) = {j : ⌊j/stride⌋ = ⌊i/stride⌋, or j mod stride ≥ stride − summary}."""
    i, j = places(q, k)
    keep = (i // stride == j // stride) | (j % stride >= stride - summary)
    return mask.softmax(scores(q, k, scale), keep) @ v


# --- chapter 5: batch normalisation, scaled heads ---------------------------------


def bn(q, k, v, mask, scale, *, beta=1.0, eps=None, attention=softmax):
    """h_i = Σ_j softmax_j( ((q_i − βμ_i)/s_i)·((k_j − βμ_i)/s_i) / √D ) v_j.

    s_i² is σ_i² + ε, or 1. μ_i and σ_i² are over the keys that query i may attend:
    each has keys of its own. So `attention` is given one query at a time: it may
    neither depend on places nor have parameters for each head.
    """
    keep, rows = mask.rows(q, k)  # (..., N, M), and a mask (..., N, 1, M)
    keep = keep[..., None].to(k.dtype)
    share = keep / keep.sum(-2, keepdim=True).clamp(min=1)  # (..., N, M, 1)
    K = k.unsqueeze(-3)  # (..., 1, M, D)
    mu = (share * K).sum(-2, keepdim=True)  # (..., N, 1, D)
    variance = (share * (K - mu).square()).sum(-2, keepdim=True)
    s = 1 if eps is None else (variance + eps).sqrt()
    # (..., N, 1, D) and (..., N, M, D)
    Q, K = (q.unsqueeze(-2) - beta * mu) / s, (K - beta * mu) / s
    return attention(Q, K, v.unsqueeze(-3).expand(*K.shape[:-1], -1), Mask(rows),
                     scale).squeeze(-2)


def windows(M, s, class_token=False, causal=False, device=None):
    """W_tj = 1 where step j is in window t of s steps; (⌈M/s⌉, M), or one more row.

    With a class token, the first step alone is window 0. Causal: window t ends at
    step t s.
    """
    j = torch.arange(M, device=device)
    t = (j + s - 1) // s if causal or class_token else j // s
    count = min(1, M) + -(-(M - 1) // s) if class_token and M else -(-M // s)
    return t == torch.arange(count, device=device)[:, None]


def averages(W, present, dtype):
    """P = diag(W 1)⁻¹ W over the present steps: P X averages each window of X."""
    W = W.to(dtype) * present.unsqueeze(-2)
    total = W.sum(-1, keepdim=True)
    return W / total.masked_fill(total == 0, 1)


def pool_head(h, s, q, k, v, mask, class_token):
    """Q_h, P K_h, P V_h, where P averages windows of s steps, and their mask."""
    Q, K, V, mask_h = (
        q[..., h, :, :], k[..., h, :, :], v[..., h, :, :], mask.of_head(h, q))
    if s == 1:
        return Q, K, V, mask_h
    P = averages(
        windows(K.shape[-2], s, class_token, device=k.device),
        mask_h.presence(K), k.dtype)
    return Q, P @ K, P @ V, Mask(P.any(-1).unsqueeze(-2))


def sh(q, k, v, mask, scale, *, scales, class_token=False, attention=softmax):
    """H_h = softmax(Q_h (P K_h)ᵀ / √D) P V_h; P averages windows of s_h steps."""
    heads = (
        pool_head(h, s, q, k, v, mask, class_token) for h, s in enumerate(scales))
    return torch.stack([attention(*head, scale) for head in heads], -3)


def bn_sh(
    q, k, v, mask, scale, *, scales, class_token=False, beta, eps=None,
    attention=softmax
):
    """Attention-BN on the pooled keys and values of each head, with its own β_h."""
    heads = (
        pool_head(h, s, q, k, v, mask, class_token) for h, s in enumerate(scales))
    return torch.stack(
        [bn(*x, scale, beta=b, eps=eps, attention=attention)
         for x, b in zip(heads, beta, strict=True)], -3)


# --- chapter 6: convolution -------------------------------------------------------


def mixing_matrix(weight, sides, causal=False):
    """C_ij = w_{j − i + p}, and 0 outside: (C X)_i = Σ_t w_t x_{i + t − p}.

    For tokens that lie on a line, or on a grid, row by row: as many numbers in
    `sides` as dimensions at the end of `weight`. p is ⌊(s − 1)/2⌋; causal: s − 1.
    """
    inside, taps = torch.ones((), dtype=torch.bool, device=weight.device), []
    lines = [torch.arange(n, device=weight.device) for n in sides]
    filters = weight.shape[-len(sides) :]
    for at, s in zip(torch.meshgrid(*lines, indexing="ij"), filters, strict=True):
        at = at.flatten()
        tap = (
            at - at[:, None] + (s - 1 if causal else (s - 1) // 2)
        )  # (N, N): j − i + p
        inside = inside & (tap >= 0) & (tap < s)
        taps.append(tap.clamp(0, s - 1))
    return torch.where(inside, weight[(..., *taps)], 0)


def conv1d(
    q, k, v, mask, scale, *, weight, key_weight, query_mask=None, attention=softmax
):
    """H = softmax(C Q (C_k K)ᵀ / √D) V; an absent token counts as 0."""
    # (H or 1, N, N) and (H or 1, M, M)
    C = mixing_matrix(weight, (q.shape[-2],), mask.is_causal)
    C_k = mixing_matrix(key_weight, (k.shape[-2],), mask.is_causal)
    Q, K = (
        blank(q, present_queries(q, query_mask)), blank(k, mask.presence(k)))
    return attention((C @ Q).view_as(q), (C_k @ K).view_as(k), v, mask, scale)


def conv2d(
    q, k, v, mask, scale, *, weight, key_weight, grid, class_token=False,
    query_mask=None, attention=softmax
):
    """H = softmax(C Q (C_k K)ᵀ / √D) V on a grid; a class token stays as it is."""
    # (H or 1, N, N)
    C, C_k = (mixing_matrix(w, grid) for w in (weight, key_weight))
    if class_token:
        C, C_k = (F.pad(x, (1, 0, 1, 0)) for x in (C, C_k))
        C[..., 0, 0] = C_k[..., 0, 0] = 1
    Q, K = (
        blank(q, present_queries(q, query_mask)), blank(k, mask.presence(k)))
    return attention((C @ Q).view_as(q), (C_k @ K).view_as(k), v, mask, scale)


def present_queries(q, query_mask):
    """True where a query is present: (..., N)."""
    every = torch.ones_like(q[..., 0], dtype=torch.bool)
    return every if query_mask is None else every & query_mask


def blank(x, present):
    """Set absent tokens to 0."""
    return x.masked_fill(~present[..., None], 0)


# --- chapter 7: multiresolution heads ---------------------------------------------


def mrs(
    q, k, v, mask, scale, *, scales, class_token=False, query_mask=None,
    attention=softmax
):
    """H_h = ↑_s softmax((↓_s Q)(↓_s' K)ᵀ / √D) (↓_s' V), (s, s') for each head.

    ↓_s averages windows of s steps, and ↑_s gives each query the result of its
    window. If causal, that is the last window to end at the query or before it, and
    it attends the windows of keys that end no later.
    """
    N, M, causal, results = q.shape[-2], k.shape[-2], mask.is_causal, []
    for h, (s, t) in enumerate(scales):
        Q, K, V, mask_h = (
            q[..., h, :, :], k[..., h, :, :], v[..., h, :, :], mask.of_head(h, q))
        if (s, t) == (1, 1):
            results.append(attention(Q, K, V, mask_h, scale))
            continue
        W_q, W_k = (
            windows(n, r, class_token, causal, q.device)
            for n, r in ((N, s), (M, t)))
        # (..., N', N) and (..., M', M)
        down_q = averages(W_q, present_queries(q, query_mask)[..., h, :], q.dtype)
        down_k = averages(W_k, mask_h.presence(K), k.dtype)
        seen = down_k.any(-1).unsqueeze(-2)  # (..., 1, M')
        if causal:
            ends = [r * torch.arange(len(W), device=q.device)
                    for r, W in ((s, W_q), (t, W_k))]
            seen = ends[1] <= ends[0][:, None]  # (N', M')
        H = attention(down_q @ Q, down_k @ K, down_k @ V, Mask(seen), scale)
        results.append(windows(N, s, class_token).mT.to(H) @ H)
    return torch.stack(results, -3)


# --- chapter 8 and appendix D: coarse heads on Linformer and Luna -----------------


def linformer(q, k, v, mask, scale, *, key_projection, value_projection):
    """H = softmax(Q (E K)ᵀ / √D) F V; a mask scales columns of E and F."""
    share = mask.share(k).unsqueeze(-2)  # (..., 1, M)
    E, F = (share * x[:, : k.shape[-2]] for x in (key_projection, value_projection))
    return scores(q, E @ k, scale).softmax(-1) @ F @ v


def performer(q, k, v, mask, scale, *, projection):
    """a_ij ∝ Σ_r φ(q_i)_r φ(k_j)_r, φ(⁴√D x)_r = exp(w_r·x − ‖x‖²/2)."""
    root = math.sqrt(scale or 1 / math.sqrt(q.shape[-1]))
    log_q, log_k = (
        root * x @ projection.mT - (root * x).square().sum(-1, keepdim=True) / 2
        for x in (q, k)
    )  # (..., N, R), (..., M, R)
    return mask.softmax(
        (log_q.unsqueeze(-2) + log_k.unsqueeze(-3)).logsumexp(-1)) @ v


def fmm(q, k, v, mask, scale, *, near, far, feature_maps, **band):
    """H = near · H_window + far · Σ_φ H_linear(φ)."""
    every = (linear(q, k, v, mask, scale, feature_map=phi) for phi in feature_maps)
    return near * window(q, k, v, mask, scale, **band) + far * sum(every)


def luna(q, k, v, mask, scale, *, packed):
    """H = softmax(Q (A' K)ᵀ / √D) A' V with A' = softmax(P Kᵀ / √D)."""
    A = mask.softmax(scores(packed, k, scale))  # (..., l, M)
    return scores(q, A @ k, scale).softmax(-1) @ A @ v


def mra(
    q, k, v, mask, scale, *, block=32, kept=4, over="rows", sparse=False,
    query_mask=None
):
    """s_ij = q_i·k_j/√D in blocks kept; elsewhere that of the blocks' means, or −∞.

    For each row of blocks, the kept blocks are the `kept` ones with the largest
    pooled weight; over the whole map, as many on average, with weights relative to
    the best of their row.
    """
    W_q, W_k = (
        windows(x.shape[-2], block, device=q.device).to(q.dtype) for x in (q, k))
    P_q, P_k = (  # (..., N/b, N), (..., M/b, M)
        averages(W_q, present_queries(q, query_mask), q.dtype),
        averages(W_k, mask.share(k), k.dtype))
    coarse = scores(P_q @ q, P_k @ k, scale)  # (..., N/b, M/b)
    # the logarithm of what a block weighs
    mass = coarse + (W_k @ mask.share(k)[..., None]).log().mT
    exact = best(mass.detach(), kept, over, P_q.any(-1, keepdim=True)).to(q.dtype)
    exact, coarse = (W_q.mT @ x @ W_k for x in (exact, coarse))  # (..., N, M)
    S = torch.where(exact > 0, scores(q, k, scale), coarse)
    return mask.softmax(S, exact > 0 if sparse else None) @ v


def best(mass, kept, over, present):
    """True at the `kept` largest of each row, or as many in the mean over rows."""
    each = min(kept, mass.shape[-1])
    if over == "rows":
        return torch.zeros_like(mass, dtype=torch.bool).scatter(
            -1, mass.topk(each).indices, True)
    top = mass.topk(each).values[..., :1]  # none without keys
    flat = (mass - top.where(top > -math.inf, 0)).masked_fill(
        ~present, -math.inf).flatten(-2)
    # the rank of each block
    order = flat.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (order < each * present.sum(-2)).view_as(mass)


# --- chapters 9 and 10: mixtures --------------------------------------------------


def mgk(q, k, v, mask, scale, *, components, hard=False):
    """a_ij ∝ Σ_r π_r σ_r⁻ᴰ exp(−‖q_i − k_jr‖²/2σ_r²), or max_r; k (..., R, M, D).

    `components` has log π_r − D log σ_r, and 1/σ_r². Without distances it is
    exp(q_i·k_jr/σ_r²).
    """
    if components.distance:
        s = -(q[..., None, :, None, :] - k[..., None, :, :]).square().sum(-1) / 2
    else:
        s = q.unsqueeze(-3) @ k.mT  # (..., R, N, M)
    s = components.log_weights + components.scale * components.precisions * s
    return mask.softmax(s.max(-3).values if hard else s.logsumexp(-3)) @ v


def smgk(q, k, v, mask, scale, *, shifts, components, hard=False):
    """A mixture of the keys k_jr = k_j + b_r."""
    keys = k.unsqueeze(-3) + shifts.unsqueeze(-2)
    return mgk(q, keys, v, mask, scale, components=components, hard=hard)


def mlk(q, k, v, mask, scale, *, priors, feature_map):
    """a_ij ∝ Σ_r π_r φ(q_i)ᵀφ(k_jr)."""
    # (..., R, N, M)
    kernel = feature_map(scaled(q, scale)).unsqueeze(-3) @ feature_map(k).mT
    return mask.normalize((priors * kernel).sum(-3)) @ v


# --- chapter 12: Primal-Attention -------------------------------------------------


def primal(
    q, k, v, mask, scale, *, W_e, W_r, W_o, feature_map, rows=None, past=(1, 1),
    cross=False, dropout_p=0.0
):
    """o_i = W_o [e(x_i); r(x_i)], e(x) = W_eᵀ f(X) g(q), r(x) = W_rᵀ f(X) g(k).

    f(X) = S X, and `rows` is S, (..., n, M); None if there is no f. `past` weights
    the tokens: 0 for those after a causal query or key, and for the others their
    share of a row of S X.
    """
    e, r = feature_map(scaled(q, scale)), feature_map(k)
    if rows is not None:
        e, r = (
            x @ v.mT * seen @ rows.mT for x, seen in zip((e, r), past, strict=True))
    present = mask.presence(k)[..., None]  # (..., M, 1)
    e, r = e @ W_e * present.any(-2, keepdim=True), r @ W_r * present
    # r is of keys: a causal query gets its mean over the past
    if cross and mask.is_causal and r.shape[-2]:
        last = torch.arange(q.shape[-2], device=q.device).clamp(max=r.shape[-2] - 1)
        r = running_mean(r)[..., last, :]
    elif cross:
        r = (r.sum(-2, keepdim=True)
             / present.sum(-2, keepdim=True).clamp(min=1)).expand_as(e)
    return F.dropout(torch.cat([e, r], -1), dropout_p) @ W_o.mT


def running_mean(x):
    """Mean of the tokens up to each."""
    return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1, device=x.device)[:, None]


# --- chapters 13 and 14: sparse coding --------------------------------------------


def solve(atoms, k, rho, r):
    """(K_iᵀK_i + ρ I)⁻¹ r_i; K_i are the atoms of query i: (..., N, M), 1 or 0."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    G = (k.mT.unsqueeze(-3) @ (atoms.unsqueeze(-1) * k.unsqueeze(-3))
         + rho[..., None] * eye)
    return torch.linalg.solve(G, r.unsqueeze(-1)).squeeze(-1)


def ridge(q, k, v, mask, scale, *, lam, atoms):
    """o_i = Vᵀ x_i, x_i = argmin ½‖q_i − K_iᵀx‖² + ½λ‖x‖².

    So x_i = K_i (K_iᵀK_i + λ I)⁻¹ q_i.
    """
    return (atoms * (solve(atoms, k, lam, scaled(q, scale)) @ k.mT)) @ v


def lasso(
    q, k, v, mask, scale, *, lam, rho, atoms, iterations=5, power=None,
    residuals=None
):
    """o_i = Vᵀ ν(α(z_i)), z_i by scaled ADMM for ½‖q_i − K_iᵀx‖² + λ‖x‖₁."""
    q, z, u, seen = (
        scaled(q, scale), torch.zeros_like(atoms), torch.zeros_like(atoms), [])
    for _ in range(iterations):
        before, b = z, z - u
        # (KKᵀ + ρI)⁻¹ (Kq + ρb)
        x = b + atoms * (solve(atoms, k, rho, q - b @ k) @ k.mT)
        z = soft_threshold(x + u, lam / rho)
        u = u + x - z
        seen.append((x - z, rho * (z - before)))
    if residuals is not None:
        parts = zip(*seen, strict=True)
        norms = (
            torch.stack([x.detach().norm(dim=-1) for x in part], -1)
            for part in parts)
        residuals.append(tuple(norms))
    return signed_power(z, power) @ v


def soft_threshold(w, kappa):
    """S_κ(w) = sign(w) max(abs(w) − κ, 0): the proximal operator of κ‖·‖₁."""
    return w.sign() * (w.abs() - kappa).clamp(min=0)


def signed_power(z, power):
    """ν(α(z)) = zᵖ / ‖zᵖ‖₁ over the last dimension, and 0 at z = 0; None: z."""
    if power is None:
        return z
    top = z.detach().abs().amax(-1, keepdim=True) if z.shape[-1] else z.new_ones(())
    a = (z / top.masked_fill(top == 0, 1)) ** power  # z⁵ would be lost below 1e-9
    total = a.abs().sum(-1, keepdim=True)
    return a / total.masked_fill(total == 0, 1)


# --- chapter 15: the delta rule ---------------------------------------------------


def delta(q, k, v, mask, scale, *, beta, decay, state, erase=True):
    """h_i = S_i q_i, S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ.

    α_t = e^decay_t. A query reads the state after its own key, or after all keys.
    """
    S, states, (N, M) = state, [state], (q.shape[-2], k.shape[-2])
    for t in range(M):
        k_t, v_t = k[..., t, :, None], v[..., t, :, None]
        b, alpha = beta[..., t, None, None], decay[..., t, None, None].exp()
        S = alpha * S
        S = S + b * (v_t - S @ k_t if erase else v_t) @ k_t.mT
        states.append(S)
    i = torch.arange(1, N + 1) if mask.is_causal else torch.full((N,), M)
    i = i.to(q.device).clamp(max=M)  # how many keys a query comes after
    S = torch.stack(states, -3)[..., i, :, :]  # (..., N, Dv, D)
    return (S @ scaled(q, scale).unsqueeze(-1)).squeeze(-1)


# --- chapter 16: what must be kept of the past ------------------------------------


def sink(q, k, v, mask, scale, *, bias):
    """h_i = Σ_j e^{s_ij} v_j / (e^b + Σ_j e^{s_ij}): one more key, of value 0."""
    s = scores(q, k, scale)
    b, seen = bias.expand(*s.shape[:-1], 1), mask.for_scores(s)
    if seen is not None:  # no mask closes the sink
        seen = seen.expand(*seen.shape[:-1], s.shape[-1])
        always = torch.zeros_like(seen[..., :1]) + (seen.dtype == torch.bool)
        seen = torch.cat([seen, always.to(seen.dtype)], -1)
    return Mask(seen).softmax(torch.cat([s, b], -1))[..., :-1] @ v


def selected(q, k, v, mask, scale, *, block, kept):
    """Softmax over a query's own block and the `kept` others of largest q_i·k̄_J.

    If causal, those are blocks before its own. k̄_J is the mean over the keys of J
    that the query may attend.
    """
    i, j = places(q, k)
    keep = mask.rows(q, k)[0].to(k.dtype)
    W = windows(k.shape[-2], block, device=k.device).to(k.dtype)  # (M/b, M)
    count = keep @ W.mT
    # (..., N, M/b)
    pooled = (keep * (q @ k.mT) @ W.mT / count.clamp(min=1)).detach()
    J = torch.arange(W.shape[0], device=k.device)
    other = (J != i // block) & (count > 0)
    best = pooled.masked_fill(~other, -math.inf).topk(min(kept, W.shape[0])).indices
    best = torch.zeros_like(pooled).scatter(-1, best, 1.0) * other
    read = (best @ W.to(best.dtype) > 0) | (i // block == j // block)
    return mask.softmax(scores(q, k, scale), read) @ v
