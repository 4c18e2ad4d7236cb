"""Train a model that looks up, with attention and its controls: ``python -m benchmarks.chapter01``.

Ten minutes on one thread of a CPU. Chapter 1 shows the results, which go to `training/recorded/`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.experiments import command, deciding
from derived_attention import (
    Config,
    PositionOnlyAttention,
    identity_attention,
    softmax_attention,
    train_recall,
    uniform_attention,
)
from derived_attention.training.recorded import FOLDER

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


EXPERIMENTS = {
    "recall": deciding(
        "associative recall of 16 pairs, one layer",
        recall,
        list(ARMS),
        [("accuracy", "right answers, %", 100, 1)],
        steps=(75, 150, 300, 600),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter01", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
