"""Wrong answers to the exercises of chapter 13."""

SOLVED = "    dR = torch.linalg.solve(G, dT, left=False)\n"

WRONG = {
    "ex-13-adjoint": [
        (  # G's gradient has the wrong sign
            f"def adjoint(dT, T, G):\n{SOLVED}    return T.T @ dR, dR",
            r"every symmetric change of G \(N = 5, D = 3\): it is off",
        ),
        (  # dT instead of dR in the gradient of G
            f"def adjoint(dT, T, G):\n{SOLVED}    return -T.T @ dT, dR",
            r"every symmetric change of G \(N = 5, D = 3\): it is off",
        ),
        (  # both orders added: twice the symmetric gradient
            f"def adjoint(dT, T, G):\n{SOLVED}    return -T.T @ dR - dR.T @ T, dR",
            r"every symmetric change of G \(N = 5, D = 3\): it is off",
        ),
        (  # only the lower triangle
            f"def adjoint(dT, T, G):\n{SOLVED}    return (-T.T @ dR).tril(), dR",
            r"every symmetric change of G \(N = 5, D = 3\): it is off",
        ),
        (  # a product instead of a solve
            "def adjoint(dT, T, G):\n    dR = dT @ G\n    return -T.T @ dR, dR",
            r"gradient of R \(N = 5, D = 3\): it is off",
        ),
        (  # two solves: computes T again
            "def adjoint(dT, T, G):\n"
            "    dR = torch.linalg.solve(G, dT, left=False)\n"
            "    again = torch.linalg.solve(G, T @ G, left=False)\n"
            "    return -again.T @ dR, dR",
            r"solves with G once, and forms no inverse \(N = 5, D = 3: 2 operations",
        ),
        (  # by the inverse
            "def adjoint(dT, T, G):\n    dR = dT @ torch.linalg.inv(G)\n    return -T.T @ dR, dR",
            r"solves with G once, and forms no inverse \(N = 5, D = 3: 1 operations",
        ),
        (  # by the inverse, from a solve
            "def adjoint(dT, T, G):\n"
            "    dR = dT @ torch.linalg.solve(G, torch.eye(len(G)).double())\n"
            "    return -T.T @ dR, dR",
            r"solves with G once, and forms no inverse \(N = 5, D = 3: 1 operations \['inverse",
        ),
    ],
    "ex-13-positive": [
        (  # the operator of the lasso
            "def positive(a, kappa):\n    return soft_threshold(a, kappa)",
            r"No weight is negative \(M = 8, D = 4, λ = 0\.5",
        ),
        (  # clamps before it subtracts
            "def positive(a, kappa):\n    return a.clamp(min=0) - kappa",
            r"No weight is negative \(M = 8, D = 4, λ = 0\.5",
        ),
        (  # does not subtract kappa
            "def positive(a, kappa):\n    return a.clamp(min=0)",
            r"The product is λ for every key with weight \(M = 8, D = 4, λ = 0\.5\): it is off",
        ),
        (  # the hard threshold
            "def positive(a, kappa):\n    return a * (a > kappa)",
            r"(No weight is negative|No product of a key with the residual exceeds λ|"
            r"The product is λ for every key with weight) \(",
        ),
        (  # subtracts half of kappa
            "def positive(a, kappa):\n    return (a - kappa / 2).clamp(min=0)",
            r"The product is λ for every key with weight \(M = 8, D = 4, λ = 0\.5\): it is off",
        ),
        (  # absolute values of the lasso's weights
            "def positive(a, kappa):\n    return soft_threshold(a, kappa).abs()",
            r"(No weight is negative|No product of a key with the residual exceeds λ|"
            r"The product is λ for every key with weight) \(",
        ),
    ],
}
