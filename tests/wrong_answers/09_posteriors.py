"""Wrong answers to the exercises of chapter 9."""

IMPORTS = """
import numpy as np
from scipy.special import logsumexp
"""

NORMS = """
import numpy as np
def smallest(place):
    apart = np.linalg.norm(place[:, None] - place, axis=-1)
    return apart[apart > 0].min()
"""

BALL = """
import numpy as np
def ball(k1, k2, var1, var2, pi1):
    s, t = 1 / var1, 1 / var2
    centre = (s * k1 - t * k2) / (s - t)
    at_centre = np.log(pi1 / (1 - pi1)) + len(k1) / 2 * np.log(var2 / var1)
    at_centre -= s / 2 * ((centre - k1) ** 2).sum()
    at_centre += t / 2 * ((centre - k2) ** 2).sum()
    return centre, 2 * at_centre / (s - t)
"""


def changed(old, new):
    assert old in BALL
    return BALL.replace(old, new)


WRONG = {
    "ex-09-prior": [
        (
            IMPORTS + "def log_prior_of(K, scale):\n    return np.full(len(K), -np.log(len(K)))",
            r"Bayes' rule with these priors.*N = 6, D = 4.*off by",  # equal priors
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n"
            "    s = scale * (K**2).sum(1)\n"
            "    return s - logsumexp(s)",  # without the factor ½
            r"Bayes' rule with these priors.*N = 6, D = 4.*off by",
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n"
            "    s = -scale * (K**2).sum(1) / 2\n"
            "    return s - logsumexp(s)",  # prefers short keys
            r"Bayes' rule with these priors.*N = 6, D = 4.*off by",
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n"
            "    s = (K**2).sum(1) / (2 * scale)\n"
            "    return s - logsumexp(s)",  # takes scale for the variance
            r"Bayes' rule with these priors.*off by",
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n    return scale * (K**2).sum(1) / 2",
            r"The priors add up to one \(N = 1.*off by",  # not normalised
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n"
            "    e = np.exp(scale * (K**2).sum(1) / 2)\n"
            "    return np.log(e / e.sum())",
            r"Log priors of long keys are finite",
        ),
        (
            IMPORTS + "def log_prior_of(K, scale):\n"
            "    e = np.exp(scale * ((K**2).sum(1) - (K**2).sum(1).max()) / 2)\n"
            "    return np.log(e / e.sum() + 1e-300)",  # a floor for the priors
            r"Log priors of long keys are finite and differ.*differences.*off by",
        ),
    ],
    "ex-09-ball": [
        (
            changed(" + len(k1) / 2 * np.log(var2 / var1)", ""),  # without the constants
            r"On the sphere both centres.*D = 1, π₁ = 0.5.*off by",
        ),
        (
            changed("len(k1) / 2 * np", "0.5 * np"),  # the constants of one dimension
            r"On the sphere both centres.*D = 3.*off by",
        ),
        (
            changed("np.log(pi1 / (1 - pi1))", "0"),  # without the priors
            r"On the sphere both centres.*π₁ = 0.1.*off by",
        ),
        (
            changed("return centre,", "return k1,"),  # around the narrow centre
            r"On the sphere both centres.*D = 1.*off by",
        ),
        (
            changed("2 * at_centre / (s - t)", "abs(2 * at_centre / (s - t))"),
            r"Where centre 1 never wins, the squared radius is negative.*draw 0",
        ),
        (
            changed("2 * at_centre / (s - t)", "(2 * at_centre / (s - t)) ** 0.5"),
            r"On the sphere both centres.*D = 1.*off by",  # the radius, not its square
        ),
    ],
    "ex-09-centres": [
        (
            NORMS + "def two_centres(town, place, least):\n"
            "    middle = place[town].mean(1, keepdims=True)\n"
            "    return middle.repeat(2, 1), 1e-3",  # both centres in the middle
            r"the weight that is asked for.*4 places",
        ),
        (
            NORMS + "def two_centres(town, place, least):\n    return place[town], 1.0",
            r"the weight that is asked for.*4 places, least = 0.99",  # ignores the distances
        ),
        (
            NORMS + "def two_centres(town, place, least):\n    return place[town], 1e-6",
            r"not much smaller than needed.*4 places, least = 0.5",
        ),
        (
            NORMS + "def two_centres(town, place, least):\n"
            "    odds = (len(place) - 2) * least / (1 - least)\n"
            "    return place[town], smallest(place) / (2 * np.log(odds)) ** 0.5",
            r"the weight that is asked for.*4 places, least = 0.99",  # σ instead of σ²
        ),
        (
            NORMS + "def two_centres(town, place, least):\n"
            "    return place[town], smallest(place)**2 / 2 / np.log(least / (1 - least) + 1e-9)",
            r"the weight that is asked for",  # counts only one other centre
        ),
        (
            NORMS + "def two_centres(town, place, least):\n"
            "    delta = np.linalg.norm(np.diff(place, axis=0), axis=1).min()\n"
            "    odds = (len(place) - 2) * least / (1 - least)\n"
            "    return place[town], delta**2 / (2 * np.log(odds))",  # neighbours in the list
            r"the weight that is asked for.*16 places, least = 0.99",
        ),
        (
            NORMS + "def two_centres(town, place, least):\n"
            "    delta = 2 * np.linalg.norm(place[0]) * np.sin(np.pi / len(place))\n"
            "    odds = (len(place) - 2) * least / (1 - least)\n"
            "    return place[town], delta**2 / (2 * np.log(odds))",  # evenly spaced places
            r"the weight that is asked for.*16 places, least = 0.99",
        ),
    ],
}
