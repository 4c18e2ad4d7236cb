"""Wrong answers to the exercises of chapter 11."""

WRONG = {
    "ex-11-threshold": [
        (  # where the leading pair is stationary
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q @ Phi_k.T)[1][0]",
            r"1 % above the threshold, J is bounded below \(20 queries",
        ),
        (  # never looks at the keys
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q)[1][-1] ** 2",
            r"(above|below) the threshold, J (is bounded below|has no floor) \(",
        ),
        (  # the singular value itself
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    return np.linalg.svd(Phi_q @ Phi_k.T)[1][p - 1]",
            r"1 % below the threshold, J has no floor \(20 queries",
        ),
        (  # asks only the queries whether a feature is redundant
            "def threshold(Phi_q, Phi_k):\n"
            "    p = Phi_q.shape[1]\n"
            "    if np.linalg.matrix_rank(Phi_q) < p:\n"
            "        return np.inf\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    return 1 / sigma[min(p, len(sigma)) - 1]",
            r"redundant in either role.*one feature twice in the keys",
        ),
        (  # asks no one
            "def threshold(Phi_q, Phi_k):\n"
            "    sigma = np.linalg.svd(Phi_q @ Phi_k.T)[1]\n"
            "    return 1 / sigma[min(Phi_q.shape[1], len(sigma)) - 1]",
            r"redundant in either role.*one feature twice in the queries",
        ),
        (  # the last of all singular values, which is rounding
            "def threshold(Phi_q, Phi_k):\n    return 1 / np.linalg.svd(Phi_q @ Phi_k.T)[1][-1]",
            r"1 % below the threshold, J has no floor \(20 queries",
        ),
        (  # from the smallest of each role: enough, but not the least
            "def threshold(Phi_q, Phi_k):\n"
            "    least = lambda Phi: np.linalg.svd(Phi)[1][-1]\n"
            "    return 1 / (least(Phi_q) * least(Phi_k))",
            r"1 % below the threshold, J has no floor \(20 queries",
        ),
    ],
    "ex-11-untangle": [
        (  # the decomposition of the whole matrix
            "def untangle(E, R):\n"
            "    s = E.shape[1]\n"
            "    U, values, Vh = torch.linalg.svd(E @ R.T)\n"
            "    return U[:, :s], values[:s], Vh[:s].T",
            r"No matrix with N × M entries is formed.*N = 400",
        ),
        (  # the same, out of PyTorch's sight
            "def untangle(E, R):\n"
            "    s = E.shape[1]\n"
            "    U, values, Vh = np.linalg.svd(E.numpy() @ R.numpy().T, full_matrices=False)\n"
            "    return tuple(map(torch.tensor, (U[:, :s], values[:s], Vh[:s].T)))",
            r"No matrix with N × M entries is formed.*N = 400",
        ),
        (  # each role's own singular vectors
            "def untangle(E, R):\n"
            "    U, a, _ = torch.linalg.svd(E, full_matrices=False)\n"
            "    V, b, _ = torch.linalg.svd(R, full_matrices=False)\n"
            "    return U, a * b, V",
            r"H_e diag\(values\) H_rᵀ is E Rᵀ \(N = 9",
        ),
        (  # not turned back: orthonormal columns of the two QRs
            "def untangle(E, R):\n"
            "    (Q_e, T_e), (Q_r, T_r) = torch.linalg.qr(E), torch.linalg.qr(R)\n"
            "    return Q_e, torch.linalg.svdvals(T_e @ T_r.T), Q_r",
            r"H_e diag\(values\) H_rᵀ is E Rᵀ \(N = 9",
        ),
        (  # columns are only divided by their lengths
            "def untangle(E, R):\n"
            "    values = E.norm(dim=0) * R.norm(dim=0)\n"
            "    return E / E.norm(dim=0), values, R / R.norm(dim=0)",
            r"columns of H_e are orthonormal.*H_e, N = 9",
        ),
        (  # the smallest first
            "def untangle(E, R):\n    return tuple(x.flip(-1) for x in singular_pairs(E, R))",
            r"the largest is first \(N = 9",
        ),
        (  # QR with an N × N factor
            "def untangle(E, R):\n"
            "    s = E.shape[1]\n"
            "    Q_e, T_e = torch.linalg.qr(E, mode='complete')\n"
            "    Q_r, T_r = torch.linalg.qr(R, mode='complete')\n"
            "    U, values, Vh = torch.linalg.svd(T_e[:s] @ T_r[:s].T)\n"
            "    return Q_e[:, :s] @ U, values, Q_r[:, :s] @ Vh.T",
            r"No matrix with N × M entries is formed.*N = 400",
        ),
    ],
}
