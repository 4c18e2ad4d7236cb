"""Wrong answers to the exercises of chapter 17."""

N = "least number of seeds that finds the gap"
SEEDS = """
def seeds_needed(sd, gap):
    n, found = 1, 0.0
    while found < {power}:
        n += 1
        df, shift = 2 * n - 2, {shift}
        critical = student.ppf({level}, df)
        if shift > critical + 10:
            return n
        found = nct.sf(critical, df, shift)
    return {result}
"""
RIGHT = dict(power="0.8", shift="gap / sd * sqrt(n / 2)", level="0.975", result="n")
KERNEL = """
def heavy(q, k, v, attn_mask=None, is_causal=False, **rest):
    far = (q[..., :, None, :] - k[..., None, :, :]).square().{mean}(-1)
    keep = torch.ones_like(far)
    if {causal}:
        keep = keep.{triangle}()
    if attn_mask is not None:
        keep = keep * {mask}
    a = keep {kernel}
    return a / a.sum({over}, keepdim=True) @ v
"""
OURS = dict(
    mean="mean",
    causal="is_causal",
    triangle="tril",
    mask="attn_mask",
    kernel="/ (1 + far)",
    over="-1",
)

WRONG = {
    "ex-17-seeds": [
        # a probability of 50 %, not 80 %
        (SEEDS.format(**RIGHT | {"power": "0.5"}), N),
        # a one-sided test
        (SEEDS.format(**RIGHT | {"level": "0.95"}), N),
        # the spread of one mean, not of a difference
        (SEEDS.format(**RIGHT | {"shift": "gap / sd * sqrt(n)"}), N),
        # the central t distribution, shifted
        (
            SEEDS.format(**RIGHT).replace(
                "nct.sf(critical, df, shift)", "student.sf(critical - shift, df)"
            ),
            N,
        ),
        # the seeds of both arms together
        (SEEDS.format(**RIGHT | {"result": "2 * n"}), N),
        # the rule of thumb, with the normal distribution instead of Student's
        (
            "def seeds_needed(sd, gap):\n"
            "    return max(2, int(np.ceil(2 * (1.96 + 0.8416) ** 2 * (sd / gap) ** 2)))",
            N,
        ),
        # the same, with one seed more for the small numbers
        (
            "def seeds_needed(sd, gap):\n"
            "    return max(2, int(np.ceil(2 * (1.96 + 0.8416) ** 2 * (sd / gap) ** 2)) + 1)",
            N,
        ),
    ],
    "ex-17-row": [
        # the sum over features, divided by 4 at every width
        (
            KERNEL.format(**OURS | {"mean": "sum(-1, keepdim=True).div(4).mean"}),
            "those of the kernel",
        ),
        # the sum over features, not their mean
        (KERNEL.format(**OURS | {"mean": "sum"}), "those of the kernel"),
        # a Gaussian: light tails
        (KERNEL.format(**OURS | {"kernel": "* (-far).exp()"}), "those of the kernel"),
        # normalised over queries
        (KERNEL.format(**OURS | {"over": "-2"}), "those of the kernel"),
        # ignores is_causal
        (KERNEL.format(**OURS | {"causal": "False"}), "its own token and the tokens before it"),
        # reads the future
        (KERNEL.format(**OURS | {"triangle": "triu"}), "its own token and the tokens before it"),
        # the mask inverted
        (KERNEL.format(**OURS | {"mask": "~attn_mask"}), "where its mask is True"),
    ],
}
