"""Train the models whose results chapter 13 predicts: ``python -m experiments.chapter13``.

This takes twenty minutes on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment

page = chapter("13")


def sums(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `Sums`; return the shares explained, and the sizes of its projections."""
    layer, summed = (page.ARMS["bare"] | page.ARMS["sums"])[arm]
    model, found = page.train_sums(layer, summed, seed, steps, lr)
    weights = dict(model.attend.named_parameters()).get("in_proj_weight")
    if weights is not None:
        W_q, W_k, _ = weights.detach().chunk(3)
        found |= {"a": float(W_k.norm() / page.D**0.5), "b": float(W_q.norm() / page.D**0.5)}
    asked, _ = page.pose(1, summed)
    return found | attention_cost(model, *asked)


LINEAR = 1 - (1 - 3 / page.M) * (1 - page.D / (page.M - 1))  # ceiling of weights linear in queries
COLUMNS = [("explained", "variance explained, %", 100, 1)]
EXPERIMENTS = {
    "bare": experiment(
        "sums of three keys, layers without weights",
        sums,
        list(page.ARMS["bare"]),
        COLUMNS,
        steps=(400, 800),
        below={"ρ = 10": "ρ = 1"},
    ),
    "sums": experiment(
        "sums of keys, layers with projections",
        sums,
        list(page.ARMS["sums"]),
        COLUMNS,
        steps=(400, 800, 1600),
        below={
            "ridge": LINEAR + POINT,
            "softmax": LINEAR,
            "position only": 3 / page.M + POINT,
            "lasso, ρ = 1": "lasso, ρ = 1, 20 steps",
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter13", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
