"""Wrong answers to the exercises of chapter 10."""

WRONG = {
    "ex-10-merge": [
        (  # the mean of the blocks
            "def merge_blocks(outs, lses):\n    return outs.mean(0)",
            r"attention over all blocks at once \(scores of size 1\): it is off by",
        ),
        (  # the blocks are added
            "def merge_blocks(outs, lses):\n    return outs.sum(0)",
            r"attention over all blocks at once \(scores of size 1\): it is off by",
        ),
        (  # no maximum is subtracted
            "def merge_blocks(outs, lses):\n"
            "    share = np.exp(lses)\n"
            "    return (share[..., None] * outs).sum(0) / share.sum(0)[:, None]",
            r"(scores of size 1000|at once: could not be checked, after the case scores of size 1)",
        ),
        (  # subtracts each block's maximum, which removes its share
            "def merge_blocks(outs, lses):\n"
            "    share = np.exp(lses - lses.max(1, keepdims=True))\n"
            "    return (share[..., None] * outs).sum(0) / share.sum(0)[:, None]",
            r"attention over all blocks at once \(scores of size 1\): it is off by",
        ),
        (  # logsumexps instead of sums
            "def merge_blocks(outs, lses):\n"
            "    return (lses[..., None] * outs).sum(0) / lses.sum(0)[:, None]",
            r"attention over all blocks at once \(scores of size 1\): it is off by",
        ),
        (  # one maximum for all queries
            "def merge_blocks(outs, lses):\n"
            "    share = np.exp(lses - lses.max())\n"
            "    return (share[..., None] * outs).sum(0) / share.sum(0)[:, None]",
            r"(scores of size 1000|levels|after the case scores of size 1)",
        ),
        (  # block after block, with no care for a query that two of them hide from
            "def merge_blocks(outs, lses):\n"
            "    out, total = outs[0], lses[0]\n"
            "    for more, lse in zip(outs[1:], lses[1:]):\n"
            "        new = np.logaddexp(total, lse)\n"
            "        with np.errstate(invalid='ignore'):\n"
            "            out = np.exp(total - new)[:, None] * out\n"
            "            out, total = out + np.exp(lse - new)[:, None] * more, new\n"
            "    return out",
            r"may not attend to block 1, the first not to 2\): it is off by nan",
        ),
    ],
    "ex-10-parameters": [
        (  # a head for each key: queries and values are counted M times
            "def layer_size(d, H, D, M, shifted, G):\n    return 4 * M * H * D * d + H * M",
            r"of the package's layer \(d = 12, H = 4.*M = 2.*yours",
        ),
        (  # no priors
            "def layer_size(d, H, D, M, shifted, G):\n"
            "    keys = G * D * d + M * G * D if shifted else M * G * D * d\n"
            "    return 2 * H * D * d + G * D * d + keys",
            r"of the package's layer \(d = 8, H = 2.*yours 256",
        ),
        (  # keys and values for each head, not for each group
            "def layer_size(d, H, D, M, shifted, G):\n"
            "    keys = H * D * d + M * H * D if shifted else M * H * D * d\n"
            "    return 3 * H * D * d + keys + H * M",
            r"of the package's layer \(d = 12.*M = 3, shifted False, G = 2",
        ),
        (  # no shift for the first key
            "def layer_size(d, H, D, M, shifted, G):\n"
            "    keys = G * D * d + (M - 1) * G * D if shifted else M * G * D * d\n"
            "    return 2 * H * D * d + G * D * d + keys + H * M",
            r"of the package's layer \(d = 12.*shifted True",
        ),
        (  # shifts as wide as a token
            "def layer_size(d, H, D, M, shifted, G):\n"
            "    keys = G * D * d + M * d if shifted else M * G * D * d\n"
            "    return 2 * H * D * d + G * D * d + keys + H * M",
            r"of the package's layer \(d = 12.*shifted True",
        ),
    ],
    "ex-10-seeds": [
        (  # the standard error of one mean
            "def seeds_needed(delta, sigma):\n    return int(np.ceil((2.8 * sigma / delta) ** 2))",
            r"at least 2.8 of its standard errors \(δ = 1.0, σ = 1.0, n = 8",
        ),
        (  # rounded down
            "def seeds_needed(delta, sigma):\n"
            "    return max(1, int(2 * (2.8 * sigma / delta) ** 2))",
            r"at least 2.8 of its standard errors \(δ = 1.0, σ = 1.0, n = 15",
        ),
        (  # rounded to the nearest number
            "def seeds_needed(delta, sigma):\n"
            "    return max(1, round(2 * (2.8 * sigma / delta) ** 2))",
            r"at least 2.8 of its standard errors \(δ = 1.6, σ = 1.0, n = 6",
        ),
        (  # seeds of both arms together
            "def seeds_needed(delta, sigma):\n"
            "    return 2 * int(np.ceil(2 * (2.8 * sigma / delta) ** 2))",
            r"One seed fewer is not enough \(δ = 1.0, σ = 1.0, n = 32",
        ),
        (  # the square is forgotten
            "def seeds_needed(delta, sigma):\n    return int(np.ceil(2 * 2.8 * sigma / delta))",
            r"at least 2.8 of its standard errors \(δ = 1.0, σ = 1.0, n = 6",
        ),
        (  # not a whole number
            "def seeds_needed(delta, sigma):\n    return 2 * (2.8 * sigma / delta) ** 2",
            r"whole number, and at least 1 \(δ = 1.0",
        ),
        (  # the gap and the spread exchanged
            "def seeds_needed(delta, sigma):\n"
            "    return int(np.ceil(2 * (2.8 * delta / sigma) ** 2))",
            r"2.8 of its standard errors \(δ = 1.0, σ = 4.0, n = 1",
        ),
    ],
}
