"""Train the example of chapter 18, sparsemax attention: ``python -m experiments.chapter18``.

This takes about two hours on one thread of a CPU. *longer* trains two arms to look up a value among
64 tokens, and tests them among more tokens, which are records that no question is about. The others
are the jobs of chapter 17, with its model and budgets, for one more arm. Finished runs are not
repeated. The results are written to the records, from which the chapter reads them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from derived_attention.common.convention import mechanism, scaled
from derived_attention.common.masks import Mask
from derived_attention.registry import MECHANISMS, Entry
from derived_book.runtime import seed_everything
from derived_book.training.recorded import FOLDER
from experiments import chapter17
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("18")
LENGTHS = (64, 512, 4096)  # the first is that of the training


# --- the mechanism --------------------------------------------------------------------------------


def sparsemax(s: Tensor) -> Tensor:
    """Project scores (..., M) onto the simplex; autograd finds the Jacobian of the support."""
    inside = s > page.threshold(s.detach())
    kept = s.masked_fill(~inside, 0)
    tau = (kept.sum(-1, keepdim=True) - 1) / inside.sum(-1, keepdim=True)
    return (kept - tau).masked_fill(~inside, 0)


@mechanism
def sparsemax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Tensor:
    """Return attention with sparsemax weights; the chapter has a form that stores no matrix."""
    return sparsemax(scaled(q, scale) @ k.mT) @ v


@contextmanager
def registered() -> Iterator[None]:
    """Keep the mechanism of this chapter in the registry during a block."""
    MECHANISMS["sparsemax"] = Entry("Sparsemax", "#b4641e", 18, sparsemax_attention)
    try:
        yield
    finally:
        del MECHANISMS["sparsemax"]


# --- longer than it was trained for ---------------------------------------------------------------


def among(sets: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw `look_up` for 64 tokens, and records of the other 32 names, up to `length` tokens.

    Return names and values (B, N), and the positions of the 32 questions and their answers (B, 32).
    """
    names, values, answers = page.look_up(sets, LENGTHS[0])
    missing = torch.ones(sets, page.NAMES).scatter(1, names, 0)
    missing = missing.argsort(1, descending=True)[:, :32]
    more = length - LENGTHS[0]
    other = missing.gather(1, torch.randint(32, (sets, more)))
    values = torch.cat([values, torch.randint(page.VALUES, (sets, more))], 1)
    asking = (answers >= 0).nonzero()[:, 1].view(sets, 32)
    return torch.cat([names, other], 1), values, asking, answers.gather(1, asking)


@torch.no_grad()
def read(model: nn.Module, length: int, sets: int = 8) -> tuple[float, float]:
    """Return the share of right answers, and the largest weight that a head gives the record."""
    right, weight = [], []
    layer = model.layer
    for _ in range(sets):
        names, values, asking, answers = among(1, length)
        tokens = model.name(names) + model.value(values)
        y, at = layer.norm1(tokens), asking[..., None]
        q, x = (z.take_along_dim(at, 1) for z in (y, tokens))  # only the 32 questions attend
        h, A = layer.attention(q, y, y, average_attn_weights=False)  # A: (1, H, 32, N)
        x = x + h
        logits = model.read(model.norm(x + layer.feedforward(layer.norm2(x))))
        right.append((logits.argmax(-1) == answers).double().mean())
        written = names.masked_fill(values == page.VALUES, -1)
        record = names.gather(1, asking)[..., None] == written[:, None]
        weight.append((A * record[:, None]).sum(-1).amax(1).double().mean())
    return float(torch.stack(right).mean()), float(torch.stack(weight).mean())


def sharpened(model: nn.Module, factor: float) -> nn.Module:
    """Return a copy of a model whose scores are multiplied by `factor`."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for x in (model.layer.attention.in_proj_weight, model.layer.attention.in_proj_bias):
            x[: x.shape[0] // 3] *= factor
    return model


def longer(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train among 64 tokens; read among 64, 512 and 4096, the last with sharper scores, too."""
    seed_everything(seed)
    with registered():
        model = page.Placeless(arm)
    page.train(model, steps, lr)
    scores = {}
    for length in LENGTHS:
        scores[f"right_{length}"], scores[f"weight_{length}"] = read(model, length)
    scores["sharpened"] = read(sharpened(model, 2), LENGTHS[-1])[0]  # log 4096 / log 64 = 2
    return scores


def jobs(arm: str, seed: int, steps: int, lr: float, task: str) -> dict[str, float]:
    """Make a run of chapter 17 with the mechanism of this chapter in its registry."""
    with registered():
        return chapter17.scores(arm, seed, steps, lr, task)


EXPERIMENTS = {
    # The accuracy among 4096 tokens chooses the learning rates, because every arm can do the task
    # among 64 tokens.
    "longer": experiment(
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
        steps=(800, 1600),
        seeds=5,
        longer=["softmax", "sparsemax"],
    ),
}
EXPERIMENTS |= {
    task: plan
    | {"function": jobs, "names": ["sparsemax"], "below": {}}
    | {"longer": ["sparsemax"] * (task == "count"), "seeds": 8 if task == "count" else 3}
    for task, plan in chapter17.EXPERIMENTS.items()
    if task in chapter17.page.TASKS
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter18", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
