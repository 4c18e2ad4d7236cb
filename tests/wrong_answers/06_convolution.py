"""Wrong answers to the exercises of chapter 6."""

IMPORTS = """
import torch.nn.functional as F
from derived_attention import mixing_matrix_1d, softmax_attention
"""

WRONG = {
    "ex-06-best": [
        (
            "def best_filter(z, s):\n    return torch.ones(s)",  # the mean, whatever the signal
            r"No filter of s taps has a larger gain.*slow, T = 20, s = 3",
        ),
        (
            "def best_filter(z, s):\n"
            "    return torch.cos(torch.pi * (torch.arange(s) - (s - 1) / 2) / (s + 1))",
            r"No filter of s taps has a larger gain.*slow.*, T = 20, s = 3",  # a taper
        ),
        (
            "def best_filter(z, s):\n"
            "    r = torch.stack([(z * z.roll(-o, 1)).sum() for o in range(s)])\n"
            "    lag = torch.arange(s)\n"
            "    return torch.linalg.eigh(r[(lag[:, None] - lag).abs()])[1][:, -1]",
            r"No filter of s taps has a larger gain.*gain .*, possible",  # z is not centred
        ),
        (
            "def best_filter(z, s):\n"
            "    z = z - z.mean(1, keepdim=True)\n"
            "    r = torch.stack([(z * z.roll(-o, 1)).sum() for o in range(s)])\n"
            "    lag = torch.arange(s)\n"
            "    return torch.linalg.eigh(r[(lag[:, None] - lag).abs()])[1][:, 0]",
            r"No filter of s taps has a larger gain.*slow",  # the smallest gain
        ),
        (
            "def best_filter(z, s):\n"
            "    z = z - z.mean(1, keepdim=True)\n"
            "    r = torch.stack([(z[:, o:] * z[:, : z.shape[1] - o]).sum() for o in range(s)])\n"
            "    lag = torch.arange(s)\n"
            "    return torch.linalg.eigh(r[(lag[:, None] - lag).abs()])[1][:, -1]",
            r"No filter of s taps has a larger gain.*possible",  # on a line, not on a ring
        ),
        (
            "def best_filter(z, s):\n"
            "    z = z - z.mean(1, keepdim=True)\n"
            "    r = torch.stack([(z * z.roll(-o, 1)).sum() for o in range(s)])\n"
            "    lag = torch.arange(s)\n"
            "    return 1e4 * torch.linalg.eigh(r[(lag[:, None] - lag).abs()])[1][:, 0]",
            r"No filter of s taps has a larger gain.*slow",  # the smallest gain, by large taps
        ),
        (
            "def best_filter(z, s):\n"
            "    z = z - z.mean(1, keepdim=True)\n"
            "    r = torch.stack([(z * z.roll(-o, 1)).sum() for o in range(s)])\n"
            "    lag = torch.arange(s)\n"
            "    w = torch.ones(s, dtype=z.dtype)\n"
            "    for _ in range(3):\n"
            "        w = r[(lag[:, None] - lag).abs()] @ w\n"
            "    return w",
            r"No filter of s taps has a larger gain.*possible",  # three steps of the power method
        ),
        (
            "def best_filter(z, s):\n"
            "    z = z - z.mean(1, keepdim=True)\n"
            "    r = torch.stack([(z * z.roll(-o, 1)).sum() for o in range(s + 1)])\n"
            "    lag = torch.arange(s + 1)\n"
            "    return torch.linalg.eigh(r[(lag[:, None] - lag).abs()])[1][:, -1]",
            r"returns s taps \(s = 1",
        ),
    ],
    "ex-06-patch": [
        (
            IMPORTS + "def patch_attention(q, k, v, w):\n"
            "    C = mixing_matrix_1d(w, len(q))\n"
            "    return softmax_attention(C @ q, C @ k, v)",  # all pairs of two neighbourhoods
            r"is the sum over o.*N = 2.*off by",
        ),
        (
            IMPORTS + "def patch_attention(q, k, v, w):\n"
            "    lift = lambda x: (F.pad(x, (0, 0, 1, 1)).unfold(0, 3, 1) * w).flatten(1)\n"
            "    return softmax_attention(lift(q), lift(k), v)",  # the scale of sD channels
            r"is the sum over o.*N = 2, D = 4.: it is off by",
        ),
        (
            IMPORTS + "def patch_attention(q, k, v, w):\n"
            "    lift = lambda x: (F.pad(x, (0, 0, 1, 1)).unfold(0, 3, 1)).flatten(1)\n"
            "    weighted = (F.pad(q, (0, 0, 1, 1)).unfold(0, 3, 1) * w).flatten(1)\n"
            "    return softmax_attention(weighted, lift(k), v, scale=0.5)",  # w, not w²
            r"is the sum over o.*N = 2.*off by",
        ),
        (
            IMPORTS + "def patch_attention(q, k, v, w):\n"
            "    lift = lambda x: torch.cat([w[o + 1] * x.roll(-o, 0) for o in (-1, 0, 1)], 1)\n"
            "    return softmax_attention(lift(q), lift(k), v, scale=0.5)",  # on a ring
            r"is the sum over o.*N = 2.*off by",
        ),
    ],
}
