"""Train Decision Transformers on offline control data: ``python -m experiments.control``.

Six minutes on one thread of a CPU. A run that has finished is not repeated: start it again after a
break. The results go to the records, where chapter 12 reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from derived_attention import PrimalAttention, identity_attention
from derived_book.tasks.control.run import train_control
from derived_book.tasks.model import Config
from derived_book.training.recorded import FOLDER
from experiments.protocol import command, experiment

ETA = 0.05  # Table 2 of [Chen2023]
SIZES: dict[str, Any] = {"dim": 32, "heads": 2, "layers": 3, "hidden": 64, "dropout": 0.0}


def primal(**own: Any) -> dict[str, Any]:
    """Put causal Primal-Attention in the last of three layers, with its objective in the loss."""
    last = partial(PrimalAttention, directions=8, regularised=True, **own)
    return {"config": Config(**SIZES, last=last), "eta": ETA}


# A model without mixing sees the state and the time, and neither the past nor the return asked for.
ARMS: dict[str, dict[str, Any]] = {
    "softmax": {"config": Config(**SIZES)},
    "softmax, no returns": {"config": Config(**SIZES), "conditioned": False},
    "Primal.+, Listing 1": primal(data_dependent=False),
    "Primal.+, landmarks": primal(),
    "alone": {"config": Config(**SIZES, attention=identity_attention)},
}


def control(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Ask for the expert's return, in an environment whose velocities are hidden."""
    settings = {"quality": "expert-mixture", "velocities": False} | settings
    return train_control(name=name, **ARMS[arm], **settings)


COLUMNS = [
    ("score", "score", 1, 1),
    ("return", "return", 1, 1),
    ("loss", "test loss", 1, 3),
    ("data", "mean score of the data", 1, 1),
]
HOW: dict[str, Any] = {"length": 5, "steps": 300, "batch_size": 32, "lr": 5e-3, "episodes": 10}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    f"{short}_hidden": experiment(
        f"{name}, mixture of medium and expert, velocities hidden",
        control,
        list(ARMS),
        COLUMNS,
        seeds=8,
        name=name,
        **HOW,
    )
    for short, name in {"acrobot": "Acrobot-v1", "cartpole": "CartPole-v1"}.items()
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("control", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
