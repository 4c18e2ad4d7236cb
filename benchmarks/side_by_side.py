"""Train every mechanism in one frame, task by task: ``python -m benchmarks.side_by_side``.

Half an hour on one thread of a CPU. A run that has finished is not repeated: start it again after
a break, or one experiment at a time. The results go to `training/recorded/`, from where
chapter 17 reads them. What ``python -m benchmarks`` has measured goes there with ``cost`` alone.
`benchmarks.small` has trained the causal ones on a text.

All have the same model: its width, its four heads, its steps. What they take of their own is what
the registry says, for the length of the task. A new entry of the registry is a new row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import command, experiment
from derived_attention import identity_attention, uniform_attention
from derived_attention.attention.registry import MECHANISMS
from derived_attention.page.tables import MODES, load, of_each_kind
from derived_attention.runtime import seed_everything, write_atomically
from derived_attention.tasks.images.data import load_images
from derived_attention.tasks.images.model import VisionTransformer
from derived_attention.tasks.listops.run import train_listops
from derived_attention.tasks.model import Config
from derived_attention.tasks.recall.run import train_recall
from derived_attention.tasks.run import attention_cost
from derived_attention.tasks.series.run import train_series
from derived_attention.tasks.supervised import Examples, class_loss
from derived_attention.training import measure
from derived_attention.training.fit import evaluate, fit
from derived_attention.training.recorded import FOLDER, SCHEMA

HEADS = 4
CONTROLS: dict[str, Callable[..., Any]] = {
    "uniform": uniform_attention,
    "alone": identity_attention,
}
ARMS = [*MECHANISMS, *CONTROLS]


def frame(arm: str, length: int, dim: int, **own: Any) -> Config:
    """Return the model that all arms share, with that attention for sequences of that length."""
    plug = CONTROLS[arm] if arm in CONTROLS else MECHANISMS[arm].plug(length, HEADS, dim // HEADS)
    return Config(dim=dim, heads=HEADS, hidden=2 * dim, attention=plug, **own)


def recall(arm: str, pairs: int, **settings: Any) -> dict[str, float]:
    """Recall values by their keys, as chapter 12 does: as many questions as pairs."""
    return train_recall(frame(arm, 2 * pairs, 64, dropout=0.0), pairs=pairs, **settings)


def series(arm: str, name: str, length: int, **settings: Any) -> dict[str, float]:
    """Classify time series, as chapter 8 does."""
    return train_series(frame(arm, length, 64), name, **settings)


def listops(arm: str, **settings: Any) -> dict[str, float]:
    """Evaluate lists, as chapter 8 does."""
    return train_listops(frame(arm, 32, 32), **settings)


def images(arm: str, name: str, patch: int, seed: int, epochs: int, device: str) -> dict[str, Any]:
    """Classify images, and look at the maps of 64 test images in the trained model.

    Means over the images and both layers: the distance of two heads, as
    `head_distance` says, and the effective rank of a map. What has no
    weights has neither.
    """
    data = load_images(name, patch)
    seed_everything(seed)
    model = VisionTransformer(data.grid, data.channels, data.classes, frame(arm, data.length, 32))
    train = Examples(data.train, 32)
    fit(model.to(device), train, class_loss, epochs=epochs, lr=2e-3, seed=seed)
    score = evaluate(model, Examples(data.test), class_loss)["accuracy"]
    cost = attention_cost(model.cpu(), data.test.x[:1])
    return {"accuracy": score} | cost | redundancy(arm, model, data.test.x[:64])


def redundancy(arm: str, model: VisionTransformer, x: Any) -> dict[str, float | None]:
    """Return how far the heads of a model are apart, and the rank of their maps; None without."""
    if arm in MECHANISMS and not MECHANISMS[arm].weights:
        return {"distance": None, "rank": None}
    maps = model.attention_maps(x)  # of each layer (B, H, T, T)
    looks = {"distance": measure.head_distance, "rank": measure.effective_rank}
    means = {key: [look(A).mean().item() for A in maps] for key, look in looks.items()}
    return {key: sum(x) / len(x) for key, x in means.items()}


ACCURACY = [("accuracy", "accuracy in %", 100, 1)]
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "recall": experiment(
        "Associative recall of 16 pairs", recall, ARMS, ACCURACY, pairs=16, steps=300
    ),
    "images": experiment(
        "Digits of 64 pixels", images, ARMS, ACCURACY, name="digits", patch=1, epochs=6
    ),
    "series": experiment(
        "JapaneseVowels",
        series,
        ARMS,
        ACCURACY,
        name="JapaneseVowels",
        length=26,
        epochs=8,
        batch_size=32,
        lr=2e-3,
    ),
    "listops": experiment("ListOps", listops, ARMS, ACCURACY, epochs=4),
}


# --- cost: what ``python -m benchmarks`` has measured ---------------------------------------------


DIM = 64  # of heads


def cost(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Condense one machine's results to what chapter 17 reads: a row for each case.

    ``seconds`` and ``bytes`` have a list for each mode, in the order of ``lengths`` and of
    ``byte_lengths``.
    """
    first = next(iter(files.values()))
    rows = []
    for name, data in files.items():
        if name.removesuffix("_causal") not in MECHANISMS:  # what they are held against
            continue
        dtype = data["settings"]["dtypes"][0]
        times = [r for r in data["times"] if (r["dtype"], r.get("dim", DIM)) == (dtype, DIM)]
        sizes = {row["mode"]: row for row in data["memory"] if row["form"] == "fast"}
        rows.append(
            {
                "arm": name.removesuffix("_causal"),
                "causal": name.endswith("_causal"),
                "lengths": sorted({row["length"] for row in times}),
                "seconds": {
                    mode: [row["seconds"]["median"] for row in times if row["mode"] == mode]
                    for mode in MODES
                },
                "byte_lengths": sizes[MODES[0]]["lengths"],
                "bytes": {m: sizes[m]["bytes"] for m in MODES},
            }
        )
    head = {key: first[key] for key in ("device", "machine", "settings")}
    columns = [("seconds", "seconds, by mode and length", 1, 3)]
    return {"schema": SCHEMA, "title": "Time and memory", "columns": columns, "rows": rows} | head


def write_costs(folder: Path = FOLDER) -> None:
    """Write `cost` of one CPU and of one GPU, where there are results."""
    for files in of_each_kind(load()):
        data = cost(files)
        written = json.dumps(data, indent=1) + "\n"
        kind = "cuda" if data["device"] != "cpu" else "cpu"
        write_atomically(folder / f"side_by_side_cost_{kind}.json", written.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the costs where that is what is asked for; else run, write and print experiments."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["cost"]:
        write_costs()
        return 0
    return command("side_by_side", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
