"""Wrong answers to the exercises of chapter 11."""

WRONG = {
    "ex-11-untangle": [
        (  # the decomposition of the whole matrix
            "def untangle(E, R):\n"
            "    s = E.shape[1]\n"
            "    U, values, Vh = torch.linalg.svd(E @ R.T)\n"
            "    return U[:, :s], values[:s], Vh[:s].T",
            r"No matrix with N × M entries is formed.*N = 400",
        ),
        (  # the same, computed by NumPy
            "def untangle(E, R):\n"
            "    s = E.shape[1]\n"
            "    U, values, Vh = np.linalg.svd(E.numpy() @ R.numpy().T, full_matrices=False)\n"
            "    return tuple(map(torch.tensor, (U[:, :s], values[:s], Vh[:s].T)))",
            r"No matrix with N × M entries is formed.*N = 400",
        ),
        (  # the singular vectors of E and of R
            "def untangle(E, R):\n"
            "    U, a, _ = torch.linalg.svd(E, full_matrices=False)\n"
            "    V, b, _ = torch.linalg.svd(R, full_matrices=False)\n"
            "    return U, a * b, V",
            r"U diag\(values\) Vᵀ is E Rᵀ \(N = 9",
        ),
        (  # the orthonormal factors of the two QR decompositions
            "def untangle(E, R):\n"
            "    (Q_e, T_e), (Q_r, T_r) = torch.linalg.qr(E), torch.linalg.qr(R)\n"
            "    return Q_e, torch.linalg.svdvals(T_e @ T_r.T), Q_r",
            r"U diag\(values\) Vᵀ is E Rᵀ \(N = 9",
        ),
        (  # columns are divided by their lengths, but not orthogonalised
            "def untangle(E, R):\n"
            "    values = E.norm(dim=0) * R.norm(dim=0)\n"
            "    return E / E.norm(dim=0), values, R / R.norm(dim=0)",
            r"columns of U are orthonormal.*U, N = 9",
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
    "ex-11-codes": [
        (  # weight 1 on the asked name, which has rank 32
            "def code_map(names, asked):\n    return (asked[..., None] == names[:, None]).double()",
            r"rank 16 at most \(64 sequences, largest rank 32",
        ),
        (  # the same, cut to rank 16
            "def code_map(names, asked):\n"
            "    A = (asked[..., None] == names[:, None]).double()\n"
            "    U, values, Vh = torch.linalg.svd(A * (1 + 0.01 * torch.arange(32)))\n"
            "    return (U[..., :16] * values[:, None, :16]) @ Vh[:, :16]",
            r"over nine of ten questions \(256 sequences, 5\d % right",
        ),
        (  # rank 32, but half of the rows are tiny
            "def code_map(names, asked):\n"
            "    A = (asked[..., None] == names[:, None]).double()\n"
            "    return A * 1e-8 ** (torch.arange(32) % 2)[:, None]",
            r"rank 16 at most \(64 sequences, largest rank 32",
        ),
        (  # codes that are too short
            "def code_map(names, asked):\n"
            "    codes = normalize(torch.randn(64, 8).double(), dim=1)\n"
            "    return codes[asked] @ codes[names].mT",
            r"over nine of ten questions \(256 sequences, 8\d % right",
        ),
        (  # uniform weights
            "def code_map(names, asked):\n    return torch.ones(len(names), 32, 32).double() / 32",
            r"over nine of ten questions \(256 sequences",
        ),
        (  # codes whose softmax has rank 32 again
            "def code_map(names, asked):\n"
            "    codes = normalize(torch.randn(64, 16).double(), dim=1)\n"
            "    return (8 * codes[asked] @ codes[names].mT).softmax(-1)",
            r"rank 16 at most \(64 sequences, largest rank 32",
        ),
    ],
}
