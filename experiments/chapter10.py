"""Train what chapter 10 predicts: ``python -m experiments.chapter10``.

A quarter of an hour on one thread of a CPU. The models are those of the chapter, which trains some
of these runs again. What has finished is not repeated. The results go to the records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from derived_attention import (
    MixtureAttention,
    MultiheadAttention,
    PositionOnlyAttention,
    identity_attention,
    responsibilities,
    uniform_attention,
)
from derived_book import seed_everything
from derived_book.tasks.run import attention_cost
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

N, S = 8, 16  # records; names of each kind, and values
Layer = Callable[[int], nn.Module]  # of the width of a token


def pose(sets: int, task: str, device: str = "cpu") -> tuple[tuple[Tensor, ...], Tensor]:
    """Draw ((names (B, 2, N), values (B, N), names asked for (B, 2, N)), answers)."""
    names = torch.rand(sets, 2, S, device=device).argsort(-1)[..., :N]
    values = torch.randint(S, (sets, N), device=device)
    places = torch.rand(sets, 2, N, device=device).argsort(-1)
    asked = names.gather(2, places)
    answers = values[:, None].expand(-1, 2, -1).gather(2, places)
    if task == "either":  # hide one of the names
        kind = torch.randint(2, (sets, 1, N), device=device)
        answers = answers.gather(1, kind)
        asked = asked.scatter(1, 1 - kind, S)  # S: no name
    return (names, values, asked), answers


class Lookup(nn.Module):
    """One layer: questions attend to records, and a linear map reads what the layer returns."""

    def __init__(self, attend: Layer, answers: int, dim: int = 64) -> None:
        super().__init__()
        self.names, self.questions = (
            nn.ModuleList(nn.Embedding(S + 1, dim) for _ in range(2)) for _ in range(2)
        )
        self.value, self.attend = nn.Embedding(S, dim), attend(dim)
        self.read = nn.Linear(dim, answers * S)

    def tokens(self, names: Tensor, values: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the questions and the records, (B, N, dim) each."""

        def both(tables: Any, z: Tensor) -> Tensor:
            return tables[0](z[:, 0]) + tables[1](z[:, 1])

        return both(self.questions, asked), both(self.names, names) + self.value(values)

    def forward(self, names: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits (B, S, answers, N)."""
        question, tokens = self.tokens(names, values, asked)
        h, _ = self.attend(question, tokens, tokens, need_weights=False)
        return self.read(h).unflatten(-1, (S, -1)).permute(0, 2, 3, 1)


def by_hand(model: Lookup, first: float = 12.1, last: float = 11.9) -> None:
    """Set the weights of one softmax head of width 64, so that it answers 79.5 % of "both".

    Names and values have places of their own. The record of the first name gets a weight above ½,
    and answers the first question; the second answer is the larger of the two values.
    """
    eye = torch.eye(64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for kind, score in enumerate((first, last)):
            place = eye[kind * S : (kind + 1) * S]
            model.names[kind].weight[:S] = place
            model.questions[kind].weight[:S] = 8 * score * place
        model.value.weight.copy_(eye[2 * S : 3 * S])
        model.attend.in_proj_weight.copy_(eye.repeat(3, 1))
        model.attend.out_proj.weight.copy_(eye)
        reader = model.read.weight.view(S, 2, 64)[..., 2 * S : 3 * S]
        reader[:, 0] = 80 * torch.eye(S)
        reader[:, 1] = 20 * torch.diag(1.3 ** torch.arange(-8.0, 8.0))


# --- what is trained ------------------------------------------------------------------------------

one_head = partial(MultiheadAttention, num_heads=1)
two_heads = partial(MultiheadAttention, num_heads=2)
two_keys = partial(MixtureAttention, num_heads=1, priors="learned")
one_gaussian = partial(two_keys, components=1)
narrow_and_wide = partial(two_keys, head_dim=8, variances=(8**0.5, 3 * 8**0.5))


def controls(width: int) -> dict[str, Layer]:
    """Return the layers whose weights do not depend on names."""
    plain = partial(one_head, head_dim=width)
    return {
        "uniform": partial(plain, attention=uniform_attention),
        "alone": partial(plain, attention=identity_attention),
        "position only": partial(PositionOnlyAttention, num_heads=1, head_dim=width, length=N),
    }


BY_HAND = "one head, D = 64, from hand-set weights"
LAYERS: dict[str, dict[str, Layer]] = {
    "both": {
        "one head, D = 32": partial(one_head, head_dim=32),
        "one head, D = 64": partial(one_head, head_dim=64),
        BY_HAND: partial(one_head, head_dim=64, bias=False),
        "two keys, D = 32": partial(two_keys, head_dim=32),
        "two heads, D = 32": partial(two_heads, head_dim=32),
    }
    | controls(64),
    "either": {
        "softmax, D = 4": partial(one_head, head_dim=4),
        "softmax, D = 8": partial(one_head, head_dim=8),
        "two softmax heads, D = 2": partial(two_heads, head_dim=2),
        "one Gaussian, D = 2": partial(one_gaussian, head_dim=2),
        "two keys, D = 2": partial(two_keys, head_dim=2),
        "two keys, D = 1": partial(two_keys, head_dim=1),
    }
    | controls(8),
    "widths": {
        "√D twice": partial(two_keys, head_dim=8),
        "√D and 3√D, as printed": partial(narrow_and_wide, mixture={"normalized": False}),
        "√D and 3√D, with the factor": narrow_and_wide,
    },
}


def look_up(
    arm: str, seed: int, steps: int, lr: float, device: str, experiment: str
) -> dict[str, float]:
    """Train a `Lookup`; return its accuracy on new questions, and how its weights are shared."""
    seed_everything(seed)
    task = "both" if experiment == "both" else "either"
    model = Lookup(LAYERS[experiment][arm], 1 + (task == "both"))
    if arm == BY_HAND:
        by_hand(model)
    optimiser = torch.optim.Adam(model.to(device).parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        asked, answers = pose(32, task, device)
        loss = cross_entropy(model(*asked), answers)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    asked, answers = pose(1000, task, device)
    with torch.no_grad():
        right = (model(*asked).argmax(1) == answers).float()
        found = {"accuracy": float(right.mean())} | shares(model.eval(), *asked)
    if task == "both":
        found |= {"first": float(right[:, 0].mean()), "second": float(right[:, 1].mean())}
        found |= fetched(model, asked, answers)
    return found | attention_cost(model, *(z[:1] for z in asked))


@torch.no_grad()
def fetched(model: Lookup, inputs: tuple[Tensor, ...], answers: Tensor) -> dict[str, float]:
    """Return what a model with two answers fetches.

    The mean weights of the two records, where they differ; the share of answers whose two likeliest
    values are the right values of both questions, where these differ; the cross-entropy.
    """
    names, _, asked = inputs
    question, tokens = model.tokens(*inputs)
    A = model.attend(question, tokens, tokens)[1]  # (B, N, N), mean over heads
    own = names[:, :, None] == asked[..., None]  # (B, 2, N, N): the record of each question
    two = ~(own[:, 0] & own[:, 1]).any(-1)  # (B, N): there are two records
    first, second = (float((A * own[:, i]).sum(-1)[two].mean()) for i in (0, 1))
    logits = model(*inputs)
    likeliest = logits.topk(2, 1).indices.sort(1)[0]  # (B, 2, answers, N)
    pair = answers.sort(1)[0][:, :, None].expand_as(likeliest)
    same = (likeliest == pair).all(1).float().transpose(1, 2)[answers[:, 0] != answers[:, 1]]
    return {
        "weight of first": first,
        "weight of second": second,
        "two likeliest": float(same.mean()),
        "loss": float(cross_entropy(logits, answers)),
    }


def shares(model: Lookup, names: Tensor, values: Tensor, asked: Tensor) -> dict[str, float]:
    """Return, for two keys, the share of the first in all weights, and its prior."""
    layer = model.attend
    if not isinstance(layer, MixtureAttention) or layer.components == 1:
        return {}
    question, tokens = model.tokens(names, values, asked)
    q, k, _ = layer.heads(question, tokens, tokens)
    A = layer(question, tokens, tokens, average_attn_weights=False)[1]
    gate = (A * responsibilities(q, k, **layer.keywords())[:, :, 0]).sum(-1)
    clear = ((gate - 0.5).abs() > 0.4).float().mean()
    prior = layer.keywords()["priors"][0, 0]
    return {"gate": float(gate.mean()), "clear": float(clear), "prior": float(prior)}


COLUMNS = [("accuracy", "right, %", 100, 1)]
BUDGETS = {"both": (150, 300, 600), "either": (300, 600, 1200), "widths": (100, 200, 400)}
TITLES = {
    "both": "two names, two values",
    "either": "one of two names",
    "widths": "one of two names, two keys of one width or of two",
}
EXPERIMENTS = {
    name: deciding(
        title,
        look_up,
        list(LAYERS[name]),
        COLUMNS,
        steps=BUDGETS[name],
        experiment=name,
    )
    for name, title in TITLES.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter10", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
