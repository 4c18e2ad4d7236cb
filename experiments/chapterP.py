"""Train the models whose results chapter P predicts: ``python -m experiments.chapterP``.

This takes ten minutes on one thread of a CPU. A layer decides which of two tokens came last. The
arms differ in how they encode positions, and every model is tested at other lengths, too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment

page = chapter("P")
ARMS = ["none", "uniform", "learned", "sinusoids", "slope", *page.BASES, "position only"]
LENGTHS = (4, 8, 12, 16, 20, 24, 28, 32)


def order(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train one arm; return its loss at 16 tokens and its right answers at each length."""
    model = page.train_order(arm, seed, steps, lr)
    lengths = [n for n in LENGTHS if n <= page.N or arm not in page.NO_PLACES]
    right = {f"right, {n} tokens": page.test_order(model, n)[1] for n in lengths}
    return {"nats": page.test_order(model, page.N)[0], **right}


EXPERIMENTS = {
    "order": experiment(
        "which of two tokens came last, one layer",
        order,
        ARMS,
        [
            ("nats", f"loss, {page.N} tokens", 1, 3),
            (f"right, {page.N} tokens", f"right, {page.N} tokens, %", 100, 1),
        ],
        steps=(250, 500, 1000),
        best=min,
        below=dict.fromkeys(("none", "uniform"), math.log(2) - POINT),  # a guess has the loss log 2
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapterP", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
