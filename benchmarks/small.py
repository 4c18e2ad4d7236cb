"""Train the book's small model with every mechanism: ``python -m benchmarks.small``.

About half an hour on one thread of a CPU. A run that has finished is not repeated. The results go
to `training/recorded/`, from where the chapters read what each mechanism scores and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.experiments import command, experiment
from derived_attention import (
    Conv1DAttention,
    PositionOnlyAttention,
    identity_attention,
    uniform_attention,
)
from derived_attention.attention.registry import MECHANISMS
from derived_attention.tasks.language import run as language
from derived_attention.tasks.language.data import load_text
from derived_attention.tasks.language.loss import Windows, byte_loss, generate
from derived_attention.tasks.run import attention_cost
from derived_attention.training.fit import evaluate
from derived_attention.training.recorded import FOLDER

LENGTH, HEADS, WIDTH = 64, 4, 16  # of `small_model`
PROMPT = "The function "
ARMS = {name: e.plug(LENGTH, HEADS, WIDTH) for name, e in MECHANISMS.items() if e.causal}
ARMS["conv1d"] = partial(Conv1DAttention, causal=True)  # its filters then look back only
CONTROLS = {
    "uniform": uniform_attention,
    "alone": identity_attention,
    "position only": partial(PositionOnlyAttention, length=LENGTH),
}
ARMS |= CONTROLS


def small_model(arm: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Train the small model; return its bits per byte of the test part, and what it writes."""
    model = language.small_model(ARMS[arm], seed=seed, **settings)
    bits = evaluate(model, Windows(load_text("python").test, LENGTH), byte_loss)
    cost = attention_cost(model, torch.zeros(1, LENGTH, dtype=torch.int64))
    return bits | cost | {"text": generate(model, PROMPT, 160, temperature=0.5)}


COLUMNS = [("bits", "bits per byte", 1, 3)]
EXPERIMENTS = {
    "model": experiment("the small model", small_model, list(ARMS), COLUMNS, steps=600),
    "model_longer": experiment(
        "the small model, trained for longer",
        small_model,
        ["softmax", *CONTROLS],
        COLUMNS,
        steps=4000,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all."""
    return command("small", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
