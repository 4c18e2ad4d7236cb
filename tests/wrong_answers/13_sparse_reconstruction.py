"""Wrong answers to the exercises of chapter 13."""

SOLVED = "    dR = torch.linalg.solve(G, dT, left=False)\n"

WRONG = {
    "ex-13-adjoint": [
        (  # the sign of G's gradient
            f"def adjoint(dT, T, G):\n{SOLVED}    return T.T @ dR, dR",
            r"every symmetric change of G \(N = 5, D = 3\): it is off",
        ),
        (  # the gradient of T, not yet solved, in the gradient of G
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
        (  # the product in the place of the solve
            "def adjoint(dT, T, G):\n    dR = dT @ G\n    return -T.T @ dR, dR",
            r"gradient of R \(N = 5, D = 3\): it is off",
        ),
        (  # two solves: makes R again
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
    ],
    "ex-13-positive": [
        (  # the operator of the lasso
            "def positive(a, kappa):\n    return soft_threshold(a, kappa)",
            r"No weight is negative \(M = 8, D = 4, λ = 0\.5",
        ),
        (  # in the wrong order
            "def positive(a, kappa):\n    return a.clamp(min=0) - kappa",
            r"No weight is negative \(M = 8, D = 4, λ = 0\.5",
        ),
        (  # without the price
            "def positive(a, kappa):\n    return a.clamp(min=0)",
            r"The product is λ for every key with weight \(M = 8, D = 4, λ = 0\.5\): it is off",
        ),
        (  # the hard threshold
            "def positive(a, kappa):\n    return a * (a > kappa)",
            r"(No weight is negative|No product of a key with the residual exceeds λ|"
            r"The product is λ for every key with weight) \(",
        ),
        (  # half of the price
            "def positive(a, kappa):\n    return (a - kappa / 2).clamp(min=0)",
            r"The product is λ for every key with weight \(M = 8, D = 4, λ = 0\.5\): it is off",
        ),
        (  # sizes of the lasso's weights
            "def positive(a, kappa):\n    return soft_threshold(a, kappa).abs()",
            r"(No weight is negative|No product of a key with the residual exceeds λ|"
            r"The product is λ for every key with weight) \(",
        ),
    ],
}
