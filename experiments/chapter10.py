"""Train the models whose results chapter 10 predicts: ``python -m experiments.chapter10``.

This takes twenty minutes on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from derived_attention import MixtureAttention
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("10")


def look_up(arm: str, seed: int, steps: int, lr: float, experiment: str) -> dict[str, float]:
    """Train the page's `Lookup`; return its accuracy on new questions, and what it attends to."""
    task = "both" if experiment == "both" else "either"
    model = page.new_lookup(page.ARMS[experiment][arm], task, seed)
    if arm == page.HAND:
        page.by_hand(model)
    page.train_lookup(model, task, steps, lr)
    asked, answers = page.pose(1000, task)
    with torch.no_grad():
        right = (model(*asked).argmax(1) == answers).float()
        found = {"accuracy": float(right.mean())} | shares(model.eval(), asked)
    if task == "both":
        found |= {"first": float(right[:, 0].mean()), "second": float(right[:, 1].mean())}
        found |= fetched(model, asked, answers)
    return found | attention_cost(model, *(z[:1] for z in asked))


@torch.no_grad()
def fetched(model: Any, inputs: tuple[Tensor, ...], answers: Tensor) -> dict[str, float]:
    """Return what a model with two answers reads from its two records.

    The first numbers are the mean weights of the records, if these differ. The next three are for
    pairs of questions whose right values differ: the share of answers whose two likeliest values
    are both right values, the share of pairs that get the same answer twice, and the share of
    answers that are the value of the record with the larger weight. The last is the cross-entropy.
    """
    names, _, asked = inputs
    question, records = model.tokens(*inputs)
    A = model.attend(question, records, records)[1]  # (B, N, N), mean over heads
    own = names[:, :, None] == asked[..., None]  # (B, 2, N, N): the record of each question
    two = ~(own[:, 0] & own[:, 1]).any(-1)  # (B, N): there are two records
    first, second = (float((A * own[:, i]).sum(-1)[two].mean()) for i in (0, 1))
    logits = model(*inputs)
    likeliest = logits.topk(2, 1).indices.sort(1)[0]  # (B, 2, answers, N)
    pair = answers.sort(1)[0][:, :, None].expand_as(likeliest)
    same = (likeliest == pair).all(1).float().transpose(1, 2)[answers[:, 0] != answers[:, 1]]
    differ = (answers[:, 0] != answers[:, 1]) & two  # (B, N)
    named = logits.argmax(1)  # (B, 2, N)
    heard = torch.stack([(A * own[:, i]).sum(-1) for i in (0, 1)])  # (2, B, N)
    louder = answers.gather(1, heard.argmax(0)[:, None]).expand_as(named)
    return {
        "weight of first": first,
        "weight of second": second,
        "two likeliest": float(same.mean()),
        "same answer": float((named[:, 0] == named[:, 1])[differ].float().mean()),
        "louder named": float((named == louder).float().transpose(1, 2)[differ].mean()),
        "loss": float(cross_entropy(logits, answers)),
    }


def shares(model: Any, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Return, for two keys, the mean weight of the first, its prior, and the share of clear cases.

    A case is clear if the weight is below 0.1 or above 0.9.
    """
    layer = model.attend
    if not isinstance(layer, MixtureAttention) or layer.components == 1:
        return {}
    question, records = model.tokens(*inputs)
    gate = page.gates(layer, question, records, records)[0].sum(-1)
    clear = ((gate - 0.5).abs() > 0.4).float().mean()
    prior = layer.keywords()["priors"][0, 0]
    return {"gate": float(gate.mean()), "clear": float(clear), "prior": float(prior)}


COLUMNS = [("accuracy", "right, %", 100, 1)]
BUDGETS = {"both": (300, 600), "either": (300, 600, 1200), "widths": (200, 400)}
CHANCE = 1 / page.N + (1 - 1 / page.N) / page.S  # of both answers being the same value
ONE_PLACE = (1 + (1 + CHANCE) / 2) / 2  # limit of a layer that reads one place
PLACES = ["one head, D = 32", "one head, D = 64", page.HAND, "two keys, D = 32"]
OTHERS = ["two softmax heads, D = 2", "one Gaussian, D = 2"]
BELOW: dict[str, dict[str, str | float]] = {
    "both": dict.fromkeys(PLACES, ONE_PLACE),
    "either": dict.fromkeys(OTHERS, "two keys, D = 2"),
    "widths": {},
}
TITLES = {
    "both": "two names, two values",
    "either": "one of two names",
    "widths": "one of two names, two keys of one width or of two",
}
EXPERIMENTS = {
    name: experiment(
        title,
        look_up,
        list(page.ARMS[name]),
        COLUMNS,
        steps=BUDGETS[name],
        below=BELOW[name],
        longer=["softmax, D = 4", "two keys, D = 2", "two keys, D = 1"] if name == "either" else (),
        experiment=name,
    )
    for name, title in TITLES.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter10", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
