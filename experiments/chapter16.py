"""Train the models whose results chapter 16 predicts: ``python -m experiments.chapter16``.

This takes about an hour on one thread of a CPU. One head looks up values by their names. The arms
differ in what the head keeps of the past, or in how it weights the past. Finished runs are not
repeated. The results are written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment

page = chapter("16")
TASKS = {"absent": (page.half_answered, page.Reader), "rank": (page.look_ups, page.Latent)}


def look_up(arm: str, seed: int, steps: int, lr: float, experiment: str) -> dict[str, float]:
    """Train one arm; return the explained share of the answers' size, on new sequences."""
    draw, kind = TASKS[experiment]
    seed_everything(seed)
    model = kind(arm)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        *given, answers = draw(64)
        loss = (model(*given) - answers).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        *given, answers = draw(2000)
        error = (model(*given) - answers).square().sum() / answers.square().sum()
    return {"explained": 1 - float(error)}


ABSENT = ["softmax", "softmax, gated output", "differential", "sink", "off by one", "ridge"]
ABSENT += ["uniform", "alone", "position only"]
ANSWERS = page.ANSWERED * (page.TAU**2 + 1)  # mean square of a component of an answer
AVERAGES = 1 - page.ANSWERED * (1 - page.ANSWERED) * page.TAU**2 / ANSWERS  # limit of averages
MEAN = page.ANSWERED**2 * (page.TAU**2 + 1 / page.PAIRS) / ANSWERS  # score of uniform weights
EXPLAINED = [("explained", "explained, %", 100, 1)]
EXPERIMENTS = {
    "absent": experiment(
        "questions of which half have no answer",
        look_up,
        ABSENT,
        EXPLAINED,
        steps=(250, 500, 1000, 2000, 4000),
        below={
            "softmax": "differential",
            "differential": AVERAGES + POINT,
            "uniform": MEAN + POINT,
        },
        experiment="absent",
    ),
    "rank": experiment(
        "a cache of r numbers for each token",
        look_up,
        list(page.CACHES),
        EXPLAINED,
        steps=(4000, 8000),
        seeds=5,
        below={
            "6 + 6": "r = 12",
            "r = 8": 6 / 12 + POINT,  # the rest if a name takes two numbers, as on a circle
            "r = 12": 10 / 12 + POINT,
            "r = 14": 1 + POINT,
        },
        experiment="rank",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter16", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
