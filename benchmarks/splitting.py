"""Train attention that reconstructs its query: ``python -m benchmarks.splitting``.

About an hour on one thread of a CPU. A run that has finished is not repeated: start it again after
a break, or one experiment at a time. The results go to `training/recorded/`, from where
chapter 14 reads them.

A layer *without weights* has no W_Q, W_K, W_V and no W_O. Numbers of random tokens are those of
003 as shares of the image's tokens: 100, 500 and 1000 of some 850 are 4, 20 and 40 of 36 here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.experiments import command, experiment
from derived_attention import (
    LassoAttention,
    MultiheadAttention,
    RidgeAttention,
    identity_attention,
    uniform_attention,
)
from derived_attention.tasks.detection.run import train_detection
from derived_attention.tasks.images.run import train_images
from derived_attention.tasks.model import Config
from derived_attention.tasks.recall.run import train_recall
from derived_attention.tasks.series.run import train_series
from derived_attention.training.recorded import FOLDER

Layer = Callable[..., Any]

PRINTED: dict[str, Any] = {"lam": 0.1, "rho": 10.0, "iterations": 5}
FEW, MORE, MOST = 4, 20, 40  # random tokens
DROPOUT = 0.1
LARGE = 1000.0  # ρ, beside some 36 of the eigenvalues of KᵀK: five steps are far from converged

bare = partial(MultiheadAttention, projected=False)


def lasso(**own: Any) -> Layer:
    """Return a layer without weights whose values are the dictionary, with λ, ρ, k of 003."""
    return partial(LassoAttention, **PRINTED | {"projected": False, "dictionary": "value"} | own)


def left_out(q: Tensor, k: Tensor, v: Tensor, *args: Any, **masks: Any) -> Tensor:
    """Return zeros: what is added to them is all that is left."""
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


# --- The detector: 003's Tables 1 to 3 ------------------------------------------------------------

WITHOUT: dict[str, Layer] = {
    "softmax without weights": bare,
    "lasso": lasso(random_tokens=MOST, dropout=DROPOUT, power=5),
    "lasso, ρ = 1000": lasso(rho=LARGE, power=5),
    "control: uniform without weights": partial(bare, attention=uniform_attention),
    "control: left out": partial(bare, attention=left_out),
}
printed = partial(lasso, random_tokens=MORE, dropout=DROPOUT)
large = partial(lasso, rho=LARGE, power=5)
CROSS: dict[str, dict[str, Any]] = {
    "ridge": {"cross": partial(RidgeAttention, projected=False, dictionary="value")},
    "(a) plain lasso": {"cross": lasso()},
    "(b) 4 random tokens": {"cross": lasso(random_tokens=FEW)},
    "(c) 20 random tokens, dropout": {"cross": printed()},
    "(d) 20 random tokens, dropout, x⁵": {"cross": printed(power=5)},
    "lasso": {"cross": WITHOUT["lasso"]},  # (e)
    "(d), λ and ρ learned": {"cross": printed(power=5, learned=True)},
    "lasso, ρ = 1000": {"cross": WITHOUT["lasso, ρ = 1000"]},
    "ρ = 1000, 20 random tokens, dropout": {"cross": printed(power=5, rho=LARGE)},
    "ρ = 1000, soft path dropout": {"cross": large(), "path_dropout": "soft"},
    "ρ = 1000, hard path dropout": {"cross": large(), "path_dropout": "hard"},
    "ρ = 1000, keys as dictionary": {"cross": large(dictionary="key")},
}
ABLATION = {f"cross: {name}": own for name, own in CROSS.items()}
SELF: dict[str, dict[str, Any]] = {
    "decoder: 50 iterations": {"decoder": lasso(iterations=50)},
    "decoder: (a) plain lasso": {"decoder": lasso()},
    "decoder: (b) 20 random tokens, dropout, x⁵": {"decoder": printed(power=5)},
}
PLACES: dict[str, dict[str, Any]] = {"softmax": {}} | {
    f"{place}: {name}": {place: layer}
    for place in ("encoder", "decoder", "cross")
    for name, layer in WITHOUT.items()
    if (place, name) != ("decoder", "lasso, ρ = 1000")  # six values: ρ = 10 is large there
}
DETECTORS = PLACES | ABLATION | SELF


def detection(arm: str, **settings: Any) -> dict[str, float]:
    """Find objects, with another attention at one of the three places of a detector."""
    config = Config(dim=64, heads=4, layers=2, hidden=128, dropout=0.0)
    return train_detection(config, **DETECTORS[arm], **settings)


# --- One mechanism in all layers ------------------------------------------------------------------

ARMS: dict[str, Layer] = {
    "softmax": MultiheadAttention,
    "softmax without weights": bare,
    "lasso": partial(LassoAttention, **PRINTED),
    "lasso, x⁵": partial(LassoAttention, **PRINTED, power=5),
    "ridge": RidgeAttention,
    "lasso without weights": lasso(),
    "lasso without weights, x⁵": lasso(power=5),
    "ridge without weights": partial(RidgeAttention, projected=False, dictionary="value"),
    "control: uniform without weights": partial(bare, attention=uniform_attention),
    "control: no mixing, without weights": partial(bare, attention=identity_attention),
}


STEPS = {
    f"lasso without weights, {n} of ADMM": lasso(iterations=k)
    for k, n in ((1, "1 step"), (2, "2 steps"), (20, "20 steps"))
}
EVERY = ARMS | STEPS


def series(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Classify time series, as chapter 8 does."""
    return train_series(Config(dim=64, heads=8, attention=EVERY[arm]), name, **settings)


def images(arm: str, **settings: Any) -> dict[str, float]:
    """Classify images by a class token, as chapter 8 does."""
    config = Config(dim=32, heads=4, hidden=64, attention=EVERY[arm])
    return train_images(config, class_token=True, **settings)


def recall(arm: str, **settings: Any) -> dict[str, float]:
    """Recall values by their keys, as chapter 12 does."""
    config = Config(dim=64, heads=8, dropout=0.0, attention=EVERY[arm])
    return train_recall(config, **settings)


AP = (
    ("AP", "AP", 100, 1),
    ("AP50", "AP50", 100, 1),
    ("AP75", "AP75", 100, 1),
    ("gap", "test - training loss", 1, 2),
)
ACCURACY = (("accuracy", "accuracy in %", 100, 1), ("best", "best test epoch", 100, 1))
SCENES: dict[str, Any] = dict(steps=800, batch_size=16, lr=2e-3)
DIGITS: dict[str, Any] = dict(name="digits", patch=2, epochs=15)
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "detection": experiment(
        "Another attention at one of three places of a detector", detection, list(PLACES), AP,
        **SCENES,
    ),
    "ablation_cross": experiment(
        "Cross-attention of a detector without weights; 'lasso' is (e): 40 random tokens, "
        "dropout, x⁵",
        detection, list(ABLATION), AP, **SCENES,
    ),
    "ablation_self": experiment(
        "Self-attention of a detector's decoder without weights", detection, list(SELF), AP,
        **SCENES,
    ),
    "japanese_vowels": experiment(
        "JapaneseVowels", series, list(ARMS), ACCURACY,
        name="JapaneseVowels", epochs=20, batch_size=32, lr=2e-3,
    ),
    "basic_motions": experiment(
        "BasicMotions", series, list(ARMS), ACCURACY,
        name="BasicMotions", epochs=20, batch_size=8, lr=2e-3,
    ),
    "digits": experiment(
        "Digits in 16 patches", images, list(ARMS), ACCURACY, **DIGITS
    ),
    "iterations": experiment(
        "Digits in 16 patches; 5 steps of ADMM, or others",
        images, [*list(STEPS)[:2], "lasso without weights", *list(STEPS)[2:]], ACCURACY, **DIGITS,
    ),
    "recall": experiment(
        "Associative recall", recall, list(ARMS), ACCURACY[:1], pairs=16, steps=300
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("splitting", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
