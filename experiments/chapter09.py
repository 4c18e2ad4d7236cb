"""Train the models whose results chapter 9 predicts: ``python -m experiments.chapter09``.

This takes ten minutes on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("09")
TOWNS = {"softmax": (2, 5, 8), "two centres": (2, 5, 8)}
RUNS = {f"{name}, X = {X}": (name, X) for name in page.ARMS for X in TOWNS.get(name, (5,))}


def guide(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train a `Guide` in a town; return its right answers, and −log of the owner's weight."""
    name, uncrossed = RUNS[arm]
    nats, accuracy = page.train_guide(name, uncrossed, seed, steps, lr)
    day = page.Days(torch.arange(page.PLACES) // 2, batch_size=1).draw()
    cost = attention_cost(page.Guide(page.ARMS[name]), *day[:3])
    return {"accuracy": accuracy, "nats": nats} | cost


COLUMNS = [("nats", "−log weight of the owner", 1, 3), ("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "towns": experiment(
        "shops with two branches, in towns of different X",
        guide,
        list(RUNS),
        COLUMNS,
        steps=(150, 300, 600),
        best=min,
        below={
            "one centre, X = 5": "two centres, X = 5",
            "softmax, two heads, X = 5": "two centres, X = 5",
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter09", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
