"""Train the models whose results chapter 7 predicts: ``python -m experiments.chapter07``.

This takes half an hour on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from derived_attention import PositionOnlyAttention
from derived_book import Examples, class_loss, evaluate, seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.divergence import watch_losses
from experiments.page_models import chapter
from experiments.protocol import command, experiment, load_series_for

page = chapter("07")
POOLED = (2, 4, 8)  # scales to which trained heads of scale 1 are set
KINDS = ("fine", "coarse")
ARMS = [f"{name}, {kind}" for kind in KINDS for name in page.LAYERS]
ARMS += [f"{name}, both" for name in ("all 1", "all 4", "1 to 8")]


def answer(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train on one kind of question, or on both; return the accuracy on 1024 new sequences."""
    seed_everything(seed)
    name, kind = arm.split(", ")
    asks = [i for i in range(2) if kind in (KINDS[i], "both")]
    model = page.TwoScales(page.LAYERS[name])
    cost = attention_cost(model, *page.draw_sequences(1)[0])
    page.train_questions(model, asks, steps, lr)
    test = page.draw_sequences(1024)
    right = page.accuracies(model, *test)
    found = {"accuracy": sum(right[i] for i in asks) / len(asks)}
    found |= dict(zip(KINDS, right, strict=True)) | cost
    for s in POOLED if arm in ("all 1, fine", "all 1, coarse") else ():
        model.attend = page.set_scale(model.attend, s)
        found[f"pooled {s}"] = page.accuracies(model, *test)[asks[0]]
    return found


# Orders that the page's ceilings predict: each arm is below the next one.
ORDERS = {
    "fine": ["position only", "all 8", "all 4", "all 2", "all 1"],
    "coarse": ["position only", "all 8", "all 1", "all 2", "all 4"],
    "both": ["all 4", "all 1", "1 to 8"],
}
BELOW = {
    f"{low}, {kind}": f"{high}, {kind}"
    for kind, order in ORDERS.items()
    for low, high in pairwise(order)
}


# --- movements: a classifier of time series ------------------------------------------------------

BATCH = 16  # of the page's `train_classifier`
CLASSIFIERS = {name: page.LAYERS[name] for name in ("all 1", "all 4", "all 8")}
CLASSIFIERS |= {f"all 1, set to {s}, 15 steps": page.LAYERS["all 1"] for s in (4, 8)}
CLASSIFIERS["position only"] = partial(PositionOnlyAttention, length=100)


def classify(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train a classifier of BasicMotions; return its accuracy, also with fine heads pooled.

    Heads that are set to a coarse scale train on for fifteen steps.
    """
    series = load_series_for(seed, "BasicMotions")
    epochs = steps // math.ceil(len(series.train) / BATCH)
    model = page.train_classifier(CLASSIFIERS[arm], series, seed, epochs=epochs, lr=lr)
    if set_to := re.search(r"set to (\d+)", arm):
        with watch_losses():  # a second training, whose losses begin anew
            page.pool_and_train(model, int(set_to[1]), series, seed, lr=lr)
    score = partial(evaluate, batches=Examples(series.test), loss=class_loss)
    found = {"accuracy": score(model)["accuracy"]} | attention_cost(model, series.train.x[:1])
    for s in POOLED if arm == "all 1" else ():
        model.layers[0].attention = page.set_scale(model.layers[0].attention, s)
        found[f"pooled {s}"] = score(model)["accuracy"]
    return found


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "scales": experiment(
        "fine and coarse questions",
        answer,
        ARMS,
        COLUMNS,
        steps=(200, 400),
        below=BELOW,
    ),
    "pooled": experiment(
        "movements, by heads of one scale",
        classify,
        list(CLASSIFIERS),
        COLUMNS,
        steps=(45, 90),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter07", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
