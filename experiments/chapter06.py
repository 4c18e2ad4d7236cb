"""Train the models whose results chapter 6 predicts: ``python -m experiments.chapter06``.

This takes half an hour on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from derived_attention import Conv1DAttention, PositionOnlyAttention, softmax_attention
from derived_book import Questions
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment

page = chapter("06")

FINDERS: dict[str, tuple[Any, float]] = {
    f"{name}, ρ = {rho}".replace("-", "−"): (attention, rho)
    for rho in (0.9, -0.9)
    for name, attention in {
        "softmax": softmax_attention,
        "taps ½, ½": page.half_and_half,
        "learned filter": partial(Conv1DAttention, kernel_size=2),
    }.items()
} | {"position only, ρ = 0.9": (partial(PositionOnlyAttention, length=32), 0.9)}


def find(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `Finder`; return its accuracy on new walks, and what its layer has."""
    attention, rho = FINDERS[arm]
    model, right = page.train_finder(attention, rho, seed, steps, lr)
    return {"accuracy": right} | of_layer(model, *page.Places(rho, 1, 1).draw()[:3])


POSITIONS = {"positions": True}
READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "softmax": (page.ARMS["softmax"], {}),
    "softmax with positions": (softmax_attention, POSITIONS),
    "taps ½, ½": (page.half_and_half, {}),
    "one filter": (page.ARMS["one filter"], {}),
    "two filters": (page.ARMS["two filters"], {}),
    "two layers with positions": (softmax_attention, POSITIONS | {"before": [softmax_attention]}),
    "position only": (partial(PositionOnlyAttention, length=48), {}),
}


def answer(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `Reader`; return its accuracy on new texts, and what its layer has."""
    attention, options = READERS[arm]
    model, right = page.train_reader(attention, seed, steps, lr, **options)
    return {"accuracy": right} | of_layer(model, *Questions(16, 64, 1, 1).draw()[:3])


def of_layer(model: nn.Module, *inputs: Tensor) -> dict[str, float]:
    """Return the costs of the attention, and the taps of learned filters, by name and position."""
    found = {k: w[0] for k, w in model.attend.named_parameters() if w.shape == (1, 2)}
    taps = {f"{k}{i}": w[i].item() for k, w in found.items() for i in range(2)}
    return attention_cost(model, *inputs) | taps


VALUES = torch.randint(64, (20_000, 16), generator=torch.Generator().manual_seed(0))
BAG = one_hot(VALUES, 64).sum(1).amax(1).double().mean().item() / 16  # naming the most frequent one
COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "places": experiment(
        "noisy readings that have to be recognised",
        find,
        list(FINDERS),
        COLUMNS,
        steps=(200, 400, 800),
        below={
            "softmax, ρ = 0.9": "taps ½, ½, ρ = 0.9",
            "taps ½, ½, ρ = −0.9": "softmax, ρ = −0.9",
            "softmax, ρ = −0.9": "learned filter, ρ = −0.9",
        },
    ),
    "texts": experiment(
        "values that stand after their keys",
        answer,
        list(READERS),
        COLUMNS,
        steps=(75, 150, 300, 600),
        below={"softmax with positions": BAG + POINT, "taps ½, ½": "one filter"},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter06", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
