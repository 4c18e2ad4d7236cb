"""Wrong answers to the exercises of chapter 3."""

HEAD = "the expansion with intercept is the head \\("

WRONG = {
    "ex-03-targets": [
        (  # the signs of the unshifted values
            "def targets(K, V, eps):\n    return attend(K, K, V) + eps * np.sign(V)",
            HEAD + "6 keys",
        ),
        (  # the curve itself, as if there were no tube
            "def targets(K, V, eps):\n    return attend(K, K, V)",
            HEAD + "6 keys of width 2, ε = 0.1.: it is off by",
        ),
        (  # values as targets
            "def targets(K, V, eps):\n    return V + eps * np.sign(V - V.mean(0))",
            HEAD,
        ),
        (  # the plain mean instead of the walk's
            "def targets(K, V, eps):\n    return attend(K, K, V) + eps * np.sign(V - V.mean(0))",
            HEAD,
        ),
        (  # the opposite signs
            "def targets(K, V, eps):\n"
            "    h = kernel(K, K).sum(1)\n"
            "    return attend(K, K, V) - eps * np.sign(V - h @ V / h.sum())",
            HEAD,
        ),
        (  # scores without the √D
            "def targets(K, V, eps):\n"
            "    h = np.exp(K @ K.T).sum(1)\n"
            "    return attend(K, K, V) + eps * np.sign(V - h @ V / h.sum())",
            HEAD,
        ),
        (  # the kernel of each key with itself instead of the sum of a row
            "def targets(K, V, eps):\n"
            "    h = np.diag(kernel(K, K))\n"
            "    return attend(K, K, V) + eps * np.sign(V - h @ V / h.sum())",
            HEAD,
        ),
    ],
    "ex-03-walk": [
        (  # a power of A after all: too few steps for two nearly separate groups
            "def collapse(K, V):\n"
            "    A = attend(K, K, np.eye(len(K)))\n"
            "    return np.linalg.matrix_power(A, 1000) @ V",
            "all rows are equal \\(6 keys of width 1, in two groups",
        ),
        (  # the plain mean
            "def collapse(K, V):\n    return np.tile(V.mean(0), (len(K), 1))",
            "have the same limit as V \\(6 keys of width 2",
        ),
        (  # weights that do not add up to one
            "def collapse(K, V):\n"
            "    h = kernel(K, K).sum(1)\n"
            "    return np.tile(h @ V / len(K), (len(K), 1))",
            "have the same limit as V|equal values are returned",
        ),
        (  # one row instead of one for each key
            "def collapse(K, V):\n    h = kernel(K, K).sum(1)\n    return h @ V / h.sum()",
            "a row for each key \\(",
        ),
        (  # the same for all values
            "def collapse(K, V):\n    return np.full_like(V, 3.0)",
            "equal values are returned unchanged",
        ),
        (  # column means of A instead of its left eigenvector
            "def collapse(K, V):\n"
            "    A = attend(K, K, np.eye(len(K)))\n"
            "    return np.tile(A.mean(0) @ V, (len(K), 1))",
            "have the same limit as V",
        ),
    ],
    "ex-03-merge": [
        (  # the sum of the values, although the score already counts them
            "def merge(K, V):\n"
            "    k, where, r = np.unique(K, axis=0, return_inverse=True, return_counts=True)\n"
            "    v = np.stack([V[where.ravel() == i].sum(0) for i in range(len(k))])\n"
            "    return k, v, np.log(r)",
            "the answer of the full cache \\(",
        ),
        (  # the mean of the values, but the weight of one key
            "def merge(K, V):\n"
            "    k, where = np.unique(K, axis=0, return_inverse=True)\n"
            "    v = np.stack([V[where.ravel() == i].mean(0) for i in range(len(k))])\n"
            "    return k, v, np.zeros(len(k))",
            "the answer of the full cache \\(",
        ),
        (  # the count instead of its logarithm
            "def merge(K, V):\n"
            "    k, where, r = np.unique(K, axis=0, return_inverse=True, return_counts=True)\n"
            "    v = np.stack([V[where.ravel() == i].mean(0) for i in range(len(k))])\n"
            "    return k, v, r.astype(float)",
            "the answer of the full cache \\(",
        ),
        (  # eviction: only the first of equal keys is kept
            "def merge(K, V):\n"
            "    k, first = np.unique(K, axis=0, return_index=True)\n"
            "    return k, V[first], np.zeros(len(k))",
            "the answer of the full cache \\(",
        ),
        (  # nothing is merged
            "def merge(K, V):\n    return K, V, np.zeros(len(K))",
            "Each distinct key is kept once.*",
        ),
    ],
}
