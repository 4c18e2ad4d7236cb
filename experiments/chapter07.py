"""Train what chapter 7 predicts: ``python -m experiments.chapter07``.

A quarter of an hour on one thread of a CPU. The model and its training are those of the chapter,
which trains some of these runs again. What has finished is not repeated. Results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from derived_attention import MultiheadAttention, MultiresolutionAttention, PositionOnlyAttention
from derived_book import (
    Config,
    Examples,
    SeriesClassifier,
    class_loss,
    evaluate,
    fit,
    load_series,
    seed_everything,
)
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

# --- questions: fine ones about a pair, coarse ones about a segment ------------------------------

SIGMA, SEGMENTS, N = 0.7, 4, 16  # noise of a code; segments; pairs, and questions
SYMBOLS, CODES = 24, 8
BATCH = 64
TEST = 1024  # sequences
POOLED = (2, 4, 8)  # scales to which trained heads of scale 1 are set
KINDS = ("fine", "coarse")


class TwoScales(nn.Module):
    """One layer of attention: questions attend pairs, without positions."""

    def __init__(self, layer: Callable[..., nn.Module], dim: int = 64) -> None:
        super().__init__()
        sizes = {"key": SYMBOLS, "value": SYMBOLS, "segment_key": CODES, "segment_value": CODES}
        self.embed = nn.ModuleDict({name: nn.Embedding(n, dim) for name, n in sizes.items()})
        self.hear = nn.Linear(CODES, dim)
        self.attend = layer(dim, 8)
        self.read = nn.Linear(dim, SYMBOLS + CODES)

    def forward(self, pairs: dict[str, Tensor], asked: Tensor, heard: Tensor) -> Any:
        """Return logits of the fine answers, (B, N, SYMBOLS), and of the coarse ones."""
        x: Any = sum(self.embed[name](symbol) for name, symbol in pairs.items())
        question = self.embed["key"](asked) + self.hear(heard)
        h, _ = self.attend(question, x, x, need_weights=False)
        return self.read(h).split([SYMBOLS, CODES], -1)


def draw(B: int) -> tuple[tuple[Any, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return pairs, keys asked for and codes heard; and the two answers, (B, N) each."""

    def some(n: int, m: int) -> Tensor:
        return torch.rand(B, n).argsort(1)[:, :m]  # all different

    def four(z: Tensor) -> Tensor:
        return z.repeat_interleave(N // SEGMENTS, 1)

    key, value = some(SYMBOLS, N), some(SYMBOLS, N)
    groups = some(CODES, SEGMENTS), some(CODES, SEGMENTS)
    which = torch.randint(N, (B, N))
    segment = torch.randint(SEGMENTS, (B, SEGMENTS))
    pairs = {"key": key, "value": value}
    pairs |= {"segment_key": four(groups[0]), "segment_value": four(groups[1])}
    code = F.one_hot(four(groups[0].gather(1, segment)), CODES)
    heard = code + SIGMA * torch.randn(B, N, CODES)
    answers = value.gather(1, which), four(groups[1].gather(1, segment))
    return (pairs, key.gather(1, which), heard), answers


def coarse_heads(*scales: int) -> partial[nn.Module]:
    """Return what makes a layer with one head of each of these scales."""
    return partial(MultiresolutionAttention, scales=scales)


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "all 1": MultiheadAttention,
    "all 2": coarse_heads(*[2] * 8),
    "all 4": coarse_heads(*[4] * 8),
    "all 8": coarse_heads(*[8] * 8),
    "1 to 8": coarse_heads(1, 1, 2, 2, 4, 4, 8, 8),
    "position only": partial(PositionOnlyAttention, length=N),
}
ARMS = [f"{name}, {kind}" for kind in KINDS for name in LAYERS]
ARMS += [f"{name}, both" for name in ("all 1", "all 4", "1 to 8")]


def answer(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train on one kind of question, or on both; return the accuracy on 1024 new sequences."""
    seed_everything(seed)
    name, kind = arm.split(", ")
    asks = [i for i in range(2) if kind in (KINDS[i], "both")]
    model = TwoScales(LAYERS[name])
    cost = attention_cost(model, *draw(1)[0])
    optimiser = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        inputs, answers = draw(BATCH)
        logits = model(*inputs)
        loss = torch.stack([F.cross_entropy(logits[i].mT, answers[i]) for i in asks]).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    test = draw(TEST)
    right = accuracies(model, *test)
    found = {"accuracy": sum(right[i] for i in asks) / len(asks)}
    found |= dict(zip(KINDS, right, strict=True)) | cost
    for s in POOLED if arm in ("all 1, fine", "all 1, coarse") else ():
        model.attend = pooled(model.attend, s)
        found[f"pooled {s}"] = accuracies(model, *test)[asks[0]]
    return found


def accuracies(model: TwoScales, inputs: Any, answers: Any) -> list[float]:
    """Return the share of right fine and of right coarse answers."""
    with torch.no_grad():
        logits = model(*inputs)
    return [(logits[i].argmax(-1) == answers[i]).double().mean().item() for i in range(2)]


def pooled(layer: MultiheadAttention, s: int) -> nn.Module:
    """Return a layer whose heads have scale s and the weights of `layer`."""
    coarse = coarse_heads(*[s] * layer.num_heads)(layer.embed_dim, layer.num_heads)
    coarse.load_state_dict(layer.state_dict())
    return coarse


# --- movements: a classifier of time series ------------------------------------------------------

BATCHES = 3  # of an epoch, with 16 series each
CLASSIFIERS = {name: LAYERS[name] for name in ("all 1", "all 4", "all 8")}
CLASSIFIERS["position only"] = partial(PositionOnlyAttention, length=100)


def classify(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a classifier of BasicMotions; return its accuracy, also with fine heads pooled."""
    data = load_series("BasicMotions")
    seed_everything(seed)
    config = Config(dim=64, heads=8, layers=1, attention=CLASSIFIERS[arm])
    model = SeriesClassifier(data.channels, data.classes, data.length, config)
    cost = attention_cost(model, data.train.x[:1])
    fit(model, Examples(data.train, 16), class_loss, epochs=steps // BATCHES, lr=lr, seed=seed)
    score = partial(evaluate, batches=Examples(data.test), loss=class_loss)
    found = {"accuracy": score(model)["accuracy"]} | cost
    for s in POOLED if arm == "all 1" else ():
        model.layers[0].attention = pooled(model.layers[0].attention, s)
        found[f"pooled {s}"] = score(model)["accuracy"]
    return found


COLUMNS = [("accuracy", "right, %", 100, 1)]
EXPERIMENTS = {
    "scales": deciding(
        "fine and coarse questions",
        answer,
        ARMS,
        COLUMNS,
        steps=(200, 400),
        rates=(3e-3, 1e-2, 3e-2),
    ),
    "pooled": deciding(
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
