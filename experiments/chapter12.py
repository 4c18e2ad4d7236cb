"""Train the models whose results chapter 12 predicts: ``python -m experiments.chapter12``.

This takes twenty minutes on one thread of a CPU. Finished runs are not repeated. The results are
written to the records.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from derived_attention import (
    PrimalAttention,
    ksvd_objectives,
    primal_scores,
)
from derived_attention.layer import KEY, QUERY, VALUE
from derived_book import (
    Config,
    Examples,
    SeriesClassifier,
    class_loss,
    evaluate,
    fit,
    seed_everything,
)
from derived_book.tasks.run import attention_cost, with_objective
from derived_book.training.recorded import FOLDER
from experiments.page_models import chapter
from experiments.protocol import POINT, command, experiment, load_series_for

page = chapter("12")
PARTS = (QUERY, KEY, VALUE)


def questions(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train the page's `TwoQuestions`; return the shares of the variance that it explains."""
    shares = page.train_once(arm, seed, steps, lr)
    asked, _ = page.pose(1)
    cost = attention_cost(page.TwoQuestions(page.ARMS[arm]), *asked)
    return {"both": (shares["name"] + shares["place"]) / 2} | shares | cost


# --- what the objective does ----------------------------------------------------------------------

WEIGHTS = {"η = 0": 0.0, "η = 0.1": 0.1, "η = 0.5": 0.5}
BATCH = 8


def objective(arm: str, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train a PrimalFormer on movements; return its accuracy, and what its heads have become.

    The numbers are those of `inside`, with those before the training as ``"untrained ..."``.
    """
    data = load_series_for(seed, "BasicMotions")
    seed_everything(seed)
    layer = partial(PrimalAttention, directions=4, landmarks=40, regularised=True)
    config = Config(dim=64, heads=8, attention=layer)
    model = SeriesClassifier(data.channels, data.classes, data.length, config)
    cost = attention_cost(model, data.train.x[:1])
    before = inside(model, data.test.x)
    train, epochs = Examples(data.train, BATCH), steps // math.ceil(len(data.train) / BATCH)
    fit(model, train, with_objective(class_loss, WEIGHTS[arm]), epochs=epochs, lr=lr, seed=seed)
    accuracy = evaluate(model, Examples(data.test, len(data.test)), class_loss)["accuracy"]
    after = inside(model, data.test.x)
    return {"accuracy": accuracy} | after | {f"untrained {k}": x for k, x in before.items()} | cost


def inside(model: SeriesClassifier, x: Tensor) -> dict[str, float]:
    """Return the size of the objective J in the heads of a model, and the numbers of `singular`.

    J is that of `ksvd_objectives`. ``"J"`` is the root mean square of its mean over heads, and
    ``"J of heads"`` that of the J of each head. The numbers of `singular` are means over layers.
    """
    calls: list[tuple[Any, Tensor]] = []
    hooks = [
        layer.attention.register_forward_pre_hook(lambda *call: calls.append((call[0], call[1][0])))
        for layer in model.layers
    ]
    with torch.no_grad(), ksvd_objectives() as found:
        model.eval()(x)
        for hook in hooks:
            hook.remove()
        heads = [[layer.project(part, h, slice(None)) for part in PARTS] for layer, h in calls]
        looks = [
            singular(*qkv, W_e=f.W_e, W_r=f.W_r, Lambda=f.Lambda.square())
            for qkv, (f, _) in zip(heads, calls, strict=True)
        ]
    J = torch.stack(found)  # (layers, B, H)
    means = {"J": J.mean(-1).square().mean().sqrt(), "J of heads": J.square().mean().sqrt()}
    means |= {key: torch.stack([look[key] for look in looks]).mean() for key in looks[0]}
    return {key: value.item() for key, value in means.items()}


def singular(
    q: Tensor, k: Tensor, v: Tensor, *, W_e: Tensor, W_r: Tensor, Lambda: Tensor
) -> dict[str, Tensor]:
    """Compare scores E, R (B, H, N, s) with the singular vectors of their kernel matrices K.

    Means over heads and series are ``overlap``, of the span of E's columns with that of the first s
    left singular vectors, and ``aligned``, |cos| between a column of E and K times that of R, which
    is 1 if J is stationary. ``reach`` is the median of λ σ₁ / N; if this is below 1, J has no
    stationary point but 0. ``scores`` is the root mean square of E.
    """
    q, k, v, W_e, W_r = (x.double() for x in (q, k, v, W_e, W_r))
    e, r = primal_scores(q, k, v, W_e=W_e, W_r=W_r)
    rows = torch.eye(W_e.shape[-2]).to(W_e)
    phi_q, phi_k = primal_scores(q, k, v, W_e=rows, W_r=rows)  # (B, H, N, n)
    K = phi_q @ phi_k.mT
    U, sigma, _ = torch.linalg.svd(K)
    N, s = e.shape[-2:]
    overlap = (torch.linalg.qr(e).Q.mT @ U[..., :s]).square().sum((-2, -1)) / s
    aligned = torch.cosine_similarity(e, K @ r, dim=-2).abs()  # (B, H, s)
    reach = (Lambda * sigma[..., :1] / N).median()
    scores = e.square().mean().sqrt()
    return {"scores": scores, "reach": reach, "overlap": overlap.mean(), "aligned": aligned.mean()}


CEILING = 1 / page.PAIRS  # for questions that a layer cannot answer
ONE_KIND = (1 + CEILING) / 2 + POINT  # limit of a layer that answers one kind of question
EXPERIMENTS = {
    "questions": experiment(
        "questions by name and by place",
        questions,
        list(page.ARMS),
        [
            ("both", "variance explained, %", 100, 1),
            ("name", "by name, %", 100, 1),
            ("place", "by place, %", 100, 1),
        ],
        steps=(100, 400, 800),
        below={"softmax": ONE_KIND, "Primal": ONE_KIND, "Primal, no data": CEILING + POINT},
    ),
    "objective": experiment(
        "PrimalFormers on movements, by the weight of the objective",
        objective,
        list(WEIGHTS),
        [
            ("accuracy", "right, %", 100, 1),
            ("J", "J", 1, 2),
            ("J of heads", "J of each head", 1, 2),
            ("scores", "size of scores", 1, 2),
            ("reach", "λ σ₁ / N", 1, 2),
            ("overlap", "overlap with singular vectors, %", 100, 1),
            ("aligned", "cosine of e and K r", 1, 2),
        ],
        steps=(100, 200),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter12", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
