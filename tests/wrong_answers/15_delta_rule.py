"""Wrong answers to the exercises of chapter 15."""

WRONG = {
    "ex-15-step": [
        (  # linear attention: nothing is erased
            "def step(S, k, v, beta, alpha):\n    return alpha * S + beta * torch.outer(v, k)",
            r".D = 5, Dv = 3, β = 0\.7, α = 1\.0.: it is off by",
        ),
        (  # the decay comes after the write
            "def step(S, k, v, beta, alpha):\n"
            "    return alpha * (S + beta * torch.outer(v - S @ k, k))",
            r".D = 4, Dv = 6, β = 1\.5, α = 0\.8.: it is off by",
        ),
        (  # the correction reads the state before the decay
            "def step(S, k, v, beta, alpha):\n"
            "    return alpha * S + beta * torch.outer(v - S @ k, k)",
            r".D = 4, Dv = 6, β = 1\.5, α = 0\.8.: it is off by",
        ),
        (  # right, but forms a D × D matrix
            "def step(S, k, v, beta, alpha):\n"
            "    eye = torch.eye(len(k), dtype=k.dtype)\n"
            "    return alpha * S @ (eye - beta * torch.outer(k, k)) + beta * torch.outer(v, k)",
            r"No tensor has D × D numbers \(D = 300, Dv = 2",
        ),
    ],
    "ex-15-prices": [
        (  # β²‖k‖² instead of β: right only if β‖k‖² is 1, or β is nearly 0
            "def multipliers(K, V, beta):\n"
            "    A = torch.eye(len(K), dtype=K.dtype)\n"
            "    A = A + (beta[:, None] ** 2 * K.square().sum(1)[:, None] * (K @ K.T)).tril(-1)\n"
            "    return torch.linalg.solve_triangular(A, beta[:, None] * V, upper=False)",
            r"is the value of token t \(N = 7",
        ),
        (  # linear attention
            "def multipliers(K, V, beta):\n    return beta[:, None] * V",
            r"returns the last value for the last key \(N = 5, D = 4",
        ),
        (  # ridge attention: later values change earlier multipliers
            "def multipliers(K, V, beta):\n"
            "    G = K @ K.T\n"
            "    G = G - torch.diag(G.diagonal()) + torch.diag(1 / beta)\n"
            "    return torch.linalg.lstsq(G, V).solution",
            r"returns the last value for the last key \(N = 5, D = 4",
        ),
        (  # the other triangle
            "def multipliers(K, V, beta):\n"
            "    A = torch.eye(len(K), dtype=K.dtype) + (beta[:, None] * (K @ K.T)).triu(1)\n"
            "    return torch.linalg.solve_triangular(A, beta[:, None] * V, upper=True)",
            r"returns the last value for the last key \(N = 5, D = 4",
        ),
        (  # the strength of the earlier token
            "def multipliers(K, V, beta):\n"
            "    A = torch.eye(len(K), dtype=K.dtype) + (beta * (K @ K.T)).tril(-1)\n"
            "    return torch.linalg.solve_triangular(A, beta[:, None] * V, upper=False)",
            r"returns the last value for the last key \(N = 5, D = 4",
        ),
    ],
    "ex-15-retention": [
        (  # each key removes the share β instead of β/D
            "def retention(a, D, beta):\n    return beta * (1 - beta) ** a",
            r"within 0\.02 \(a = 6, D = 8, β = 1\.0",
        ),
        (  # without the strength of the key itself
            "def retention(a, D, beta):\n    return (1 - beta / D) ** a",
            r"within 0\.02 \(a = 0, D = 8, β = 0\.5",
        ),
        (  # the decay of the squared norm of the state
            "def retention(a, D, beta):\n    return beta * (1 - (2 * beta - beta**2) / D) ** a",
            r"within 0\.02 \(a = (20|10)",
        ),
        (  # each key removes the share 1/D, β times
            "def retention(a, D, beta):\n    return beta * (1 - 1 / D) ** (beta * a)",
            r"within 0\.02 \(a = 3, D = 2, β = 0\.5",
        ),
    ],
    "ex-15-cups": [
        (  # the sum of the two directions
            "def cup_key(i, j, n):\n"
            "    key = torch.zeros(n, dtype=torch.float64)\n"
            "    if i != j:\n"
            "        key[i], key[j] = 0.5**0.5, 0.5**0.5\n"
            "    return key",
            r"where the swaps have put it \(2 cups",
        ),
        (  # not of norm 1
            "def cup_key(i, j, n):\n"
            "    eye = torch.eye(n, dtype=torch.float64)\n"
            "    return eye[i] - eye[j]",
            r"has norm 1 \(i = 0, j = 1, n = 2",
        ),
        (  # changes the sign of one cup
            "def cup_key(i, j, n):\n    return torch.eye(n, dtype=torch.float64)[i]",
            r"where the swaps have put it \(2 cups",
        ),
    ],
}
