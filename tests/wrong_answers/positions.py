"""Wrong answers to the exercises of chapter P."""

ANGLES = "    angles = t * 10_000.0 ** (-torch.arange(0, d, 2).double() / d)\n"
AGES = (
    "    at = torch.arange(n).double()\n"
    "    age = at[:, None] - at\n"
    "    hide = lambda z: z.masked_fill(age < 0, -torch.inf)\n"
)

WRONG = {
    "ex-positions-half": [
        (  # base e instead of 2
            f"def age_bias(n, half_life):\n{AGES}    return hide(-age / half_life)",
            r"one half-life older gets half the weight \(n = 12, half-life 3",
        ),
        (  # the weight grows with age
            f"def age_bias(n, half_life):\n{AGES}    return hide(math.log(2) / half_life * age)",
            r"one half-life older gets half the weight",
        ),
        (  # the prior is added, not its logarithm
            f"def age_bias(n, half_life):\n{AGES}    return hide(2 ** (-age / half_life))",
            r"one half-life older gets half the weight",
        ),
        (  # the future counts like the past
            f"def age_bias(n, half_life):\n{AGES}    return -math.log(2) / half_life * age.abs()",
            r"No later key has any weight \(n = 5|the weight grows by the same factor",
        ),
        (  # a step every half-life
            f"def age_bias(n, half_life):\n{AGES}"
            "    return hide(-math.log(2) * (age / half_life).floor())",
            r"the weight grows by the same factor \(n = 12",
        ),
        (  # a large number instead of infinity
            f"def age_bias(n, half_life):\n{AGES}"
            "    return (-math.log(2) / half_life * age).masked_fill(age < 0, -100.0)",
            r"No later key has any weight",
        ),
        (  # a mask of zeros does not exclude the future
            f"def age_bias(n, half_life):\n{AGES}"
            "    return (-math.log(2) / half_life * age).tril()",
            r"No later key has any weight",
        ),
    ],
    "ex-positions-step": [
        (  # turned the wrong way
            f"def step(t, d):\n{ANGLES}"
            "    blocks = [torch.tensor([[z.cos(), -z.sin()], [z.sin(), z.cos()]]).double()\n"
            "              for z in angles]\n"
            "    return torch.block_diag(*blocks)",
            r"maps the vector of position i to that of position i \+ t \(t = 1, d = 4",
        ),
        (  # one frequency for all
            "def step(t, d):\n"
            "    z = torch.tensor(float(t)).double()\n"
            "    block = torch.tensor([[z.cos(), z.sin()], [-z.sin(), z.cos()]]).double()\n"
            "    return torch.block_diag(*[block] * (d // 2))",
            r"maps the vector of position i to that of position i \+ t",
        ),
        (  # all sines first
            f"def step(t, d):\n{ANGLES}"
            "    c, s = torch.diag(angles.cos()), torch.diag(angles.sin())\n"
            "    return torch.cat([torch.cat([c, s], 1), torch.cat([-s, c], 1)])",
            r"maps the vector of position i to that of position i \+ t",
        ),
        (  # exponents i/d instead of 2i/d
            "def step(t, d):\n"
            "    angles = t * 10_000.0 ** (-torch.arange(d // 2).double() / d)\n"
            "    blocks = [torch.tensor([[z.cos(), z.sin()], [-z.sin(), z.cos()]]).double()\n"
            "              for z in angles]\n"
            "    return torch.block_diag(*blocks)",
            r"maps the vector of position i to that of position i \+ t",
        ),
        (  # fitted to the step |t|, also if t is negative
            "def step(t, d):\n"
            "    p = sinusoidal(100, d)\n"
            "    return torch.linalg.lstsq(p[: 100 - abs(t)], p[abs(t) :]).solution.T",
            r"also if t is negative \(s = 3, t = -3",
        ),
    ],
    "ex-positions-layout": [
        (  # left as they are
            "def neighbours(x):\n    return x",
            r"the result has the scores of the other layout \(D = 4",
        ),
        (  # the inverse permutation
            "def neighbours(x):\n    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)",
            r"the result has the scores of the other layout \(D = 8",
        ),
        (  # halves exchanged
            "def neighbours(x):\n    return torch.cat(x.chunk(2, -1)[::-1], -1)",
            r"the result has the scores of the other layout",
        ),
        (  # the second of each pair comes first, so it turns the other way
            "def neighbours(x):\n    return torch.stack(x.chunk(2, -1)[::-1], -1).flatten(-2)",
            r"the result has the scores of the other layout",
        ),
    ],
    "ex-positions-cache": [
        (  # turned forwards, not back
            "def earlier(cached, t):\n"
            "    return rotary(cached, torch.full((len(cached[..., 0].mT),), float(t)).double())",
            r"as at positions smaller by t \(6 keys",
        ),
        (  # each turned by its index too
            "def earlier(cached, t):\n"
            "    return rotary(cached, torch.arange(cached.shape[-2]).double() - t)",
            r"as at positions smaller by t",
        ),
        (  # another base
            "def earlier(cached, t):\n"
            "    back = torch.full((cached.shape[-2],), -float(t)).double()\n"
            "    return rotary(cached, back, base=100.0)",
            r"as at positions smaller by t",
        ),
        (  # the keys are moved, not turned
            "def earlier(cached, t):\n    return cached.roll(-t, -2)",
            r"as at positions smaller by t",
        ),
        (  # only the fastest pair
            "def earlier(cached, t):\n"
            "    back = torch.full((cached.shape[-2],), -float(t)).double()\n"
            "    return torch.cat([rotary(cached[..., :2], back), cached[..., 2:]], -1)",
            r"as at positions smaller by t",
        ),
    ],
}
