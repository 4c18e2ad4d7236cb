"""Wrong answers to the exercises of chapter 5."""

WRONG = {
    "ex-05-common": [
        (  # the middle of the range instead of the mean
            "def own_attention(q, k, v):\n"
            "    middle = (q.amax(-2, keepdim=True) + q.amin(-2, keepdim=True)) / 2\n"
            "    return softmax_attention(q - middle, k, v)",
            r"softmax of the own part of the scores \(N = 5",
        ),
        (  # the scores are formed
            "def own_attention(q, k, v):\n"
            "    S = q @ k.mT / sqrt(q.shape[-1])\n"
            "    return (S - S.mean(-2, keepdim=True)).softmax(-1) @ v",
            r"forms no tensor with a number for each query and key \(N = 64",
        ),
        (  # Attention-BN
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q - k.mean(-2, keepdim=True), k, v)",
            r"one vector is added to all queries \(N = 5",
        ),
        (  # the keys are centred, which does not change the softmax
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q, k - k.mean(-2, keepdim=True), v)",
            r"one vector is added to all queries",
        ),
        (  # centred within each token, as a layer norm
            "def own_attention(q, k, v):\n"
            "    return softmax_attention(q - q.mean(-1, keepdim=True), k, v)",
            r"one vector is added to all queries",
        ),
        (  # the mean over all sequences of the batch
            "def own_attention(q, k, v):\n    return softmax_attention(q - q.mean((0, 1)), k, v)",
            r"softmax of the own part of the scores \(N = 5",
        ),
        (  # without keepdim
            "def own_attention(q, k, v):\n    return softmax_attention(q - q.mean(-2), k, v)",
            r"one vector is added to all queries: could not be checked",
        ),
        (  # the first query is subtracted
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
        (  # the length instead of the root mean square
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
        (  # only the keys are normalised
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    return softmax_attention(q, n(k), v)",
            r"ratio of two weights",
        ),
        (  # the denominator uses the keys as they are
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    weights = (n(q) @ n(k).mT / sqrt(q.shape[-1])).exp()\n"
            "    h = (n(q) @ k.mT / sqrt(q.shape[-1])).exp().sum(-1, keepdim=True)\n"
            "    return weights / h @ v",
            r"weights of each query sum to one \(N = 5",
        ),
        (  # without a call of softmax_attention
            "def rms_attention(q, k, v, eps):\n"
            "    n = lambda x: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()\n"
            "    return (n(q) @ n(k).mT / sqrt(q.shape[-1])).softmax(-1) @ v",
            r"forms no tensor of N × N numbers \(N = 64",
        ),
    ],
    "ex-05-causal": [
        (  # the mean contains the future
            "def causal_bn(q, k, v, beta):\n"
            "    mean = k.mean(-2, keepdim=True)\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"not depend on the tokens after it \(N = 6, beta = 0\.6",
        ),
        (  # the sum, not the mean
            "def causal_bn(q, k, v, beta):\n"
            "    return softmax_attention(q - beta * k.cumsum(-2), k, v, is_causal=True)",
            r"[Tt]he mean of all keys is subtracted",
        ),
        (  # the mean of the earlier keys, without that of the query's token
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(k.shape[-2], dtype=k.dtype)[:, None].clamp(min=1)\n"
            "    mean = (k.cumsum(-2) - k) / count\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"[Tt]he mean of all keys is subtracted.*N = 6, beta = 0\.6",
        ),
        (  # a running mean over all sequences of the batch
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype)[:, None]\n"
            "    mean = k.cumsum(-2).mean(0) / count\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"[Tt]he mean of all keys is subtracted",
        ),
        (  # no mean before the fifth token
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype)[:, None]\n"
            "    mean = k.cumsum(-2) / count * (count > 4)\n"
            "    return softmax_attention(q - beta * mean, k, v, is_causal=True)",
            r"[Tt]he mean of all keys is subtracted.*N = 2",
        ),
        (  # a running mean, but no mask
            "def causal_bn(q, k, v, beta):\n"
            "    count = torch.arange(1, k.shape[-2] + 1, dtype=k.dtype)[:, None]\n"
            "    return softmax_attention(q - beta * k.cumsum(-2) / count, k, v)",
            r"not depend on the tokens after it",
        ),
        (  # a mask is formed
            "def causal_bn(q, k, v, beta):\n"
            "    mask = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool).tril()\n"
            "    mean = mask.to(k.dtype) @ k / mask.sum(-1, keepdim=True)\n"
            "    return softmax_attention(q - beta * mean, k, v, attn_mask=mask)",
            r"forms no tensor of N × N numbers, and therefore no mask \(N = 64",
        ),
    ],
    "ex-05-needle": [
        (  # the score of a full head with as many keys as there are windows
            "def half_score(N, m):\n    return np.log(N / m - 1)",
            r"half of the weight \(N = 8, m = 2",
        ),
        (  # the window of the key is counted among the others
            "def half_score(N, m):\n    return m * np.log(N / m)",
            r"half of the weight \(N = 8, m = 1",
        ),
        (  # the keys are counted, not the windows
            "def half_score(N, m):\n    return m * np.log(N - 1)",
            r"half of the weight \(N = 8, m = 2",
        ),
        (  # the window of the key has two thirds of the weight
            "def half_score(N, m):\n    return m * np.log(2 * (N / m - 1))",
            r"half of the weight \(N = 8, m = 1",
        ),
    ],
}
