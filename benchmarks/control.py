"""Train Decision Transformers on offline control data: ``python -m benchmarks.control``.

About half an hour on one thread of a CPU. A run that has finished is not repeated: start it again
after a break, or one experiment at a time. The results go to `training/recorded/`, from
where chapter 12 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.experiments import command, experiment
from derived_attention import PrimalAttention, identity_attention, linear_attention
from derived_attention.tasks.control.data import QUALITIES
from derived_attention.tasks.control.run import train_control
from derived_attention.tasks.model import Config
from derived_attention.training.recorded import FOLDER

ETA = 0.05  # Table 2 of [Chen2023]
SIZES: dict[str, Any] = {"dim": 32, "heads": 2, "layers": 3, "hidden": 64, "dropout": 0.0}


def primal(directions: int, **own: Any) -> dict[str, Any]:
    """Put causal Primal-Attention in the last of three layers, with its objective in the loss."""
    last = partial(PrimalAttention, directions=directions, regularised=True, **own)
    return {"config": Config(**SIZES, last=last), "eta": ETA}


# A model without mixing sees the state and the time, and neither the past nor the return asked for.
ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"config": Config(**SIZES)},
    "softmax, no returns": {"config": Config(**SIZES), "conditioned": False},
    "Primal.+, s = 8": primal(8, data_dependent=False),
    "Primal.+, s = 16": primal(16, data_dependent=False),
    "Primal.+, s = 8, data-dependent": primal(8),
    "linear last": {"config": Config(**SIZES, last=linear_attention)},
    "control: no mixing": {"config": Config(**SIZES, attention=identity_attention)},
}


def control(arm: str, name: str, quality: str, **settings: Any) -> dict[str, float]:
    """Ask for the expert's return."""
    return train_control(name=name, quality=quality, **ARMS[arm], **settings)


ENVIRONMENTS = {"acrobot": "Acrobot-v1", "cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}
COLUMNS = [
    ("score", "score", 1, 1),
    ("return", "return", 1, 1),
    ("loss", "test loss", 1, 3),
    ("data", "mean score of the data", 1, 1),
]
HOW: dict[str, Any] = {"length": 5, "batch_size": 32, "lr": 5e-3, "episodes": 10}
STEPS = {"Acrobot-v1": 300, "CartPole-v1": 300, "Pendulum-v1": 1000}


def plan(name: str, quality: str, title: str, **own: Any) -> dict[str, Any]:
    """Describe the experiment of one data set."""
    settings = {"name": name, "quality": quality, **HOW, "steps": STEPS[name], **own}
    return experiment(title, control, list(ARMS), COLUMNS, **settings)


EXPERIMENTS: dict[str, dict[str, Any]] = {
    f"{short}_{quality.replace('-', '_')}": plan(name, quality, f"{name}, {quality}")
    for short, name in ENVIRONMENTS.items()
    for quality in QUALITIES
} | {
    f"{short}_hidden": plan(
        ENVIRONMENTS[short],
        "expert-mixture",
        f"{ENVIRONMENTS[short]}, expert-mixture, velocities hidden",
        velocities=False,
    )
    for short in ("acrobot", "cartpole")
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("control", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
