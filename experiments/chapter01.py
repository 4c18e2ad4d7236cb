"""Train a model that looks up, with attention and controls: ``python -m experiments.chapter01``.

Ten minutes on one thread of a CPU. Chapter 1 shows the results, which go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from derived_book import Config, train_series
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, deciding, experiment

page = chapter("01")


def recall(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `Recaller` on associative recall; return its share of right answers."""
    model = page.recaller(arm, seed)
    cost = attention_cost(model, *torch.zeros(3, 1, 16, dtype=torch.int64))
    return {"accuracy": page.train(model, seed, steps, lr)} | cost


def speakers(arm: str, **settings: Any) -> dict[str, float]:
    """Name the speakers of time series; return the share that is right."""
    return train_series(Config(dim=64, heads=8, attention=page.MIXERS[arm]), **settings)


EXPERIMENTS = {
    "recall": deciding(
        "associative recall of 16 pairs, one layer",
        recall,
        list(page.MIXERS),
        [("accuracy", "right answers, %", 100, 1)],
        steps=(75, 150, 300, 600),
        below={"position only": "softmax"},  # the best control
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
