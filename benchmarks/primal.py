"""Train Primal-Attention beside softmax and linear attention: ``python -m benchmarks.primal``.

Half an hour on one thread of a CPU. A run that has finished is not repeated: start it again after a
break, or one experiment at a time. The results go to `training/recorded/`, from where
chapter 12 reads them.

Heads of width D have s = D / 2 directions unless an arm says otherwise, and f(X) has 10 s rows, or
as many as the sequence. *PrimalFormer* has Primal-Attention in all layers, *Primal.+* in the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments import command, experiment
from derived_attention import (
    MultiheadAttention,
    PrimalAttention,
    identity_attention,
    ksvd_objectives,
    linear_attention,
    primal_attention,
    primal_scores,
    uniform_attention,
)
from derived_attention.runtime import seed_everything
from derived_attention.tasks.images.run import train_images
from derived_attention.tasks.language.run import train_language, train_topics
from derived_attention.tasks.listops.run import train_listops
from derived_attention.tasks.model import Config
from derived_attention.tasks.recall.run import train_recall
from derived_attention.tasks.run import attention_cost, regularised
from derived_attention.tasks.series.data import load_series
from derived_attention.tasks.series.model import SeriesClassifier
from derived_attention.tasks.series.run import train_series
from derived_attention.tasks.supervised import Examples, class_loss
from derived_attention.training.fit import evaluate, fit
from derived_attention.training.recorded import FOLDER

ETA = 0.1


# What layers have, what the last has where it differs, and the weight of the objective.
Arm = tuple[Callable[..., Any], Callable[..., Any] | None, float]


def primal(width: int, length: int, s: int | None = None, **own: Any) -> Callable[..., Any]:
    """Return a layer with s directions, for heads of that width and sequences of that length."""
    s = width // 2 if s is None else s
    if own.get("data_dependent", True):
        own = {"landmarks": min(10 * s, length)} | own
    return partial(PrimalAttention, **{"directions": s, "regularised": True} | own)


def arms(width: int, length: int, **own: Any) -> dict[str, Arm]:
    """All arms, for heads of that width and sequences of that length."""
    softmax = MultiheadAttention
    dependent = primal(width, length, **own)
    independent = primal(width, length, data_dependent=False)
    return {
        "softmax": (softmax, None, 0.0),
        "linear": (partial(softmax, attention=linear_attention), None, 0.0),
        "PrimalFormer": (dependent, None, ETA),
        "PrimalFormer, η = 0": (partial(dependent, regularised=False), None, 0.0),
        "PrimalFormer, data-independent": (independent, None, ETA),
        "Primal.+": (softmax, dependent, ETA),
        "Primal.+, data-independent": (softmax, independent, ETA),
        "control: uniform weights": (partial(softmax, attention=uniform_attention), None, 0.0),
        "control: no mixing": (partial(softmax, attention=identity_attention), None, 0.0),
    }


ARMS = list(arms(8, 1))
FEW = [name for name in ARMS if name not in ("linear", "PrimalFormer, data-independent")]
LENGTHS = {"JapaneseVowels": 26, "BasicMotions": 100}


def series(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Classify time series, as chapter 8 does."""
    attention, last, eta = arms(8, LENGTHS[name])[arm]
    config = Config(dim=64, heads=8, attention=attention, last=last)
    return train_series(config, name, eta=eta, **settings)


def recall(arm: str, pairs: int, **settings: Any) -> dict[str, float]:
    """Recall values by their keys; f(X) has all rows, so that no pair is left out."""
    attention, last, eta = arms(8, 2 * pairs, landmarks=2 * pairs)[arm]
    config = Config(dim=64, heads=8, dropout=0.0, attention=attention, last=last)
    return train_recall(config, pairs=pairs, eta=eta, **settings)


def language(arm: str, length: int, **settings: Any) -> dict[str, float]:
    """Model a text."""
    attention, last, eta = arms(16, length)[arm]
    config = Config(dim=64, heads=4, dropout=0.0, attention=attention, last=last)
    return train_language(config, length=length, eta=eta, **settings)


def listops(arm: str, **settings: Any) -> dict[str, float]:
    """Evaluate lists, as chapter 8 does."""
    attention, last, eta = arms(16, 32)[arm]
    config = Config(dim=32, heads=2, hidden=64, attention=attention, last=last)
    return train_listops(config, eta=eta, **settings)


def images(arm: str, **settings: Any) -> dict[str, float]:
    """Classify images by a class token, as chapter 8 does."""
    attention, last, eta = arms(8, 65)[arm]
    config = Config(dim=32, heads=4, hidden=64, attention=attention, last=last)
    return train_images(config, patch=1, class_token=True, eta=eta, **settings)


def topics(arm: str, length: int, **settings: Any) -> dict[str, float]:
    """Classify text by its bytes, as chapter 8 does."""
    attention, last, eta = arms(16, length)[arm]
    config = Config(dim=32, heads=2, hidden=64, attention=attention, last=last)
    return train_topics(config, length=length, eta=eta, **settings)


# --- Table 1: η and s -----------------------------------------------------------------------------

DIRECTIONS, ETAS = (4, 20, 30, 40), (0, 0.1, 0.2, 0.5)
CELLS = {f"s = {s}, η = {eta:g}": (s, eta) for s in DIRECTIONS for eta in ETAS}


def cell(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Train a PrimalFormer with the s and η of a cell of Table 1."""
    s, eta = CELLS[arm]
    config = Config(dim=64, heads=8, attention=primal(8, LENGTHS[name], s, regularised=eta > 0))
    return train_series(config, name, eta=eta, **settings)


# --- What the objective does ----------------------------------------------------------------------

WEIGHTS = {"untrained": None} | {f"η = {eta:g}": eta for eta in (0, 0.1, 0.5, 10)}


def objective(
    arm: str, name: str, seed: int, epochs: int, batch_size: int, lr: float, device: str
) -> dict[str, float]:
    """Train a PrimalFormer, and look for singular vectors in its heads, on the test series.

    Of J, with means over the N tokens: its mean, signed and absolute. The size of scores: the root
    of the mean square of E. And what `singular` finds.
    """
    seen: list[tuple[Any, ...]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **how: Any) -> Tensor:
        H = primal_attention(q, k, v, *args, **how)
        if not torch.is_grad_enabled() and "kept" in how:
            seen.append((q, k, v, *how["kept"][-1][:2], how["W_e"].shape[-2]))
        return H

    data = load_series(name)
    seed_everything(seed)
    config = Config(dim=64, heads=8, attention=primal(8, data.length, attention=spy))
    model = SeriesClassifier(data.channels, data.classes, data.length, config)
    cost = attention_cost(model, torch.zeros(1, data.length, data.channels))
    if (eta := WEIGHTS[arm]) is not None:
        train = Examples(data.train, batch_size)
        how: dict[str, Any] = {"epochs": epochs, "lr": lr, "seed": seed}
        fit(model.to(device), train, regularised(class_loss, eta), **how)
    test = Examples(data.test, len(data.test))
    with ksvd_objectives() as found:
        accuracy = evaluate(model.to(device), test, class_loss)["accuracy"]
    J, scores = torch.stack(found), torch.stack([look[3] for look in seen])
    numbers = {"J": J.mean(), "absolute": J.abs().mean(), "scores": scores.square().mean().sqrt()}
    Lambdas = [layer.attention.log_Lambda.detach().exp() for layer in model.layers]
    looks = [singular(*look, L) for look, L in zip(seen, Lambdas, strict=True)]
    numbers |= {key: torch.stack([look[key] for look in looks]).mean() for key in looks[0]}
    return {"accuracy": accuracy} | {key: x.item() for key, x in numbers.items()} | cost


def singular(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, r: Tensor, n: int, Lambda: Tensor
) -> dict[str, Tensor]:
    """Compare scores e, r (B, H, N, s) with the singular vectors of their kernel matrices K.

    Means over heads and series: the ``overlap`` of the span of E's columns with that of the first s
    left singular vectors; |cos| between two columns of E, 0 for singular vectors (``parallel``);
    |cos| between a column of E and K times that of R, 1 where J is stationary (``aligned``). And
    the median of λ σ₁ / N: J has no other stationary point than 0 if that is below 1 (``reach``).
    """
    identity = torch.eye(n, dtype=torch.float64, device=q.device)
    q, k, v, e, r = (x.double() for x in (q, k, v, e, r))
    phi_q, phi_k = primal_scores(q, k, v, W_e=identity, W_r=identity)  # (B, H, N, n)
    K = phi_q @ phi_k.mT  # (B, H, N, N)
    U, sigma, _ = torch.linalg.svd(K)
    N, s = e.shape[-2:]
    overlap = (torch.linalg.qr(e).Q.mT @ U[..., :s]).square().sum((-2, -1)) / s
    unit = nn.functional.normalize(e, dim=-2)
    parallel = (unit.mT @ unit).abs().triu(1).sum((-2, -1)) * 2 / (s * (s - 1))
    aligned = torch.cosine_similarity(e, K @ r, dim=-2).abs()  # (B, H, s)
    means = {"overlap": overlap, "parallel": parallel, "aligned": aligned}
    reach = (Lambda * sigma[..., :1] / N).median()
    return {key: x.mean() for key, x in means.items()} | {"reach": reach}


ACCURACY = (("accuracy", "accuracy in %", 100, 1), ("best", "best test epoch", 100, 1))
VOWELS: dict[str, Any] = dict(name="JapaneseVowels", epochs=20, batch_size=32, lr=2e-3)
MOTIONS: dict[str, Any] = dict(name="BasicMotions", epochs=20, batch_size=8, lr=2e-3)
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "japanese_vowels": experiment("JapaneseVowels", series, ARMS, ACCURACY, **VOWELS),
    "basic_motions": experiment("BasicMotions", series, ARMS, ACCURACY, **MOTIONS),
    "recall": experiment(
        "Associative recall, f(X) = X", recall, ARMS, ACCURACY[:1], pairs=48, steps=300
    ),
    "language": experiment(
        "Python's documentation",
        language,
        ARMS,
        [("bits", "bits per byte", 1, 3)],
        length=32,
        steps=500,
    ),
    "listops": experiment("ListOps", listops, FEW, ACCURACY, epochs=6),
    "digits": experiment("Digits of 64 pixels", images, FEW, ACCURACY, name="digits", epochs=10),
    "topics": experiment("Topics of Python", topics, FEW, ACCURACY, length=64, epochs=4),
    "objective": experiment(
        "Singular vectors in heads of PrimalFormers on BasicMotions, s = 4 of D = 8",
        objective,
        list(WEIGHTS),
        [
            ("accuracy", "accuracy in %", 100, 1),
            ("J", "J", 1, 2),
            ("scores", "size of scores", 1, 2),
            ("reach", "Λ σ₁ / N", 1, 2),
            ("overlap", "overlap with singular vectors in %", 100, 1),
            ("parallel", "cosine of two columns of E", 1, 2),
            ("aligned", "cosine of E and K R", 1, 2),
        ],
        **MOTIONS,
    ),
    "ablation": experiment(
        "PrimalFormers on JapaneseVowels, of more directions than D = 8, and of fewer",
        cell,
        list(CELLS),
        ACCURACY,
        **VOWELS | {"epochs": 10},
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("primal", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
