"""Train coarse heads in many attentions: ``python -m benchmarks.multiresolution``.

About half an hour on one thread of a CPU. A run that has finished is not repeated: start it again
after a break, or one experiment at a time. The results go to `training/recorded/`, from
where chapter 8 reads them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.experiments import command, experiment
from derived_attention import (
    FMMAttention,
    LinformerAttention,
    LunaAttention,
    MRAAttention,
    MultiheadAttention,
    PerformerAttention,
    identity_attention,
    linear_attention,
    multiresolution_layer,
    uniform_attention,
)
from derived_attention.tasks.images.run import train_images
from derived_attention.tasks.language.run import train_topics
from derived_attention.tasks.listops.run import train_listops
from derived_attention.tasks.model import Config
from derived_attention.tasks.series.run import train_series
from derived_attention.tasks.tables.run import train_table
from derived_attention.training.recorded import FOLDER

SCALES = (1, 1, 2, 2, 4, 4, 8, 8)  # Table 1, Section 3.1
BLOCK = 8  # of MRA-2, which has 32 in [MrsFormer]: a series of 26 steps would be one block


def bases(length: int) -> dict[str, Callable[..., Any]]:
    """All attentions for sequences of that length, by name: a quarter of what there is to keep."""
    quarter = max(1, length // 4)
    kept = max(1, math.ceil(length / BLOCK) // 4)
    return {
        "softmax": MultiheadAttention,
        "linear": partial(MultiheadAttention, attention=linear_attention),
        "Linformer": partial(LinformerAttention, length=length, kept=quarter),
        "Performer": PerformerAttention,
        "FMM": partial(FMMAttention, window=5),
        "Luna": partial(LunaAttention, length=quarter),
        "MRA-2": partial(MRAAttention, block=BLOCK, kept=kept),
        "MRA-2-s": partial(MRAAttention, block=BLOCK, kept=kept, sparse=True),
    }


def with_scales(base: Callable[..., Any], scales: Sequence[int], **own: Any) -> Callable[..., Any]:
    """Give an attention scales: "Mrs" + its name."""
    layer, given = (base.func, base.keywords) if isinstance(base, partial) else (base, {})
    return partial(multiresolution_layer(layer), **given, scales=scales, **own)


def arms(length: int, scales: Sequence[int], **own: Any) -> dict[str, Callable[..., Any]]:
    """Each attention without and with scales, and the controls."""
    found: dict[str, Callable[..., Any]] = {}
    for name, base in bases(length).items():
        found[name] = base
        if name != "MRA-2-s":
            found[f"Mrs + {name}"] = with_scales(base, scales, **own)
    return found | {
        "control: uniform weights": partial(MultiheadAttention, attention=uniform_attention),
        "control: no mixing": partial(MultiheadAttention, attention=identity_attention),
    }


ARMS = list(arms(1, (1,)))
CONTROLS = ARMS[-2:]
LENGTHS = {"JapaneseVowels": 26, "BasicMotions": 100}


def series(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Classify time series."""
    attention = arms(LENGTHS[name], SCALES)[arm]
    return train_series(Config(dim=64, heads=8, attention=attention), name, **settings)


def listops(arm: str, **settings: Any) -> dict[str, float]:
    """Evaluate lists, with the heads and scales of Section 3.2."""
    config = Config(dim=32, heads=2, hidden=64, attention=arms(32, (1, 2))[arm])
    return train_listops(config, **settings)


def topics(arm: str, length: int, **settings: Any) -> dict[str, float]:
    """Classify text by its bytes, with the heads and scales of Section 3.2."""
    config = Config(dim=32, heads=2, hidden=64, attention=arms(length, (1, 2))[arm])
    return train_topics(config, length=length, **settings)


def images(arm: str, **settings: Any) -> dict[str, float]:
    """Classify images by a class token, with the heads and scales of Section 3.3."""
    all_coarse = with_scales(MultiheadAttention, (4, 4, 4, 4), class_token=True)
    found = arms(64, (1, 2, 2, 4), class_token=True) | {COARSE: all_coarse}
    config = Config(dim=32, heads=4, hidden=64, attention=found[arm])
    return train_images(config, patch=1, class_token=True, **settings)


def table(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Read rows of a table; the first token is the class token."""
    all_coarse = with_scales(MultiheadAttention, (8,) * 8, class_token=True)
    found = arms(15, SCALES, class_token=True) | {COARSE: all_coarse}
    config = Config(dim=32, heads=8, hidden=64, attention=found[arm])
    return train_table(config, name, **settings)


COARSE = "Mrs + softmax, coarse heads only"
FEW = ["softmax", "Mrs + softmax", COARSE, *CONTROLS]
ACCURACY = (("accuracy", "accuracy in %", 100, 1), ("best", "best test epoch", 100, 1))
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "california_housing": experiment(
        "California Housing",
        table,
        FEW,
        [("rmse", "test RMSE", 1, 3)],
        name="california_housing",
        epochs=10,
    ),
    "adult": experiment(
        "Adult", table, FEW, [("accuracy", "test accuracy in %", 100, 2)], name="adult", epochs=3
    ),
    "basic_motions": experiment(
        "BasicMotions",
        series,
        ARMS,
        ACCURACY,
        name="BasicMotions",
        epochs=20,
        batch_size=8,
        lr=2e-3,
    ),
    "japanese_vowels": experiment(
        "JapaneseVowels",
        series,
        ARMS,
        ACCURACY,
        name="JapaneseVowels",
        epochs=20,
        batch_size=32,
        lr=2e-3,
    ),
    "digits": experiment(
        "Digits of 64 pixels",
        images,
        [*FEW[:3], "MRA-2-s", *CONTROLS],
        ACCURACY,
        name="digits",
        epochs=20,
    ),
    "listops": experiment("ListOps", listops, ARMS, ACCURACY, epochs=6),
    "topics": experiment(
        "Topics of Python",
        topics,
        [*FEW[:2], "MRA-2", "MRA-2-s", *CONTROLS],
        ACCURACY,
        length=64,
        epochs=4,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    return command("multiresolution", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
