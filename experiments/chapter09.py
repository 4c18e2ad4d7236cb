"""Train what chapter 9 predicts: ``python -m experiments.chapter09``.

Some minutes on one thread of a CPU. The models are those of the chapter, which trains one of these
runs again. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from derived_attention import MixtureAttention, MultiheadAttention, PositionOnlyAttention
from derived_book import answer_loss, evaluate, fit, seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.fit import Endless
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

SHOPS, PLACES, WIDTH = 8, 16, 16

# --- towns: which shop owns a place ---------------------------------------------------------------


def most_uncrossed(owner: Sequence[int]) -> int:
    """Return how many keys can be right at both of their places: X of the chapter's theorem."""
    n = len(owner)
    other = {i: j for i in range(n) for j in range(n) if i != j and owner[i] == owner[j]}
    most = np.zeros((n + 1, n + 1), int)  # of the places from a to b - 1
    for length in range(2, n + 1):
        for a in range(n - length + 1):
            b, p = a + length, other[a]
            most[a, b] = most[a + 1, b]
            if a < p < b:
                most[a, b] = max(most[a, b], 1 + most[a + 1, p] + most[p + 1, b])
    return int(most[0, n])


def draw_town(seed: int, uncrossed: int) -> Tensor:
    """Return the owners (PLACES,) of a random town in which X is `uncrossed`."""
    rng = np.random.default_rng(seed)
    while True:
        owner = rng.permutation(PLACES) // 2
        if most_uncrossed(owner.tolist()) == uncrossed:
            return torch.from_numpy(owner)


def days(owner: Tensor, batch_size: int, steps: int) -> Endless:
    """Return days of a town: in each, every shop sells one thing, and eight places are asked for.

    A batch is ``(shops, goods, asked, answers)``, each (B, SHOPS): the shops in random order, what
    they sell, all different; places, all different, and what their owners sell.
    """

    @dataclasses.dataclass(frozen=True)
    class Days(Endless):
        steps: int

        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2**31)
                yield from [self.draw() for _ in range(self.steps)]

        def draw(self) -> tuple[Tensor, ...]:
            shops, sold = torch.rand(2, batch_size, SHOPS).argsort(-1)  # sold, by shop
            asked = torch.rand(batch_size, PLACES).argsort(-1)[:, :SHOPS]
            return shops, sold.gather(1, shops), asked, sold.gather(1, owner[asked])

        def check(self, name: str, model: nn.Module) -> None:
            pass

    return Days(steps)


# --- layers ---------------------------------------------------------------------------------------


class Guide(nn.Module):
    """One layer: places attend the shops, with the probability that a shop is the owner."""

    circle: Tensor

    def __init__(self, attend: Any, dim: int = 32) -> None:
        super().__init__()
        angle = 2 * torch.pi * torch.arange(PLACES) / PLACES
        self.register_buffer("circle", torch.stack([angle.cos(), angle.sin()], 1))
        self.ask, self.shop = nn.Linear(2, dim), nn.Embedding(SHOPS, dim)
        self.attend = attend(dim)

    def forward(self, shops: Tensor, goods: Tensor, asked: Tensor) -> Tensor:
        """Return the log-probabilities (B, SHOPS, SHOPS) of what is sold at the places."""
        places, keys = self.ask(self.circle[asked]), self.shop(shops)
        A = self.attend(places, keys, keys)[1]  # mean over the heads
        return (A @ one_hot(goods, SHOPS).to(A)).clamp_min(1e-30).log()


softmax = partial(MultiheadAttention, head_dim=WIDTH)
gaussians = partial(MixtureAttention, num_heads=1, head_dim=WIDTH)
LAYERS: dict[str, Any] = {
    "softmax": partial(softmax, num_heads=1),
    "two centres": partial(gaussians, components=2),
    "one centre": partial(gaussians, components=1),
    "softmax, four times as wide": partial(MultiheadAttention, num_heads=1, head_dim=4 * WIDTH),
    "softmax, two heads": partial(softmax, num_heads=2),
    "position only": partial(PositionOnlyAttention, num_heads=1, length=SHOPS),
}
TOWNS = {"softmax": (2, 5, 8), "two centres": (2, 5, 8)}
ARMS = {f"{name}, X = {X}": (name, X) for name in LAYERS for X in TOWNS.get(name, (5,))}


def guide(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Guide` in a town; return its right answers, and −log of the owner's weight."""
    name, uncrossed = ARMS[arm]
    owner = draw_town(seed, uncrossed)
    seed_everything(seed)
    model = Guide(LAYERS[name])
    fit(model.to(device), days(owner, 16, steps), answer_loss, epochs=1, lr=lr, seed=seed)
    scores = evaluate(model, days(owner, 64, 16), answer_loss)
    cost = attention_cost(model.cpu(), *days(owner, 1, 1).draw()[:3])
    return {"accuracy": scores["accuracy"], "nats": scores["loss"]} | cost


COLUMNS = [("nats", "−log weight of the owner", 1, 3), ("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "towns": deciding(
        "shops with two branches, in towns of different X",
        guide,
        list(ARMS),
        COLUMNS,
        steps=(150, 300, 600),
        best=min,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter09", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
