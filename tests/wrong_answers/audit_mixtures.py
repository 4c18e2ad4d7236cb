"""Wrong answers to the exercises of the audit of mixtures."""

WRONG = {
    "ex-am-bumps": [
        (
            "def bound(sigma):\n    return 2 / 3 - normal(0, sigma) / 3",  # no neighbours
            r"supremum over all centres.*σ = 0.2.*off by",
        ),
        (
            "def bound(sigma):\n    return 2 / 3 - normal(0, sigma)",  # weights of 1
            r"the bound of the theorem.*σ = 0.12.*off by",
        ),
        (
            "def bound(sigma):\n"
            "    return 2 / 3 - (normal(0, sigma) + normal(1, sigma) + normal(2, sigma)) / 3",
            r"the bound of the theorem.*off by",  # at an outer bump
        ),
        (
            "def bound(sigma):\n    return 2 - (normal(0, sigma) + 2 * normal(1, sigma))",
            r"No mixture is nearer to p.*σ = 0.36",  # weights add up to 3
        ),
        (
            "def bound(sigma):\n"
            "    theta = np.linspace(-1.5, 1.5, 1000)[:, None]\n"
            "    return 2 / 3 - normal(theta - np.array([-1.0, 0, 1]), sigma).mean(1).max()",
            r"supremum over all centres.*σ = 0.12.*off by",  # no margin between grid points
        ),
    ],
}
