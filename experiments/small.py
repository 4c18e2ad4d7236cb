"""Train the small model of chapter 1: ``python -m experiments.small``.

This takes an hour and a half on one thread of a CPU. Finished runs are not repeated. The results
are written to the records, from which chapter 1 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch

from derived_attention import (
    PositionOnlyAttention,
    identity_attention,
    softmax_attention,
    uniform_attention,
)
from derived_book import ByteLM, Config
from derived_book.runtime import seed_everything
from derived_book.tasks.language.loss import byte_loss
from derived_book.tasks.language.sessions import TEST_SEED, Sessions, right_answers
from derived_book.tasks.run import attention_cost
from derived_book.training.fit import evaluate, fit
from derived_book.training.recorded import FOLDER
from experiments.protocol import TUNING_SEEDS, command, experiment

LENGTH, HEADS = 64, 4  # of `small_model`
ARMS = {
    "softmax": softmax_attention,
    "uniform": uniform_attention,
    "alone": identity_attention,
    "position only": partial(PositionOnlyAttention, length=LENGTH),
}


def small_model(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the small model on sessions; return its right answers and bits per byte."""
    seed_everything(seed)
    model = ByteLM(LENGTH, Config(heads=HEADS, dropout=0.0, attention=ARMS[arm]), taps=4)
    train = Sessions(LENGTH, batch_size=16, steps=steps)
    fit(model, train, byte_loss, epochs=1, lr=lr, seed=seed)
    asked = TEST_SEED + (seed if seed in TUNING_SEEDS else 1)
    bits = evaluate(model, Sessions(LENGTH), byte_loss)
    cost = attention_cost(model, torch.zeros(1, LENGTH, dtype=torch.int64))
    return {"answers": right_answers(model, seed=asked)} | bits | cost


EXPERIMENTS = {
    "model": experiment(
        "the small model on sessions",
        small_model,
        list(ARMS),
        [("answers", "right answers, %", 100, 1), ("bits", "bits per byte", 1, 3)],
        steps=(600, 1200),
        below={"uniform": 0.5, "position only": "softmax"},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("small", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
