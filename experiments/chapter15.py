"""Train the models whose results chapter 15 predicts: ``python -m experiments.chapter15``.

This takes about an hour on one thread of a CPU. All arms share the page's layer, `Memory`, and
differ in what the layer keeps of the past. Finished runs are not repeated. The results are written
to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("15")
TASKS = {  # how sets are drawn, and their sizes in training and in the test
    "overwritten": (page.overwritten, [32], [500]),
    "cups": (page.shells, [32, 32], [100, 256]),
    "parity": (page.parities, [32, 32], [100, 256]),
}


def learn(arm: str, seed: int, steps: int, lr: float, task: str) -> dict[str, float]:
    """Train one arm; return its accuracy on new sets: of names, or near and far."""
    draw, trained, tested = TASKS[task]
    seed_everything(seed)
    model = page.Reader(arm, tokens=6, answers=3)  # for each task: the recorded draws follow it
    if task == "overwritten":
        model = page.Lookup(arm)
    elif task == "parity":
        model = page.Reader(arm, tokens=2, answers=2)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        *asked, answers = draw(*trained)
        loss = cross_entropy(model(*asked), answers)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    with torch.no_grad():
        *asked, answers = draw(*tested)
        right = (model(*asked).argmax(1) == answers).float()
    if task == "overwritten":
        return {"accuracy": float(right.mean())}
    near, far = right[:, -232:-224], right[:, -32:]  # of 256 bits or swaps
    return {"far": float(far.mean()), "near": float(near.mean())}


CONTROLS = ["uniform", "alone", "position only"]
ORDER_BLIND = ["softmax", "linear", "ridge"]
HALF = 0.5 + 4 * 0.5 / 8000**0.5  # an order-blind layer's limit, plus four standard errors
FAR = [("far", "places 225–256, right, %", 100, 1), ("near", "places 25–32, right, %", 100, 1)]
EXPERIMENTS = {
    "overwritten": experiment(
        "names that are written twice",
        learn,
        [*ORDER_BLIND, "softmax with age", "gated linear", "delta", "gated delta", *CONTROLS],
        [("accuracy", "right, %", 100, 1)],
        steps=(150, 300, 600, 1200),
        below=dict.fromkeys(ORDER_BLIND, HALF)
        | {"gated linear": "delta", "delta": "softmax with age"},
        task="overwritten",
    ),
    "cups": experiment(
        "three cups and one ball",
        learn,
        [*page.STRENGTHS, "softmax", *CONTROLS],
        FAR,
        steps=(800, 1600),
        below={"β < 1": page.STEEP},
        task="cups",
    ),
    "parity": experiment(
        "the parity of bits",
        learn,
        [*page.STRENGTHS, "gated linear", "softmax", *CONTROLS],
        FAR,
        steps=(300, 600),
        below={"β < 1": page.STEEP},
        task="parity",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter15", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
