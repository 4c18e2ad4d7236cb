"""Wrong answers to the exercises of chapter 12."""

WRONG = {
    "ex-12-bind": [
        (  # a sum, as in the theorem
            "def token(name, y):\n    return name + y",
            r"The score of a name that occurs is its number \(N = 1, .*.: it is off",
        ),
        (  # only the name: every score is 1
            "def token(name, y):\n    return name",
            r"The score of a name that occurs is its number \(N = 1, .*.: it is off",
        ),
        (  # only the value, in every feature
            "def token(name, y):\n    return y * torch.ones_like(name)",
            r"The score of a name that occurs is its number \(N = 1, .*.: it is off",
        ),
        (  # concatenates both, which is wider
            "def token(name, y):\n    return torch.cat([name, y[None]])",
            r"A token is a vector as wide as the name \(N = 1, names of width 8",
        ),
        (  # drops the sign
            "def token(name, y):\n    return abs(y) * name",
            r"The score of a name that occurs is its number \(",
        ),
        (  # scaled so that the first feature is the value
            "def token(name, y):\n    return y * name / name[0]",
            r"The score of a name that occurs is its number \(N = 1, .*.: it is off",
        ),
    ],
    "ex-12-stream": [
        (  # a plain sum
            "def step(S, t, q, x, W):\n"
            "    S = S + torch.outer(x, W[t % len(W)])\n"
            "    return unit(q) @ S, S",
            r"equals the score of the package \(20 tokens, n = 4, .* time 4\): it",
        ),
        (  # divides by the number of tokens
            "def step(S, t, q, x, W):\n"
            "    S = S + torch.outer(x, W[t % len(W)])\n"
            "    return unit(q) @ S / (t + 1), S",
            r"equals the score of the package \(5 tokens, n = 8, .* time 1\): it",
        ),
        (  # divides the state at every step
            "def step(S, t, q, x, W):\n"
            "    S = (S + torch.outer(x, W[t % len(W)])) / (1 + t // len(W))\n"
            "    return unit(q) @ S, S",
            r"equals the score of the package \(20 tokens, n = 4, .* time 5\): it",
        ),
        (  # the query without the feature map g
            "def step(S, t, q, x, W):\n"
            "    S = S + torch.outer(x, W[t % len(W)])\n"
            "    return q @ S / (1 + t // len(W)), S",
            r"equals the score of the package \(5 tokens, n = 8, .* time 0\): it",
        ),
        (  # reads the state before it writes
            "def step(S, t, q, x, W):\n"
            "    e = unit(q) @ S / (1 + t // len(W))\n"
            "    return e, S + torch.outer(x, W[t % len(W)])",
            r"equals the score of the package \(5 tokens, n = 8, .* time 0\): it",
        ),
        (  # uses each row only once, so it runs out of rows
            "def step(S, t, q, x, W):\n"
            "    S = S + torch.outer(x, W[t])\n"
            "    return unit(q) @ S / (1 + t // len(W)), S",
            r"The state keeps its shape \(p, s\): could not be checked.*IndexError",
        ),
        (  # a transposed state
            "def step(S, t, q, x, W):\n"
            "    S = S.reshape(W.shape[1], -1) + torch.outer(W[t % len(W)], x)\n"
            "    return S @ unit(q) / (1 + t // len(W)), S",
            r"The state keeps its shape \(p, s\) \(5 tokens",
        ),
        (  # keeps all tokens outside of the state
            "past = []\n"
            "def step(S, t, q, x, W):\n"
            "    if t == 0:\n"
            "        past.clear()\n"
            "    past.append(x)\n"
            "    n = len(W)\n"
            "    e = sum((z @ unit(q)) * W[j % n] for j, z in enumerate(past)) / (1 + t // n)\n"
            "    return e, S",
            r"Two sequences, each with its own state, do not disturb each other \(5 tokens",
        ),
    ],
}
