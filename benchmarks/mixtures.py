"""Train mixtures of keys beside softmax and linear attention: ``python -m benchmarks.mixtures``.

About an hour and a half on one thread of a CPU. A run that has finished is not repeated: start it
again after a break, or one experiment at a time. The results go to `training/recorded/`,
from where chapter 10 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.experiments import command, experiment
from derived_attention import (
    MixtureAttention,
    MultiheadAttention,
    identity_attention,
    linear_attention,
    uniform_attention,
)
from derived_attention.tasks.language.run import train_language
from derived_attention.tasks.listops.run import train_listops
from derived_attention.tasks.model import Config
from derived_attention.tasks.series.run import train_series
from derived_attention.tasks.translation.run import train_translation
from derived_attention.training.recorded import FOLDER

Arm = tuple[Callable[..., Any], int]  # attention and heads


def arms(heads: int, width: int) -> dict[str, Arm]:
    """All mechanisms, with `heads` heads of `width` features, and with half as many."""
    half = heads // 2
    plain = partial(MultiheadAttention, head_dim=width)
    mixed = partial(MixtureAttention, head_dim=width, priors="learned")
    linear = partial(plain, attention=linear_attention)
    wider = partial(MultiheadAttention, head_dim=width * 5 // 4)
    dots = {"distance": False}
    return {
        f"softmax, {heads} heads": (plain, heads),
        f"softmax, {half} heads": (plain, half),
        f"softmax, {half} heads, a quarter wider": (wider, half),
        f"MGK, {half} heads": (mixed, half),
        f"sMGK, {half} heads": (partial(mixed, shifted=True), half),
        f"MGK, {heads} heads": (mixed, heads),
        f"sMGK, {heads} heads": (partial(mixed, shifted=True), heads),
        f"MGK, {half} heads, hard E-step": (partial(mixed, hard=True), half),
        f"MGK, {half} heads, priors by EM": (partial(mixed, priors="em"), half),
        f"MGK, {half} heads, dot products": (partial(mixed, mixture=dots), half),
        f"one Gaussian, {half} heads": (partial(mixed, components=1), half),
        f"linear, {heads} heads": (linear, heads),
        f"linear, {half} heads": (linear, half),
        f"MLK, {half} heads": (partial(mixed, linear=True), half),
        f"sMLK, {half} heads": (partial(mixed, linear=True, shifted=True), half),
        f"multi-query softmax, {heads} heads": (partial(plain, kv_heads=1), heads),
        f"multi-query MGK, {half} heads": (partial(mixed, kv_heads=1), half),
        "control: uniform weights": (partial(plain, attention=uniform_attention), heads),
        "control: no mixing": (partial(plain, attention=identity_attention), heads),
    }


MAIN = (0, 1, 2, 3, 4)  # places in `arms` of what the slow experiments train


def language(arm: str, **settings: Any) -> dict[str, float]:
    """Model a text."""
    attention, heads = arms(4, 16)[arm]
    config = Config(dim=64, heads=heads, dropout=0.0, attention=attention)
    return train_language(config, **settings)


def series(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Classify time series."""
    attention, heads = arms(8, 8)[arm]
    config = Config(dim=64, heads=heads, layers=1, attention=attention)
    return train_series(config, name, **settings)


def listops(arm: str, **settings: Any) -> dict[str, float]:
    """Evaluate lists."""
    attention, heads = arms(4, 8)[arm]
    config = Config(dim=32, heads=heads, hidden=64, attention=attention)
    return train_listops(config, **settings)


def translation(arm: str, **settings: Any) -> dict[str, float]:
    """Translate German into English."""
    attention, heads = arms(4, 16)[arm]
    config = Config(dim=64, heads=heads, dropout=0.0, attention=attention)
    return train_translation(config, **settings)


ACCURACY = (("accuracy", "accuracy in %", 100, 1), ("best", "best test epoch", 100, 1))
LANGUAGE, SERIES, LISTOPS = (list(arms(*sizes)) for sizes in ((4, 16), (8, 8), (4, 8)))
main_of = [LANGUAGE[i] for i in MAIN]
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "language": experiment(
        "Python's documentation",
        language,
        LANGUAGE,
        [("bits", "bits per byte", 1, 3)],
        steps=1000,
    ),
    "language_longer": experiment(
        "Python's documentation, four times as long",
        language,
        main_of,
        [("bits", "bits per byte", 1, 3)],
        steps=4000,
    ),
    "japanese_vowels": experiment(
        "JapaneseVowels", series, SERIES, ACCURACY, name="JapaneseVowels", epochs=20
    ),
    "basic_motions": experiment(
        "BasicMotions", series, SERIES, ACCURACY, name="BasicMotions", epochs=40
    ),
    "listops": experiment("ListOps", listops, LISTOPS, ACCURACY, epochs=6),
    "translation": experiment(
        "German to English",
        translation,
        [*(name for name in main_of if "wider" not in name), "control: uniform weights"],
        [("bleu", "BLEU", 1, 1), ("chrf", "chrF", 1, 1), ("bits", "bits per token", 1, 2)],
        epochs=10,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("mixtures", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
