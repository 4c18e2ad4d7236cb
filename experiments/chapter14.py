"""Train detectors whose cross-attention is replaced: ``python -m experiments.chapter14``.

This takes about six hours on one thread of a CPU. Finished runs are not repeated. The results are
written to the records, from which chapter 14 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from derived_book.tasks.detection.run import train_detection
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("14")


def detect(arm: str, seed: int, steps: int, lr: float, place: str) -> dict[str, float]:
    """Train a detector with the attention of an arm at one place; return its scores."""
    layer = {place: page.AT_CROSS[arm]}
    return train_detection(page.config, seed=seed, steps=steps, lr=lr, **layer)


COLUMNS = [
    ("AP50", "AP50", 100, 1),
    ("AP", "AP", 100, 1),
    ("gap", "test - training loss", 1, 2),
]
STEPS = (1000, 2000)
EXPERIMENTS = {
    "cross": experiment(
        "a detector whose cross-attention is replaced",
        detect,
        list(page.AT_CROSS),
        COLUMNS,
        steps=STEPS,
        # Without cross-attention all pictures get the same six answers, so one seed is enough.
        seeds=dict.fromkeys(page.AT_CROSS, 5) | {"left out": 1},
        longer=("lasso, ρ = 10", "lasso, ρ = 1000", "position only"),
        place="cross",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter14", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
