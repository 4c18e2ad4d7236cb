"""Train the example of chapter 18, sparsemax attention: ``python -m experiments.chapter18``.

About half an hour on one thread of a CPU. *longer* trains two arms to look a value up among 64
tokens, and reads the trained models among more, which are records that nobody asks for. The others
are the jobs of chapter 17, with its frame and budgets, for one row more. What has finished is not
repeated. The results go to the records, where the chapter reads them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from derived_attention.common.convention import mechanism, scaled
from derived_attention.common.masks import Mask
from derived_attention.registry import MECHANISMS, Entry
from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments import chapter17
from experiments.chapter17 import NAMES, SETS, VALUES, Frame, look_up, train
from experiments.protocol import command, deciding

LENGTH, LENGTHS = 64, (64, 512, 4096)


# --- the mechanism, as the chapter writes it ------------------------------------------------------


@torch.no_grad()
def threshold(s: Tensor) -> Tensor:
    """Return τ (..., 1) with Σ max(s − τ, 0) = 1, by Newton's steps from below."""
    one, size = s.new_ones(s.shape[-1], 1), None
    tau = s.amax(-1, keepdim=True) - 1
    while True:
        excess = (s - tau).relu_()
        over, inside = excess @ one - 1, excess.sign_() @ one
        tau = torch.maximum(tau, tau + over / inside)
        if size is not None and torch.equal(inside, size):
            return tau
        size = inside


def sparsemax(s: Tensor) -> Tensor:
    """Project scores (..., M) onto the simplex; autograd finds the Jacobian of the support."""
    inside = s > threshold(s)
    kept = s.masked_fill(~inside, 0)
    tau = (kept.sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return (kept - tau).masked_fill(~inside, 0)


def sparsemax_weights(
    q: Tensor, k: Tensor, attn_mask: None = None, is_causal: bool = False, *, scale: Any = None
) -> Tensor:
    """Return A (..., N, M), without a mask."""
    return sparsemax(scaled(q, scale) @ k.mT)


@mechanism(weights=sparsemax_weights)
def sparsemax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Attend with sparsemax weights; the chapter has the form that stores no matrix."""
    return sparsemax_weights(q, k, scale=scale) @ v


OWN = {"sparsemax": Entry("Sparsemax", "#b4641e", 18, sparsemax_attention)}


@contextmanager
def registered() -> Iterator[None]:
    """Have the mechanism of this chapter in the registry, for a while."""
    MECHANISMS.update(OWN)
    try:
        yield
    finally:
        for name in OWN:
            del MECHANISMS[name]


# --- longer than it was trained for ---------------------------------------------------------------


class Placeless(Frame):
    """The frame without vectors of places, so that it reads any number of tokens."""

    def __init__(self, arm: str) -> None:
        super().__init__(arm, LENGTH, VALUES)
        del self.places

    def forward(self, names: Tensor, values: Tensor) -> Tensor:
        """Return logits (B, N, 32), from names and values (B, N)."""
        return self.answer(names, values)[0]

    def answer(
        self, names: Tensor, values: Tensor, asking: Tensor | None = None, weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits of the tokens `asking` (B, n), which attend to all, and their weights."""
        layer, x = self.layer, self.name(names) + self.value(values)
        y, x = layer.norm1(x), x if asking is None else at(x, asking)
        q = y if asking is None else at(y, asking)
        options = dict(need_weights=weights, average_attn_weights=False)
        h, A = layer.attention(q, y, y, **options)
        x = x + h
        return self.read(self.norm(x + layer.feedforward(layer.norm2(x)))), A


def at(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens (B, n, D) of x (B, N, D) at an index (B, n)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def among(sets: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw `look_up` for 64 tokens, and records of the other 32 names, up to `length` tokens.

    Returns names and values (B, N), and where the 32 questions stand and their answers (B, 32).
    """
    names, values, answers = look_up(sets, LENGTH)
    missing = torch.ones(sets, NAMES).scatter(1, names, 0).argsort(1, descending=True)[:, :32]
    more = length - LENGTH
    other = missing.gather(1, torch.randint(32, (sets, more)))
    values = torch.cat([values, torch.randint(VALUES, (sets, more))], 1)
    asking = (answers[..., 0] >= 0).nonzero()[:, 1].view(sets, 32)
    return torch.cat([names, other], 1), values, asking, answers[..., 0].gather(1, asking)


@torch.no_grad()
def read(model: Placeless, length: int, sets: int = 8) -> tuple[float, float]:
    """Return the share of right answers, and the weight of the record in the head with most."""
    right, weight = [], []
    for _ in range(sets):
        names, values, asking, answers = among(1, length)
        logits, A = model.answer(names, values, asking, weights=True)
        record = (
            names.gather(1, asking)[..., None] == names.masked_fill(values == VALUES, -1)[:, None]
        )
        right.append((logits.argmax(-1) == answers).double().mean())
        if A is not None:  # (1, H, 32, N)
            weight.append((A * record[:, None]).sum(-1).amax(1).double().mean())
    return float(torch.stack(right).mean()), float(torch.stack(weight).mean())


def sharpened(model: Placeless, factor: float) -> Placeless:
    """Return a copy whose scores are multiplied."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for x in (model.layer.attention.in_proj_weight, model.layer.attention.in_proj_bias):
            x[: x.shape[0] // 3] *= factor
    return model


def longer(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train among 64 tokens; read among 64, 512 and 4096, the last with sharper scores, too."""
    seed_everything(seed)
    with registered():
        model = Placeless(arm)
    train(model, partial(look_up, SETS, LENGTH), steps, lr)
    scores = {}
    for length in LENGTHS:
        scores[f"right_{length}"], scores[f"weight_{length}"] = read(model, length)
    grown = torch.tensor(LENGTHS[-1]).log() / torch.tensor(LENGTH).log()
    scores["sharpened"] = read(sharpened(model, float(grown)), LENGTHS[-1])[0]
    return scores


def learn(arm: str, seed: int, steps: int, lr: float, device: str, task: str) -> dict[str, float]:
    """Make a run of chapter 17 with the mechanism of this chapter in its registry."""
    with registered():
        return chapter17.learn(arm, seed, steps, lr, device, task)


EXPERIMENTS = {
    # A learning rate is chosen by what the trained model reads among most tokens, so that none is
    # chosen for what every arm can do.
    "longer": deciding(
        "a value by its name, read among more tokens than in training",
        longer,
        ["softmax", "sparsemax"],
        [
            ("right_4096", "right among 4096 tokens, %", 100, 1),
            ("right_512", "right among 512, %", 100, 1),
            ("right_64", "right among 64, %", 100, 1),
            ("weight_4096", "weight of the record among 4096, %", 100, 1),
            ("weight_64", "weight among 64, %", 100, 1),
            ("sharpened", "right among 4096, scores × 2, %", 100, 1),
        ],
        steps=(200, 400),
        seeds=5,
    ),
}
EXPERIMENTS |= {
    task: plan | {"function": learn, "names": list(OWN), "seeds": 8 if task == "count" else 3}
    for task, plan in chapter17.EXPERIMENTS.items()
    if task in chapter17.TASKS
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter18", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
