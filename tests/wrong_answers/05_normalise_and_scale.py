"""Wrong answers to the exercises of chapter 5."""

WRONG = {
    "ex-05-common": [
        (  # the middle of the range in the place of the mean
            "def own_attention(q, k, v):\n"
            "    middle = (q.amax(-2, keepdim=True) + q.amin(-2, keepdim=True)) / 2\n"
            "    return softmax_attention(q - middle, k, v)",
            r"softmax of the own part of the scores\. Not so for N = 5",
        ),
        (  # the scores are formed
            "def own_attention(q, k, v):\n"
            "    S = q @ k.mT / sqrt(q.shape[-1])\n"
            "    return (S - S.mean(-2, keepdim=True)).softmax(-1) @ v",
            r"No tensor with a number for each query and key is formed\. Not so for N = 64",
        ),
        (  # Attention-BN
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q - k.mean(-2, keepdim=True), k, v)",
            r"added to all queries changes nothing\. Not so for N = 5",
        ),
        (  # the keys are centred, which softmax does not see
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q, k - k.mean(-2, keepdim=True), v)",
            r"added to all queries changes nothing",
        ),
        (  # centred within each token, as a layer norm
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q - q.mean(-1, keepdim=True), k, v)",
            r"added to all queries changes nothing",
        ),
        (  # by the first query
            "def own_attention(q, k, v):\n    return softmax_attention(q - q[..., :1, :], k, v)",
            r"softmax of the own part of the scores",
        ),
    ],
    "ex-05-rms": [
        (  # a layer norm
            "def rms_attention(q, k, v, eps):\n"
            "    c = lambda x: x - x.mean(-1, keepdim=True)\n"
            "    n = lambda x: c(x) / (c(x).square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    return softmax_attention(n(q), n(k), v)",
            r"ratio of two weights.*N = 5, eps = 1e-05",
        ),
        (  # the length in the place of the root mean square
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().sum(-1, keepdim=True) + eps).sqrt()\n"
            "    return softmax_attention(n(q), n(k), v)",
            r"ratio of two weights",
        ),
        (  # ε outside the root
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True).sqrt() + eps)\n"
            "    return softmax_attention(n(q), n(k), v)",
            r"ratio of two weights",
        ),
        (  # the keys only
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    return softmax_attention(q, n(k), v)",
            r"ratio of two weights",
        ),
        (  # normalised over the keys as they are
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    weights = (n(q) @ n(k).mT / sqrt(q.shape[-1])).exp()\n"
            "    h = (n(q) @ k.mT / sqrt(q.shape[-1])).exp().sum(-1, keepdim=True)\n"
            "    return weights / h @ v",
            r"weights of each query sum to one\. Not so for N = 5",
        ),
        (  # without a call of softmax_attention
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    return (n(q) @ n(k).mT / sqrt(q.shape[-1])).softmax(-1) @ v",
            r"no tensor of N times N numbers formed\. Not so for N = 64",
        ),
    ],
    "ex-05-causal": [
        (  # the mean contains the future
            "def causal_bn(q, k, v, beta):\n"
            "    mean = k.mean(-2, keepdim=True)\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"What follows a query does not change its output\. Not so for N = 6, beta = 0\.6",
        ),
        (  # the sum, not the mean
            "def causal_bn(q, k, v, beta):\n"
            "    return softmax_attention(q - beta * k.cumsum(-2), k, v, is_causal=True)",
            r"seen from the mean of all keys",
        ),
        (  # the mean of the keys before, without the query's own
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(k.shape[-2], dtype=k.dtype)[:, None].clamp(min=1)\n"
            "    mean = (k.cumsum(-2) - k) / count\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"seen from the mean of all keys.*N = 6, beta = 0\.6",
        ),
        (  # a running mean, but no mask
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype)[:, None]\n"
            "    return softmax_attention(q - beta * k.cumsum(-2) / count, k, v)",
            r"What follows a query does not change its output",
        ),
        (  # a mask is formed
            "def causal_bn(q, k, v, beta):\n"
            "    mask = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool).tril()\n"
            "    mean = mask.to(k.dtype) @ k / mask.sum(-1, keepdim=True)\n"
            "    return softmax_attention(q - beta * mean, k, v, attn_mask=mask)",
            r"no tensor of N times N numbers is formed\. Not so for N = 64",
        ),
    ],
}
