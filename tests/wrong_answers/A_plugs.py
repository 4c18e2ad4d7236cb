"""Wrong answers to the exercise of appendix A."""

WRONG = {
    "ex-C-second": [
        (  # multiplied from the other side
            "def second(W, k):\n"
            "    joined = k.transpose(1, 2).flatten(2)\n"
            "    return joined.matmul(W).unflatten(2, (k.shape[1], -1)).transpose(1, 2)",
            "case 1 of 2 has error",
        ),
        (  # the heads are not exchanged with the tokens
            "def second(W, k):\n"
            "    B, H, N, D = k.shape\n"
            "    return (k.reshape(B, N, H * D) @ W.mT).view(B, N, H, D).transpose(1, 2)",
            "case 1 of 2 has error",
        ),
        (
            "def second(W, k):\n    return k @ W.mT[: k.shape[-1], : k.shape[-1]]",
            "case 1 of 2 has error",
        ),
    ],
}
