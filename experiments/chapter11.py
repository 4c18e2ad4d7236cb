"""Train the models whose results chapter 11 predicts: ``python -m experiments.chapter11``.

This takes ten minutes on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from derived_attention import MultiheadAttention
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("11")
ARMS = {f"softmax, {groups} groups": (MultiheadAttention, groups) for groups in page.GROUPS}
ARMS |= {
    f"{name}, {groups} groups": (layer, groups)
    for name, layer in page.CONTROLS.items()
    for groups in (4, 32)
}


def look_up(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `Groups`; return its accuracy and, of softmax, what the page measures."""
    layer, groups = ARMS[arm]
    if layer is MultiheadAttention:
        found = page.train_groups(groups, seed, steps, lr)
    else:
        seed_everything(seed)
        model = page.Groups(layer)
        page.learn(model, groups, steps, lr)
        found = {"accuracy": page.share_right(model.eval(), *page.pose(256, groups))}
    asked, _ = page.pose(1, groups)
    return found | attention_cost(page.Groups(layer), *asked)


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "groups": experiment(
        "tokens in groups, of which one member answers",
        look_up,
        list(ARMS),
        COLUMNS,
        steps=(200, 400, 800),
        below={
            f"{name}, {groups} groups": 0.1  # the page's limit for all controls
            for name in ("uniform", "position only")
            for groups in (4, 32)
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter11", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
