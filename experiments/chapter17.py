"""Train every mechanism for the jobs of chapter 17: ``python -m experiments.chapter17``.

This takes eight to eleven hours on one thread of a CPU. A new entry of the registry adds an arm.
Finished runs are not repeated. The results are written to the records, from which chapter 17 reads
them. ``python -m experiments.chapter17 cost`` measures the time and memory of a training step at
the lengths of the tasks; run it on a machine that does nothing else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from derived_attention.common.files import write_atomically
from derived_attention.registry import MECHANISMS
from derived_book.training import measure
from derived_book.training.recorded import FOLDER, SCHEMA
from experiments.divergence import watch_losses
from experiments.page_models import chapter
from experiments.protocol import TUNING_SEEDS, command, experiment

page = chapter("17")
CONTROLS = [*page.POOR, "position only"]
LONG, LONG_STEPS = 1024, 64


def scores(arm: str, seed: int, steps: int, lr: float, task: str) -> dict[str, float]:
    """Train one arm on one task; return the share of right answers to new questions.

    For *look_up* the model then goes on, for 64 steps of one sequence, with 1024 tokens, unless the
    run chooses a learning rate.
    """
    draw, length, answers = page.TASKS[task]
    model, shares = page.learn(page.plug(arm, length), task, seed, steps, lr)
    found = dict(zip(("near", "far") if task == "places" else ("right",), shares, strict=True))
    if task == "places":
        found["both"] = sum(shares) / 2
    if task == "look_up" and seed not in TUNING_SEEDS:
        longer = carried(model, page.Frame(page.plug(arm, LONG), LONG, answers))
        with watch_losses():  # a second training, whose losses begin anew
            page.train(longer, partial(draw, 1, LONG), LONG_STEPS, lr)
        found["long"] = page.right(longer, partial(draw, 1, LONG))[0]
    return found | {"size": sum(p.numel() for p in model.layer.attention.parameters())}


def carried(model: nn.Module, longer: nn.Module) -> nn.Module:
    """Copy the parameters of `model` into a model for more tokens, if shapes agree; return it."""
    known, fresh = model.state_dict(), longer.state_dict()
    longer.load_state_dict(
        {key: known[key] if known[key].shape == x.shape else x for key, x in fresh.items()}
    )
    return longer


ARMS = [*MECHANISMS, *CONTROLS]
RIGHT = ("right", "right, %", 100, 1)
SIZE = ("size", "parameters of the attention", 1, 0)
EXPERIMENTS = {
    "look_up": experiment(
        "a value by its name, among 64 tokens and among 1024",
        scores,
        ARMS,
        [RIGHT, ("long", "right among 1024 tokens, %", 100, 1), SIZE],
        steps=(400, 800),
        seeds=5,
        below={"linformer": "softmax", "primal": "softmax"},
        task="look_up",
    ),
    "newest": experiment(
        "the newest of two values of a name",
        scores,
        ARMS,
        [RIGHT, SIZE],
        steps=(500, 1000),
        seeds=5,
        below={"linear": "delta"},
        task="newest",
    ),
    "count": experiment(
        "how often a name is written",
        scores,
        ["softmax", "mgk", "sink", "linear", "delta", *CONTROLS],
        [RIGHT, SIZE],
        steps=(2000, 4000),
        seeds=8,
        longer=["linear"],
        task="count",
    ),
    "places": experiment(
        "what stands 12 and 2 tokens to the left",
        scores,
        ARMS,
        [
            ("both", "right, both, %", 100, 1),
            ("far", "right, 12 to the left, %", 100, 1),
            ("near", "right, 2 to the left, %", 100, 1),
            SIZE,
        ],
        steps=(800, 1600),
        seeds=5,
        task="places",
    ),
}


# --- the cost of a step at these lengths ----------------------------------------------------------

BATCHES = {64: 16, LONG: 1}  # sequences of a step, by their length


def step(arm: str, length: int) -> Callable[[], None]:
    """Return a call of the attention layer of an arm, forward and backward, as in training."""
    torch.manual_seed(0)
    layer = page.Frame(page.plug(arm, length), length, page.VALUES).layer.attention
    x = torch.randn(BATCHES[length], length, page.DIM, requires_grad=True)

    def call() -> None:
        layer(x, x, x, need_weights=False)[0].sum().backward()

    return call


def cost(rounds: int = 15) -> dict[str, Any]:
    """Measure time and memory of all attention layers in the same rounds; return the record."""
    rows = []
    for length in BATCHES:
        calls = {arm: step(arm, length) for arm in ARMS}
        times = measure.compare(calls, repeats=rounds, device="cpu")
        for arm, time in times.items():
            size = measure.peak_bytes(calls[arm], device="cpu")
            own = {"seconds": time.median, "ratio": time.ratio, "bytes": size}
            rows.append({"arm": arm, "seed": 0, "length": length} | own)
    return {
        "schema": SCHEMA,
        "title": "Time and memory of an attention layer in a step of training",
        "device": "cpu",
        "machine": measure.machine(),
        "settings": {"heads": page.HEADS, "dim": page.DIM, "sequences": BATCHES, "rounds": rounds},
        "columns": [("ratio", "time, softmax = 1", 1, 2), ("bytes", "MiB", 2**-20, 1)],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments that the command line names, or all; or measure the costs."""
    if list(sys.argv[1:] if arguments is None else arguments) == ["cost"]:
        torch.set_num_threads(1)
        written = json.dumps(cost(), indent=1) + "\n"
        write_atomically(FOLDER / "chapter17_cost_cpu.json", written.encode())
        return 0
    return command("chapter17", EXPERIMENTS, FOLDER, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
