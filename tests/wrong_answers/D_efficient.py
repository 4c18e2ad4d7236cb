"""Wrong answers to the exercises of the page on five cheaper attentions."""

WRONG = {
    "ex-fast-features": [
        (
            "def features_needed(q, k, error):\n"
            "    return np.ceil(np.expm1(q @ q + k @ k) / error**2)",  # forgets 2 q·k
            r"(small enough|One feature fewer is not enough) \(D = ",
        ),
        (
            "def features_needed(q, k, error):\n"
            "    return np.ceil(np.expm1((q + k) @ (q + k)) / error)",  # the error, not its square
            r"relative error is small enough \(D = 2, error 0\.1",
        ),
        (
            "def features_needed(q, k, error):\n"
            "    return np.ceil(np.exp(2 * q @ k) * np.expm1((q + k) @ (q + k)) / error**2)",
            r"(small enough|not enough) \(D = ",  # the absolute error
        ),
        (
            "def features_needed(q, k, error):\n"
            "    return np.ceil(np.exp((q + k) @ (q + k)) / error**2)",  # without the −1
            r"One feature fewer is not enough \(D = 2",
        ),
        (
            "def features_needed(q, k, error):\n"
            "    return np.floor(np.expm1((q + k) @ (q + k)) / error**2)",
            r"whole number of features.*small enough \(D = 2",
        ),
    ],
    "ex-fast-block": [
        (
            "def best_block(S, b):\n    return int(S.reshape(-1, b).mean(1).argmax())",
            r"nearer to softmax \(the row with a hidden key",  # what MRA-2 does
        ),
        (
            "def best_block(S, b):\n    return int(S.reshape(-1, b).max(1).argmax())",
            r"nearer to softmax \(random row",
        ),
        (
            "def best_block(S, b):\n    return int(S.reshape(-1, b).std(1).argmax())",
            r"nearer to softmax \(random row",  # the scores vary, but may not matter
        ),
        (
            "def best_block(S, b):\n    return int(np.exp(S).reshape(-1, b).sum(1).argmax())",
            r"nearer to softmax \(",
        ),
        (
            "def best_block(S, b):\n"
            "    true, mean = softmax(S), np.repeat(S.reshape(-1, b).mean(1), b)\n"
            "    inside = np.arange(len(S)) // b == np.arange(len(S) // b)[:, None]\n"
            "    moved = np.where(inside, softmax(S), softmax(mean)) - true\n"  # sums are not one
            "    return int(abs(moved).sum(1).argmin())",
            r"nearer to softmax \(",
        ),
    ],
}
