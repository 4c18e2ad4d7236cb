"""Wrong answers to the exercises of chapter 8."""


def heads(body):
    """Return an answer in which `body` appends head h, of scale s, to `heads`."""
    lines = "".join(f"            {line}\n" for line in body.splitlines())
    return (
        "def coarse(base, scales):\n"
        "    def attention(q, k, v):\n"
        "        heads = []\n"
        "        for h, s in enumerate(scales):\n"
        f"{lines}"
        "        return torch.cat(heads, 1)\n"
        "    return attention"
    )


POOL = "q_, k_, v_ = (x[:, [h]].unflatten(2, (-1, s)).{} for x in (q, k, v))\n"
REPEAT = "heads.append(base(q_, k_, v_).repeat_interleave(s, 2))"
BY_MEANS = r"depends only on the window means.*softmax_attention, scale [24]"


def share(expression):
    """Return an answer that computes the share from n = N / w and m = s / w."""
    return f"def recallable(N, w, s):\n    n, m = N // w, s // w\n    return {expression}"


WRONG = {
    "ex-08-larger": [
        (share("(1 + (s - 1) ** 2 / (N - 1)) / s**2"), r"With s = w .*N = 8, w = s = 2"),
        (share("1 / m**2"), r"With s = N .*N = s = 8, w = 1"),
        (share("1 / m"), r"With s = N .*N = s = 12, w = 2|all orders .*N = 4, w = 1"),
        (share("(1 + (m - 1) / max(n - 1, 1)) / m**2"), r"With s = N .*N = s = 8, w = 1"),
        (share("(1 + (m - 1) ** 2 / n) / m**2"), r"With s = N .*N = s = 8, w = 1"),
    ],
    "ex-08-any": [
        (heads(POOL.format("amax(3)") + REPEAT), BY_MEANS),
        (
            heads(
                POOL.format("mean(3)") + "q_ = q[:, [h]].unflatten(2, (-1, s)).amin(3)\n" + REPEAT
            ),
            BY_MEANS,
        ),
        (heads(POOL.format("select(3, 0)") + REPEAT), BY_MEANS),
        (
            heads(  # the misconception of chapters 7 and 8: attend first, then average
                "out = base(q[:, [h]], k[:, [h]], v[:, [h]]).unflatten(2, (-1, s)).mean(3)\n"
                "heads.append(out.repeat_interleave(s, 2))"
            ),
            BY_MEANS,
        ),
        (
            heads(
                "full = q[:, [h]]\n"
                "k_, v_ = (x[:, [h]].unflatten(2, (-1, s)).mean(3) for x in (k, v))\n"
                "heads.append(base(full, k_, v_))"  # queries are not pooled
            ),
            r"All steps of a window get the same result.*off by",
        ),
        (
            heads(POOL.format("sum(3)") + REPEAT),
            r"repeated s times, a head equals the base on the single.*scale 2.: it is off by",
        ),
        (
            heads(
                POOL.format("mean(3).repeat_interleave(s, 2)") + "heads.append(base(q_, k_, v_))"
            ),
            r"one query, one key and one value for each window",  # attends between N tokens
        ),
        (
            heads(POOL.format("mean(3)") + "heads.append(base(q_, k_, v_).repeat(1, 1, s, 1))"),
            r"repeated s times, a head equals the base on the single tokens.*off by",  # tiled
        ),
    ],
}
