"""Wrong answers to the exercises of chapter 7."""

WRONG = {
    "ex-07-weights": [
        (
            "def window_weights(A, s, t):\n"  # means in both directions, as in the paper
            "    return down(down(A, s).T, t).T",
            r"weights of each window of queries sum to 1.*N = 8, s = 2, s' = 2.: it is off by",
        ),
        (
            "def window_weights(A, s, t):\n"  # sums in both directions
            "    return s * t * down(down(A, s).T, t).T",
            r"weights of each window of queries sum to 1.*off by",
        ),
        (
            "def window_weights(A, s, t):\n"  # the scales exchanged
            "    return s * down(down(A, t).T, s).T",
            r"shape \(N/s, N/s'\).*N = 8, s = 2, s' = 4",
        ),
        (
            "def window_weights(A, s, t):\n"  # one query of each window
            "    return t * down(A[::s].T, t).T",
            r"give the projected output.*off by",
        ),
    ],
    "ex-07-ceiling": [
        (
            "def fine_ceiling(s, t):\n    return 1 / (s * t)",  # as if no two pairs shared a window
            r"one window for all pairs.*s = 2, t = 16.: it is off by",
        ),
        (
            "def fine_ceiling(s, t):\n"  # questions about single pairs, whatever t is
            "    asked = np.indices([16] * min(s, 4)).reshape(min(s, 4), -1).T\n"
            "    fullest = (asked[:, :, None] == np.arange(16)).sum(1).max(1)\n"
            "    return fullest.mean() / (s * t)",
            r"one window for all pairs.*s = 2, t = 16",
        ),
        (
            "def fine_ceiling(s, t):\n"  # counts every question about the fullest window as right
            "    boxes = 16 // t\n"
            "    asked = np.indices([boxes] * s).reshape(s, -1).T\n"
            "    return (asked[:, :, None] == np.arange(boxes)).sum(1).max(1).mean() / s",
            r"With s = 1 the share is 1/t.*s = 1, t = 2",
        ),
        (
            "def fine_ceiling(s, t):\n"  # the count of the first window instead of the fullest
            "    boxes = 16 // t\n"
            "    asked = np.indices([boxes] * s).reshape(s, -1).T\n"
            "    return (asked == asked[:, :1]).sum(1).mean() / (s * t)",
            r"E\[c\] / \(s t\).*s = 4, t = 2",
        ),
    ],
    "ex-07-keep": [
        (
            "def keep(x, k):\n"  # keeps the coarsest, as a coarse head does
            "    c = haar(x)\n"
            "    c[k:] = 0\n"
            "    return c @ np.stack([haar(e) for e in np.eye(len(x))], 1)",
            r"No signal with k coefficients is nearer.*8 numbers, k = 3.: it is off by",
        ),
        (
            "def keep(x, k):\n"  # the largest, not those of largest absolute value
            "    c = haar(x)\n"
            "    c[np.argsort(c)[: len(c) - k]] = 0\n"
            "    return c @ np.stack([haar(e) for e in np.eye(len(x))], 1)",
            r"No signal with k coefficients is nearer.*off by",
        ),
        (
            "def keep(x, k):\n"  # k + 1 coefficients
            "    c = haar(x)\n"
            "    c[np.abs(c) < np.sort(np.abs(c))[-k - 1]] = 0\n"
            "    return c @ np.stack([haar(e) for e in np.eye(len(x))], 1)",
            r"At most k Haar coefficients.*8 numbers, k = 3",
        ),
        (
            "def keep(x, k):\n"  # always keeps the mean
            "    c = haar(x)\n"
            "    c[1 + np.argsort(np.abs(c[1:]))[: len(c) - k]] = 0\n"
            "    return c @ np.stack([haar(e) for e in np.eye(len(x))], 1)",
            r"No signal with k coefficients is nearer.*64 numbers, k = 5",
        ),
        (
            "def keep(x, k):\n"  # the largest samples instead of coefficients
            "    y = x.copy()\n"
            "    y[np.argsort(np.abs(y))[: len(y) - k]] = 0\n"
            "    return y",
            r"At most k Haar coefficients.*8 numbers, k = 3",
        ),
        (
            "def keep(x, k):\n"  # by half differences, which underrate coarse scales
            "    basis = np.stack([haar(e) for e in np.eye(len(x))], 1)\n"
            "    c = haar(x)\n"
            "    d = c * np.abs(basis).max(1)\n"
            "    c[np.argsort(np.abs(d))[: len(c) - k]] = 0\n"
            "    return c @ basis",
            r"No signal with k coefficients is nearer.*off by",
        ),
    ],
    "ex-07-worst": [
        (
            "def refute(N, s):\n    return np.full((N, N), 1 / N)",  # constant: no error at all
            r"1 % or more above the printed bound \(N = 8, s = 8: error 0, bound 0",
        ),
        (
            "def refute(N, s):\n    return np.eye(N)",  # rough, but the bound grows with it
            r"1 % or more above the printed bound.*N = 8, s = 8: error",
        ),
        (
            "def refute(N, s):\n"  # a ramp around 0
            "    return np.tile((2 * np.arange(N) + 1 - N) / N**2 , (N, 1))",
            r"is an attention map.*N = 8, s = 8",
        ),
        (
            "def refute(N, s):\n    return np.tile(2.0 * np.arange(N) + 1, (N, 1))",  # unnormalised
            r"is an attention map.*N = 8, s = 8",
        ),
        (
            "def refute(N, s):\n"  # a ramp over queries instead of keys
            "    return np.tile((2 * np.arange(N)[:, None] + 1) / N**2, (1, N))",
            r"is an attention map.*N = 8, s = 8",
        ),
        (
            "def refute(N, s):\n"  # a softmax of a ramp climbs fast at its end only
            "    e = np.exp(np.arange(N))\n"
            "    return np.tile(e / e.sum(), (N, 1))",
            r"1 % or more above the printed bound",
        ),
        (
            "def refute(N, s):\n"  # two steps in a window
            "    high = np.arange(N) // (s // 2) % 2\n"
            "    return np.tile((1 + high) / (1 + high).sum(), (N, 1))",
            r"1 % or more above the printed bound",
        ),
    ],
}
