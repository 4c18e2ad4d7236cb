"""Train detectors whose attention has no matrices: ``python -m experiments.chapter14``.

About six hours on one thread of a CPU. A run that has finished is not repeated. The results go
to the records, from where chapter 14 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from derived_book.tasks.detection.run import train_detection
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, deciding

page = chapter("14")
ARMS = {"cross": page.AT_CROSS, "decoder": page.AT_DECODER}


def detect(arm: str, seed: int, steps: int, lr: float, place: str) -> dict[str, float]:
    """Train a detector with the attention of an arm at one place; return its scores."""
    layer = {place: ARMS[place][arm]}
    return train_detection(page.config, seed=seed, steps=steps, lr=lr, **layer)


COLUMNS = [
    ("AP50", "AP50", 100, 1),
    ("AP", "AP", 100, 1),
    ("gap", "test - training loss", 1, 2),
]
own = partial(deciding, steps=(1000, 2000), seeds=8)
EXPERIMENTS = {
    place: own(title, detect, list(ARMS[place]), COLUMNS, place=place)
    for place, title in (
        ("cross", "a detector whose cross-attention is replaced"),
        ("decoder", "a detector whose decoder's self-attention is replaced"),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter14", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
