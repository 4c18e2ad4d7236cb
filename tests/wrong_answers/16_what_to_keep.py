"""Wrong answers to the exercises of chapter 16."""

HEAD = "def with_sink(q, k, v, b):\n    scale = q.shape[-1] ** -0.5\n"
WRONG = {
    "ex-16-sdpa": [
        (  # a key of zeros: its score is 0, whatever b is
            "def with_sink(q, k, v, b):\n"
            "    K, V = (torch.cat([x, 0 * x[:1]]) for x in (k, v))\n"
            "    return F.scaled_dot_product_attention(q, K, V)",
            r".N = 6, M = 1, D = 2, b = 1\.5.: it is off by",
        ),
        (  # the scale of the wider query
            "def with_sink(q, k, v, b):\n"
            "    Q = torch.cat([q, q.new_ones(len(q), 1)], 1)\n"
            "    K = torch.cat([k, k.new_zeros(len(k), 1)], 1)\n"
            "    sink = torch.cat([q.new_zeros(1, q.shape[-1]), q.new_full((1, 1), b)], 1)\n"
            "    V = torch.cat([v, 0 * v[:1]])\n"
            "    K = torch.cat([K, sink])\n"
            "    return F.scaled_dot_product_attention(Q, K, V)",
            r".N = 5, M = 7, D = 4, b = 0\.0.: it is off by",
        ),
        (  # b is scaled like the other scores
            HEAD + "    Q = torch.cat([q, q.new_ones(len(q), 1)], 1)\n"
            "    K = torch.cat([k, k.new_zeros(len(k), 1)], 1)\n"
            "    sink = torch.cat([q.new_zeros(1, q.shape[-1]), q.new_full((1, 1), b)], 1)\n"
            "    V = torch.cat([v, 0 * v[:1]])\n"
            "    K = torch.cat([K, sink])\n"
            "    return F.scaled_dot_product_attention(Q, K, V, scale=scale)",
            r".N = 6, M = 1, D = 2, b = 1\.5.: it is off by",
        ),
        (  # right, but stores the matrix
            HEAD + "    a = (q @ k.T * scale).exp()\n"
            "    return a @ v / (np.exp(b) + a.sum(1, keepdim=True))",
            r"No tensor, and no mask, has N M numbers \(N = M = 400.*has 160000",
        ),
        (  # right, but with a mask as large as the matrix
            HEAD + "    mask = q.new_zeros(len(q), len(k) + 1)\n"
            "    mask[:, -1] = b\n"
            "    K, V = (torch.cat([x, 0 * x[:1]]) for x in (k, v))\n"
            "    return F.scaled_dot_product_attention(q, K, V, mask)",
            r"No tensor, and no mask, has N M numbers \(N = M = 400.*has 160400",
        ),
    ],
    "ex-16-absorb": [
        (  # the scale is forgotten
            "def absorb(W_Q, W_K):\n    return W_K.mT @ W_Q",
            r"scores qᵀk/√D with the latents \(H = 2, D = 4, d = 6, r = 3\): it is off by",
        ),
        (  # the scale uses the width of the latent
            "def absorb(W_Q, W_K):\n    return W_K.mT @ W_Q / W_K.shape[-1] ** 0.5",
            r".H = 2, D = 4, d = 6, r = 3.: it is off by",
        ),
        (  # queries and keys exchanged
            "def absorb(W_Q, W_K):\n    return W_Q.mT @ W_K / W_Q.shape[-2] ** 0.5",
            r".H = 2, D = 4, d = 6, r = 3: a shape \(H, r, d\)",
        ),
    ],
    "ex-16-missed": [
        (  # the pooled scores alone
            "def missed(q, means, radii, B):\n    return B * (means @ q).exp().sum()",
            r"weigh at most the bound \(m = 1, B = 2",
        ),
        (  # half the width of the scores instead of the width
            "def missed(q, means, radii, B):\n"
            "    return (B * (means @ q + q.square().sum() * radii**2 / 8).exp()).sum()",
            r"weigh at most the bound \(",
        ),
        (  # true, but far too large: every key counts as the best
            "def missed(q, means, radii, B):\n"
            "    return (B * (means @ q + q.norm() * radii).exp()).sum()",
            r"and no larger \(three radii, B = 4: .*it is off by",
        ),
        (  # a wrong power of the query's norm
            "def missed(q, means, radii, B):\n"
            "    return (B * (means @ q + q.norm() ** 4 * radii**2 / 2).exp()).sum()",
            r"weigh at most the bound|and no larger",
        ),
        (  # the query's norm instead of half of its square
            "def missed(q, means, radii, B):\n"
            "    return (B * (means @ q + q.norm() * radii**2).exp()).sum()",
            r"and no larger \(three radii, B = 4: .*it is off by",
        ),
        (  # counts one key of each block
            "def missed(q, means, radii, B):\n"
            "    return ((means @ q + q.square().sum() * radii**2 / 2).exp()).sum()",
            r"weigh at most the bound \(m = 1, B = 2, spread 0\.01",
        ),
    ],
}
