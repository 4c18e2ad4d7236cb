"""Train a model that looks up, with attention and controls: ``python -m experiments.chapter01``.

Ten minutes on one thread of a CPU. Chapter 1 shows the results, which go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from derived_attention import (
    PositionOnlyAttention,
    identity_attention,
    softmax_attention,
    uniform_attention,
)
from derived_book import Config, train_recall, train_series
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding, experiment

PAIRS = 16
ARMS = {
    "softmax": softmax_attention,
    "uniform": uniform_attention,
    "alone": identity_attention,
    "position only": partial(PositionOnlyAttention, length=2 * PAIRS),
}


def recall(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train one layer on associative recall; return its share of right answers."""
    config = Config(dim=64, heads=4, layers=1, dropout=0.0, attention=ARMS[arm])
    options = {"pairs": PAIRS, "seed": seed, "steps": steps, "lr": lr, "device": device}
    return train_recall(config, **options)


def speakers(arm: str, **settings: Any) -> dict[str, float]:
    """Name the speakers of time series; return the share that is right."""
    return train_series(Config(dim=64, heads=8, attention=ARMS[arm]), **settings)


EXPERIMENTS = {
    "recall": deciding(
        "associative recall of 16 pairs, one layer",
        recall,
        list(ARMS),
        [("accuracy", "right answers, %", 100, 1)],
        steps=(75, 150, 300, 600),
    ),
    "speakers": experiment(
        "nine speakers of Japanese vowels",
        speakers,
        ["softmax", "uniform", "alone"],
        [("accuracy", "right, %", 100, 1)],
        name="JapaneseVowels",
        epochs=20,
        batch_size=32,
        lr=2e-3,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter01", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
