"""What the kernels of the package have to do: operations of products, bytes, and exponentials.

Each function counts "forward" and "forward + backward" of one kind of attention in bfloat16. An
operation is a product of two numbers or a sum of two. The bytes are those that a launch has to read
and write once. Exponentials are those of weights and features; an online softmax has a few more,
one a row and block, to shrink its sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

ITEM = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Work:
    """Operations of matrix products, bytes from and to memory, and exponentials."""

    operations: float
    bytes: float
    exponentials: float


def sdpa(heads: int, length: int, dim: int, is_causal: bool) -> dict[str, Work]:
    """Count what a fused softmax attention must do: 2 products forward, and 5 more backward.

    Each weight is an exponential, forward, and once more backward, as weights are not stored.
    Bytes are those of each tensor once: q, k, v, the output and a logarithm a row in float32; and
    backward these, three gradients and that of the output, and a sum a row, written and read.
    """
    pairs = heads * _pairs(length, length, is_causal)
    tensor, row = heads * length * dim * ITEM, heads * length * 4
    return _both(
        Work(2 * pairs * 2 * dim, 4 * tensor + row, pairs),
        Work(2 * pairs * 5 * dim, 8 * tensor + 3 * row, pairs),
    )


def mixture(
    *, B: int, H: int, N: int, M: int, D: int, R: int = 2, is_causal: bool = False,
    shifted: bool = False, hard: bool = False
) -> dict[str, Work]:  # fmt: skip
    """Count what mixtures cost, soft or hard.

    A pair of query and key that see each other costs, forward, 2D operations for each product of
    scores (R, or one of shifted keys) and 2D for the values. Backward, both kernels make the scores
    and dO·v again, and each score has its part in dq and in dk: 4 times the first and 3 times the
    second. Each score is an exponential, or the largest alone in the hard form: forward, and in
    both kernels backward. Bytes are those of each tensor once: forward q, k, v, O, and w, u, log Z
    in float32; backward these, dO, the gradients, and δ written and read.
    """
    C, heads, weights = 1 if shifted else R, B * H, 1 if hard else R
    pairs = heads * _pairs(N, M, is_causal)
    tensors = heads * ITEM * D * (2 * N + (C + 1) * M)  # q, k, v and the output
    tensors += heads * 4 * (R * M + R * N * shifted)  # w and u
    row = heads * 4 * N
    return _both(
        Work(2 * pairs * (C + 1) * D, tensors + row, weights * pairs),
        Work(2 * pairs * (4 * C + 3) * D, 2 * tensors + 3 * row, 2 * weights * pairs),
    )


def lasso(
    *, B: int, H: int, N: int, M: int, D: int, iterations: int = 5, is_causal: bool = False
) -> dict[str, Work]:
    """Count what the lasso costs.

    With k steps the forward pass has k(k + 3) / 2 products of scores or values; the backward pass
    has k(3k + 3) / 2 for the gradients of queries, in k launches, 4k + 1 for that of keys, and
    k + 1 for that of values: with k = 5, 20 and 72 in all. To these come those with G⁻¹, one for
    each step, and KᵀK. No step has an exponential: thresholds and powers are products and
    comparisons.
    """
    n, pairs = iterations, _pairs(N, M, is_causal)
    small = 2 * D * D * (n * N + M)  # G⁻¹ and KᵀK
    first = 2 * pairs * D * (n * (n + 3) // 2) + small
    again = 2 * pairs * D * (n * (3 * n + 1) // 2 + 6 * n + 2) + small
    queries, keys = N * D, M * D
    solved = queries * (4 + ITEM) * n  # each R is read, and t written
    earlier = n * (n - 1) // 2 * queries * ITEM  # of t, or dr, that a launch reads
    moved = solved + (n - 1) * (queries * 8 + keys * ITEM) + earlier
    moved += ITEM * (n * queries + 2 * keys) + 4 * queries
    each = ITEM * (n * queries + 2 * keys + queries) + 12 * N
    back = n * (each + 4 * queries) + earlier + solved
    back += 2 * each + ITEM * n * queries + 8 * keys + 4 * queries * n
    heads = B * H
    return _both(Work(heads * first, heads * moved, 0), Work(heads * again, heads * back, 0))


def linear(*, B: int, H: int, N: int, M: int, D: int, R: int = 1) -> dict[str, Work]:
    """Count what causal linear attention costs on an H100.

    Products are those with scores of whole blocks, of which causality needs half, and the state,
    which is summed once for what comes after the segment and once more inside it. States are
    written, added up (read and written), and read. Features φ = elu + 1 have an exponential each
    time that a kernel makes them, and the slopes of keys have one, those of queries the same as φ.
    Heads are taken in parts, where registers do not have room for the state of all values.
    """
    import torch

    from derived_attention.linear import triton as kernels

    options = kernels.Options(1.0, True, True, torch.bfloat16)
    width = min(D, kernels.values_at_once(D, options))
    sizes = kernels.padded(D), kernels.padded(width), options
    ahead, behind = (kernels.blocks(*sizes, backward)["C"] for backward in (False, True))
    count = min(-(-N // kernels.SEGMENT), max(1, kernels.PROGRAMS * 132 // (B * H)))  # segments
    m, state = min(N, M), 4 * 4 * D * (width + 1) * (count - 1)
    query, keys = ITEM * N * D, ITEM * R * m * D
    values, result, row = ITEM * m * width, ITEM * N * width, 4 * N
    before = count > 1  # else nothing is summed beforehand
    first = 2 * D * width * (m * (1 + before) + N) + 2 * N * ahead * (D + width)
    moved = (keys + values) * (1 + before) + query + result + row + state
    again = 2 * D * width * ((3 + before) * N + 3 * m)
    again += 2 * N * behind * (5 * D + 3 * width)
    back = 4 * query + 3 * keys + 3 * values + 3 * result + 6 * row + 5 * state // 4
    features = D * ((1 + before) * R * m + N)
    features_back = D * ((2 + before) * N + 3 * R * m)
    parts = B * H * -(-D // width)
    return _both(
        Work(parts * first, parts * moved, parts * features),
        Work(parts * again, parts * back, parts * features_back),
    )


def _pairs(N: int, M: int, is_causal: bool) -> int:
    return sum(min(i + 1, M) for i in range(N)) if is_causal else N * M


def _both(forward: Work, backward: Work) -> dict[str, Work]:
    """Return the work forward, and that of both passes together."""
    pairs = zip(astuple(forward), astuple(backward), strict=True)
    return {"forward": forward, "forward + backward": Work(*map(sum, pairs))}


WORK: dict[str, Callable[..., dict[str, Work]]] = {
    "mgk": mixture,
    "hard_mgk": partial(mixture, hard=True),
    "smgk": partial(mixture, shifted=True),
    "linear": linear,
    "mlk": partial(linear, R=2),
    "lasso": lasso,
}
