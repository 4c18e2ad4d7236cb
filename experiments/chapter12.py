"""Train what chapter 12 predicts: ``python -m experiments.chapter12``.

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
from torch.nn.functional import mse_loss

from derived_attention import (
    MultiheadAttention,
    PositionOnlyAttention,
    PrimalAttention,
    identity_attention,
    ksvd_objectives,
    primal_scores,
    uniform_attention,
)
from derived_attention.layer import KEY, QUERY, VALUE
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
from derived_book.tasks.run import attention_cost, regularised
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding

PAIRS, NAMES, WIDTH = 16, 32, 4  # in a sequence; names in all; features of a value
Layer = Callable[..., nn.Module]  # of the width of a token and the number of heads
PARTS = (QUERY, KEY, VALUE)


# --- asked by name, asked by place ----------------------------------------------------------------


def pose(sets: int, device: str = "cpu") -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Draw (names, values, names asked for) and the answers by name and by place, (B, 16, 4)."""
    names = torch.rand(sets, NAMES, device=device).argsort(1)[:, :PAIRS]
    values = torch.randn(sets, PAIRS, WIDTH, device=device)
    order = torch.rand(sets, PAIRS, device=device).argsort(1)
    by_name = values.gather(1, order[..., None].expand_as(values))
    return (names, values, names.gather(1, order)), (by_name, values[:, :1].expand_as(values))


class TwoQuestions(nn.Module):
    """Questions read pairs, through layers side by side or one above another; a linear reader."""

    def __init__(self, layers: Sequence[Layer], stacked: bool = False, dim: int = 64) -> None:
        super().__init__()
        self.name, self.stacked = nn.Embedding(NAMES, dim), stacked
        self.value = nn.Linear(WIDTH, dim, bias=False)
        self.layers = nn.ModuleList([layer(dim, 8) for layer in layers])
        self.read = nn.Linear(dim, 2 * WIDTH)

    def forward(self, names: Tensor, values: Tensor, asked: Tensor) -> tuple[Tensor, ...]:
        """Return answers by name and by place, (B, 16, 4) each."""
        pairs, question = self.name(names) + self.value(values), self.name(asked)
        H = torch.zeros_like(question)
        for f in self.layers:
            x = question + H if self.stacked else question
            H = H + f(x, pairs, pairs, need_weights=False)[0]
        return self.read(H).chunk(2, -1)


crossed = partial(PrimalAttention, directions=8, cross=True)
primal = partial(crossed, landmarks=PAIRS)
LAYERS: dict[str, Sequence[Layer]] = {
    "softmax": [MultiheadAttention],
    "Primal": [primal],
    "Primal, no data": [partial(crossed, data_dependent=False)],
    "side by side": [MultiheadAttention, primal],
    "Primal above softmax": [MultiheadAttention, primal],
    "position only": [partial(PositionOnlyAttention, length=PAIRS)],
    "uniform": [partial(MultiheadAttention, attention=uniform_attention)],
    "alone": [partial(MultiheadAttention, attention=identity_attention)],
}


def questions(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a `TwoQuestions`; return the shares of the variance that it explains."""
    seed_everything(seed)
    model = TwoQuestions(LAYERS[arm], stacked="above" in arm).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * min((step + 1) / 30, 1 - step / steps)
        asked, answers = pose(32, device)
        loss = sum(map(mse_loss, model(*asked), answers), torch.tensor(0.0))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    asked, answers = pose(4096, device)
    with torch.no_grad():
        name, place = (
            float(1 - mse_loss(found, y) / y.var())
            for found, y in zip(model(*asked), answers, strict=True)
        )
    cost = attention_cost(model, *(z[:1] for z in asked))
    return {"both": (name + place) / 2, "name": name, "place": place} | cost


# --- what the objective does ----------------------------------------------------------------------

WEIGHTS = {"η = 0": 0.0, "η = 0.1": 0.1, "η = 0.5": 0.5}
BATCH = 8


def objective(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, float]:
    """Train a PrimalFormer on movements; return its accuracy, and what its heads have become.

    The numbers are those of `inside`, with those before the training as ``"untrained ..."``.
    """
    data = load_series("BasicMotions")
    seed_everything(seed)
    layer = partial(PrimalAttention, directions=4, landmarks=40, regularised=True)
    config = Config(dim=64, heads=8, attention=layer)
    model = SeriesClassifier(data.channels, data.classes, data.length, config)
    cost = attention_cost(model, torch.zeros(1, data.length, data.channels))
    before = inside(model.to(device), data.test.x.to(device))
    train, epochs = Examples(data.train, BATCH), steps * BATCH // len(data.train)
    fit(model, train, regularised(class_loss, WEIGHTS[arm]), epochs=epochs, lr=lr, seed=seed)
    accuracy = evaluate(model, Examples(data.test, len(data.test)), class_loss)["accuracy"]
    after = inside(model, data.test.x.to(device))
    return {"accuracy": accuracy} | after | {f"untrained {k}": x for k, x in before.items()} | cost


def inside(model: SeriesClassifier, x: Tensor) -> dict[str, float]:
    """Return what the objective sees in the heads of a model, and what singular vectors they hold.

    Of J, as in `ksvd_objectives`: the root of the mean square of its mean over heads (``"J"``), and
    of the J of each head (``"J of heads"``). The root of the mean square of E is ``"scores"``. The
    rest, from `singular`, are means over layers.
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

    Means over heads and series: the ``overlap`` of the span of E's columns with that of the first s
    left singular vectors; |cos| between a column of E and K times that of R, 1 where J is
    stationary (``aligned``). The median of λ σ₁ / N: J has no other stationary point than 0 where
    that is below 1 (``reach``). The root of the mean square of E (``scores``).
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


EXPERIMENTS = {
    "questions": deciding(
        "questions by name and by place",
        questions,
        list(LAYERS),
        [
            ("both", "variance explained, %", 100, 1),
            ("name", "by name, %", 100, 1),
            ("place", "by place, %", 100, 1),
        ],
        steps=(100, 400, 800),
        rates=(3e-3, 1e-2, 3e-2),
    ),
    "objective": deciding(
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
        steps=(50, 100, 200),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("chapter12", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
