"""Wrong answers to the exercises of the audit of kernel singular values."""

WRONG = {
    "ex-as-threshold": [
        (  # the multiplier at which the leading pair is stationary
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q @ Phi_k.T)[1][0]",
            r"1 % above the threshold, J is bounded below \(20 queries",
        ),
        (  # ignores the keys
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q)[1][-1] ** 2",
            r"(above|below) the threshold, J is (not )?bounded below \(",
        ),
        (  # the singular value instead of its inverse
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    return np.linalg.svd(Phi_q @ Phi_k.T)[1][p - 1]",
            r"1 % below the threshold, J is not bounded below \(20 queries",
        ),
        (  # checks only the queries for redundant features
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    if np.linalg.matrix_rank(Phi_q) < p:\n"
            "        return np.inf\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    return 1 / sigma[min(p, len(sigma)) - 1]",
            r"redundant in either role.*one feature twice in the keys",
        ),
        (  # checks neither role
            "def threshold(Phi_q, Phi_k):\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    return 1 / sigma[min(Phi_q.shape[1], len(sigma)) - 1]",
            r"redundant in either role.*one feature twice in the queries",
        ),
        (  # the last of all singular values, which is a rounding error
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q @ Phi_k.T)[1][-1]",
            r"1 % below the threshold, J is not bounded below \(20 queries",
        ),
        (  # an absolute tolerance for redundant features
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    redundant = len(sigma) < p or sigma[p - 1] < 0.1\n"
            "    return np.inf if redundant else 1 / sigma[p - 1]",
            r"threshold is divided by c \(queries divided by 1000\)",
        ),
        (  # takes as many tokens as features for too few
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    few = min(len(Phi_q), len(Phi_k)) <= p\n"
            "    return np.inf if few or sigma[p - 1] < 1e-9 else 1 / sigma[p - 1]",
            r"1 % above the threshold, J is bounded below \(5 queries",
        ),
        (  # from the smallest value of each role: sufficient, but not the least
            "def threshold(Phi_q, Phi_k):\n"
            "    least = lambda Phi: np.linalg.svd(Phi)[1][-1]\n"
            "    return 1 / (least(Phi_q) * least(Phi_k))",
            r"1 % below the threshold, J is not bounded below \(20 queries",
        ),
    ],
}
