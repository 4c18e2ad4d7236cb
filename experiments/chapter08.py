"""Measure the recall of cheap attentions and coarse heads: ``python -m experiments.chapter08``.

This takes half an hour on one thread of a CPU. Each arm is one layer that has to recall values, or
means of two neighbouring values. Chapter 8 predicts the largest share of their variance that the
layer can recall. The results are written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("08")
FINE_ONLY = ("r = 16", "w = 6", "MRA-2-s, 1 block", "2 blocks", "1 and 2")
COARSE_ARMS = [arm for arm in page.ARMS if not arm.endswith(FINE_ONLY)]


def recall(arm: str, seed: int, steps: int, lr: float, *, window: int) -> dict[str, float]:
    """Train one layer; return the share of what is asked for that it recalls."""
    layer = page.ARMS[arm]
    share = page.trained_share(layer, window, seed, steps, lr)
    return {"recalled": share} | attention_cost(page.Recall(layer), *page.draw(1, window)[:3])


COLUMNS = [("recalled", "share recalled, %", 100, 1)]
STEPS = (300, 600)
SCALE_2 = (1 + 1 / (page.N - 1)) / 4  # limit of heads of scale 2 for single values
FINE_BELOW: dict[str, str | float] = {
    f"Mrs + {base}": base
    for base in ("Linformer, r = 8", "Luna, r = 8", "Performer, r = 8", "MRA-2, 1 block")
}
FINE_BELOW |= {"Mrs + softmax": SCALE_2, "Mrs + FMM, w = 2": SCALE_2}
FINE_BELOW["Mrs + softmax, scales 1 and 2"] = (1 + SCALE_2) / 2
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "fine": experiment(
        "the share of single values that one layer recalls",
        recall,
        list(page.ARMS),
        COLUMNS,
        steps=STEPS,
        below=FINE_BELOW,
        window=1,
    ),
    "coarse": experiment(
        "the share of means of two values that one layer recalls",
        recall,
        COARSE_ARMS,
        COLUMNS,
        steps=STEPS,
        below={
            "Mrs + MRA-2, 1 block": "MRA-2, 1 block",
            "Mrs + softmax, scale 4": "Mrs + softmax",
        },
        window=2,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter08", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
