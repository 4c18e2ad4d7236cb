"""Train what chapter 6 predicts: ``python -m experiments.chapter06``.

A quarter of an hour on one thread of a CPU. The models are those of the chapter, which trains some
of these runs again. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention import (
    Conv1DAttention,
    PositionOnlyAttention,
    conv1d_attention,
    softmax_attention,
)
from derived_book import Questions, answer_loss, evaluate, fit, make_attention, seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.fit import Endless
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

# --- places: noisy readings in steps of two, that have to be recognised ---------------------------

PLACES, CHANNELS = 16, 16
HALF = torch.full((2,), 0.5)


def walks(rho: float, batch_size: int, steps: int) -> Endless:
    """Return walks past all places, with signs, and again in another order, without signs.

    A batch is ``(seen, signs, again, answers)``: readings (B, 2 PLACES, CHANNELS), two for each
    place, whose correlation without the noise is `rho`; signs (B, PLACES), all different; the
    readings of the second walk, with new noise of the same size as the signal; its signs.
    """

    @dataclasses.dataclass(frozen=True)
    class Places(Endless):
        steps: int

        def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2**31)
                yield from [self.draw() for _ in range(self.steps)]

        def draw(self) -> tuple[Tensor, ...]:
            first, new = torch.randn(2, batch_size, PLACES, CHANNELS)
            true = torch.stack([first, rho * first + (1 - rho**2) ** 0.5 * new], 2)
            signs, order = torch.rand(2, batch_size, PLACES).argsort(-1)
            again = true[torch.arange(batch_size)[:, None], order]
            seen, heard = ((z + torch.randn_like(z)).flatten(1, 2) for z in (true, again))
            return seen, signs, heard, signs.gather(1, order)

        def check(self, name: str, model: nn.Module) -> None:
            pass

    return Places(steps)


class Finder(nn.Module):
    """One layer, one head: readings of the second walk attend those of the first and the signs."""

    def __init__(self, attention: Any, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.sign = nn.Linear(CHANNELS, dim), nn.Embedding(PLACES, dim)
        self.attend = make_attention(attention, dim, 1)
        self.read = nn.Linear(dim, PLACES)

    def forward(self, seen: Tensor, signs: Tensor, again: Tensor) -> Tensor:
        """Return logits (B, PLACES, PLACES) of the signs of the second walk."""
        sign = F.pad(self.sign(signs)[:, :, None], (0, 0, 0, 1)).flatten(1, 2)  # at first readings
        keys = self.embed(seen)
        h, _ = self.attend(self.embed(again), keys, keys + sign, need_weights=False)
        return self.read(h[:, ::2])


FINDERS: dict[str, tuple[Any, float]] = {
    f"{name}, ρ = {rho}".replace("-", "−"): (attention, rho)
    for rho in (0.9, -0.9)
    for name, attention in {
        "softmax": softmax_attention,
        "taps ½, ½": partial(conv1d_attention, weight=HALF),
        "learned filter": partial(Conv1DAttention, kernel_size=2),
    }.items()
} | {"position only, ρ = 0.9": (partial(PositionOnlyAttention, length=2 * PLACES), 0.9)}


def find(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Finder`; return the accuracy on new walks, and the taps of a learned filter."""
    seed_everything(seed)
    attention, rho = FINDERS[arm]
    model = Finder(attention)
    fit(model.to(device), walks(rho, 16, steps), answer_loss, epochs=1, lr=lr, seed=seed)
    right = evaluate(model, walks(rho, 64, 8), answer_loss)["accuracy"]
    return {"accuracy": right} | of_layer(model.cpu(), *walks(rho, 1, 1).draw()[:3])


# --- texts: a value stands after its key ----------------------------------------------------------

PAIRS, SYMBOLS = 16, 64


class Reader(nn.Module):
    """One layer, one head: pairs of a key and a value, then a question for each key."""

    def __init__(self, attention: Any, positions: bool, layers: int = 1, dim: int = 64) -> None:
        super().__init__()
        self.symbols = SYMBOLS
        self.embed = nn.Embedding(2 * SYMBOLS, dim)  # keys, then values
        self.positions = nn.Parameter(positions * torch.randn(3 * PAIRS, dim))
        self.positions.requires_grad_(positions)
        self.attend = make_attention(attention, dim, 1)
        self.read = nn.Linear(dim, SYMBOLS)
        if layers > 1:
            self.before = make_attention(softmax_attention, dim, 1)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, PAIRS, SYMBOLS) of the values of the keys that are asked for."""
        pairs = torch.stack([keys, SYMBOLS + values], 2).flatten(1)
        x = self.embed(torch.cat([pairs, asked], 1)) + self.positions
        if hasattr(self, "before"):
            x = x + self.before(x, x, x, is_causal=True, need_weights=False)[0]
        h, _ = self.attend(x, x, x, is_causal=True, need_weights=False)
        return self.read(h[:, pairs.shape[1] :])


TWO = partial(Conv1DAttention, kernel_size=2, causal=True)
READERS: dict[str, Any] = {
    "softmax": softmax_attention,
    "softmax with positions": softmax_attention,
    "taps ½, ½": partial(conv1d_attention, weight=HALF),
    "one filter": TWO,
    "two filters": partial(TWO, shared=False),
    "two layers with positions": softmax_attention,
    "position only": partial(PositionOnlyAttention, length=3 * PAIRS),
}


def answer(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `Reader`; return the accuracy on new texts, and the taps of learned filters."""
    seed_everything(seed)
    model = Reader(READERS[arm], "positions" in arm, 2 if arm.startswith("two layers") else 1)
    questions = partial(Questions, PAIRS, SYMBOLS)
    fit(model.to(device), questions(16, steps), answer_loss, epochs=1, lr=lr, seed=seed)
    right = evaluate(model, questions(64, 4), answer_loss)["accuracy"]
    return {"accuracy": right} | of_layer(model.cpu(), *questions(1, 1).draw()[:3])


def of_layer(model: Finder | Reader, *inputs: Tensor) -> dict[str, float]:
    """Return what the attention costs, and the taps of the learned filters, by name and place."""
    found = {k: w[0] for k, w in model.attend.named_parameters() if w.shape == (1, 2)}
    taps = {f"{k}{i}": w[i].item() for k, w in found.items() for i in range(2)}
    return attention_cost(model, *inputs) | taps


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "places": deciding(
        "noisy readings that have to be recognised",
        find,
        list(FINDERS),
        COLUMNS,
        steps=(200, 400, 800),
    ),
    "texts": deciding(
        "values that stand after their keys",
        answer,
        list(READERS),
        COLUMNS,
        steps=(75, 150, 300, 600),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter06", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
