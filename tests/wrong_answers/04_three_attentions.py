"""Wrong answers to the exercises of chapter 4."""

WRONG = {
    "ex-04-groups": [
        ("def code(N, F): return np.eye(N)[:, :F]", "normaliser h of zero.*N = 6, F = 3"),
        (  # an orthogonal code: the best share, but weights of both signs
            "def code(N, F): return np.linalg.qr(np.random.default_rng(0).normal(size=(N, F)))[0]",
            "not negative",
        ),
        (
            "def code(N, F): return np.random.default_rng(0).random((N, F))",
            "share F/N.*off by",
        ),
        (  # one group more than there are features
            "def code(N, F): return np.eye(F + 1)[np.arange(N) % (F + 1)]",
            r"array \(N, F\)",
        ),
        (  # groups without the remainder of N / F
            "def code(N, F): return np.kron(np.eye(F), np.ones((N // F, 1)))",
            r"array \(N, F\).*N = 7, F = 3",
        ),
        (  # wide and overlapping groups
            "def code(N, F): return np.eye(F)[np.arange(N) % F] + 0.5",
            "share F/N.*off by",
        ),
    ],
    "ex-04-predict": [
        (  # the summary of the query's block is counted twice
            "def ceiling_of(N, stride): return (stride + N / stride) / N",
            "a question and a pair.*N = 32, stride = 4",
        ),
        (  # one layer of strides: the last keys of blocks only
            "def ceiling_of(N, stride): return 1 / stride",
            "a question and a pair.*off by",
        ),
        (  # the minimum over all strides
            "def ceiling_of(N, stride): return (2 * N**0.5 - 1) / N",
            "a question and a pair.*off by",
        ),
        (  # counts guesses among 64 symbols, but random numbers cannot be guessed
            "def ceiling_of(N, stride):\n"
            "    sees = (stride + N / stride - 1) / N\n"
            "    return sees + (1 - sees) / 64",
            "a question and a pair.*off by",
        ),
    ],
    "ex-04-least": [
        ("def least(Phi_K, V): return V", "are shorter.*8 keys"),
        (  # not a projection: the columns of the features are not orthonormal
            "def least(Phi_K, V): return Phi_K @ Phi_K.T @ V",
            "the same function.*8 keys",
        ),
        (  # the projection onto the null space: the forgotten part
            "def least(Phi_K, V): return V - Phi_K @ np.linalg.pinv(Phi_K) @ V",
            "the same function.*8 keys",
        ),
        (  # coefficients of the features, not values of the keys
            "def least(Phi_K, V): return np.linalg.pinv(Phi_K) @ V",
            "the same function.*could not be checked",
        ),
        ("def least(Phi_K, V): return 0 * V", "the same function.*8 keys"),
    ],
    "ex-04-step": [
        (  # every past token is stored in the state
            "def step(S, phi_q, phi_k, v):\n"
            "    new = torch.cat([phi_k, v])\n"
            "    S = new[None] if S.shape == (5, 4) else torch.cat([S, new[None]])\n"
            "    weights = S[:, :5] @ phi_q\n"
            "    return S, weights @ S[:, 5:] / weights.sum()",
            "keeps its shape.*10 tokens",
        ),
        (  # the transposed state
            "def step(S, phi_q, phi_k, v):\n"
            "    S = S + torch.outer(torch.cat([v, v.new_ones(1)]), phi_k)\n"
            "    sums = S @ phi_q\n"
            "    return S, sums[:-1] / sums[-1]",
            "keeps its shape.*could not be checked",
        ),
        (  # every past token is stored beside the state
            "past = []\n"
            "def step(S, phi_q, phi_k, v):\n"
            "    past.append((phi_k, v))\n"
            "    S = sum(torch.outer(k, torch.cat([w, w.new_ones(1)])) for k, w in past)\n"
            "    sums = phi_q @ S\n"
            "    return S, sums[:-1] / sums[-1]",
            "no token is kept beside it.*10 tokens: \\d+ of their tensors",
        ),
        (  # copies of the past tokens
            "past = []\n"
            "def step(S, phi_q, phi_k, v):\n"
            "    past.append((phi_k.clone(), v.clone()))\n"
            "    S = sum(torch.outer(k, torch.cat([w, w.new_ones(1)])) for k, w in past)\n"
            "    sums = phi_q @ S\n"
            "    return S, sums[:-1] / sums[-1]",
            "do not disturb each other \\(text 1",
        ),
        (  # the output is computed before the token is added
            "def step(S, phi_q, phi_k, v):\n"
            "    sums = phi_q @ S\n"
            "    S = S + torch.outer(phi_k, torch.cat([v, v.new_ones(1)]))\n"
            "    return S, sums[:-1] / sums[-1]",
            "do not disturb|is causal linear",
        ),
        (  # no normaliser
            "def step(S, phi_q, phi_k, v):\n"
            "    S = S + torch.outer(phi_k, torch.cat([v, v.new_ones(1)]))\n"
            "    return S, (phi_q @ S)[:-1]",
            "do not disturb|is causal linear",
        ),
    ],
    "ex-04-own": [
        (  # softmax at another temperature
            "my_layer = (lambda x, k: np.exp(0.3 * x @ k.T),\n"
            "            lambda q, k, v: softmax_attention(q, k, v, scale=0.3))",
            "It is new.*softmax",
        ),
        (  # the signed kernel, which the page excludes
            "my_layer = (lambda x, k: x @ k.T,\n"
            "            lambda q, k, v: (q @ k.T) / (q @ k.T).sum(1, keepdim=True) @ v)",
            "not negative and sum to one.*width 2",
        ),
        (  # linear attention with scaled inputs
            "def my_kernel(x, k):\n"
            "    x, k = (elu_feature_map(torch.from_numpy(2 * z)) for z in (x, k))\n"
            "    return (x @ k.T).numpy()\n"
            "my_layer = my_kernel, lambda q, k, v: linear_attention(2 * q, 2 * k, v)",
            "It is new.*linear",
        ),
        (  # not a kernel: it has a negative eigenvalue
            "def my_kernel(x, k): return np.exp(-np.abs(x @ k.T))\n"
            "def my_attention(q, k, v):\n"
            "    A = torch.exp(-(q @ k.T).abs())\n"
            "    return A / A.sum(1, keepdim=True) @ v\n"
            "my_layer = my_kernel, my_attention",
            "no negative eigenvalue",
        ),
        (  # the attention of another kernel
            "def my_kernel(x, k): return np.exp(-((x[:, None] - k) ** 2).sum(-1))\n"
            "def my_attention(q, k, v):\n"
            "    A = torch.exp(-((q[:, None] - k) ** 2).sum(-1) / 2)\n"
            "    return A / A.sum(1, keepdim=True) @ v\n"
            "my_layer = my_kernel, my_attention",
            "of the solved regression.*off by",
        ),
        (  # not normalised: rows do not sum to one
            "def my_kernel(x, k): return (x @ k.T) ** 4\n"
            "my_layer = my_kernel, lambda q, k, v: (q @ k.T) ** 4 @ v",
            "sum to one",
        ),
    ],
}
