"""Train the book's small model: ``python -m experiments.small``.

Two and a half hours on one thread of a CPU. A run that has finished is not repeated. The
results go to the records, where the chapters read what each mechanism scores and
writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from derived_attention import (
    Conv1DAttention,
    DeltaAttention,
    PositionOnlyAttention,
    identity_attention,
    uniform_attention,
)
from derived_attention.registry import MECHANISMS
from derived_book import ByteLM, Config
from derived_book.runtime import seed_everything
from derived_book.tasks.language import run as language
from derived_book.tasks.language.data import load_text
from derived_book.tasks.language.loss import Windows, byte_loss, generate
from derived_book.tasks.language.sessions import Sessions, right_answers
from derived_book.tasks.run import attention_cost
from derived_book.training.fit import evaluate, fit
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, deciding, experiment

LENGTH, HEADS, WIDTH = 64, 4, 16  # of `small_model`
ARMS = {name: e.plug(LENGTH, HEADS, WIDTH) for name, e in MECHANISMS.items() if e.causal}
ARMS["conv1d"] = partial(Conv1DAttention, causal=True)  # its filters then look back only
CONTROLS = {
    "uniform": uniform_attention,
    "alone": identity_attention,
    "position only": partial(PositionOnlyAttention, length=LENGTH),
}
ARMS |= CONTROLS
UPDATES = {  # of a state: it writes as linear attention does, erases as the delta rule, or forgets
    "writes, forgets": partial(DeltaAttention, erase=False, gated=True),
    "erases": DeltaAttention,
    "erases, forgets": partial(DeltaAttention, gated=True),
}
ONES = ["softmax", "linear", "bn", "conv1d", "mgk", *UPDATES, *CONTROLS]  # that read sessions


def small_model(arm: str, seed: int, steps: int, lr: float, device: str) -> dict[str, Any]:
    """Train the small model on sessions; return its right answers, bits per byte and text."""
    seed_everything(seed)
    model = ByteLM(
        LENGTH, Config(heads=HEADS, dropout=0.0, attention=(ARMS | UPDATES)[arm]), taps=4
    )
    train = Sessions(LENGTH, batch_size=16, steps=steps)
    fit(model.to(device), train, byte_loss, epochs=1, lr=lr, seed=seed)
    bits = evaluate(model, Sessions(LENGTH), byte_loss)
    cost = attention_cost(model, torch.zeros(1, LENGTH, dtype=torch.int64))
    text = generate(model, "k=7 q=3 ", 56, temperature=0.5)
    return {"answers": right_answers(model)} | bits | cost | {"text": text}


def documentation(arm: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Train the model on Python's documentation; return its bits per byte of the test, and text."""
    model = language.small_model(ARMS[arm], text="python", seed=seed, **settings)
    bits = evaluate(model, Windows(load_text("python").test, LENGTH), byte_loss)
    cost = attention_cost(model, torch.zeros(1, LENGTH, dtype=torch.int64))
    return bits | cost | {"text": generate(model, "The function ", 160, temperature=0.5)}


BITS = ("bits", "bits per byte", 1, 3)
EXPERIMENTS = {
    "model": deciding(
        "the small model on sessions",
        small_model,
        ONES,
        [("answers", "right answers, %", 100, 1), BITS],
        steps=(600, 1200),
        seeds=3,
        below={"position only": "linear", "linear": "softmax"},
    ),
    "documentation_longer": experiment(
        "the small model on documentation, trained for longer",
        documentation,
        ["softmax", *CONTROLS],
        [BITS],
        steps=4000,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("small", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
