"""Train one model with ten kinds of attention: ``python -m experiments.chapterL``.

The size `laptop`, the default, takes about thirteen hours on one thread of a CPU; the size `gpu`
needs a GPU. An interrupted run resumes at its last checkpoint; there is one each minute. The
weights of all finished runs stay in ``cache_dir("runs")``, so that a change of what is measured
trains nothing again: some 300 MB. One seed chooses each learning rate, at the last number of steps,
on the validation documents.

``python -m experiments.chapterL weights`` trains the model of `load_language_model`, in half an
hour, and ``python -m experiments.chapterL cost`` measures training and decoding: on a machine that
does nothing else.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from derived_attention.common.files import cache_dir, write_atomically
from derived_book.runtime import digest, seed_everything
from derived_book.tasks.language.documents import load_documents
from derived_book.tasks.language.loss import Windows, byte_loss, generate
from derived_book.tasks.language.measures import KINDS, document_bits, n_grams
from derived_book.tasks.language.run import WEIGHTS
from derived_book.training import measure, run_key
from derived_book.training.fit import Trainer, chosen_precision
from derived_book.training.recorded import FOLDER, SCHEMA
from experiments.page_models import chapter
from experiments.protocol import command, experiment

page = chapter("L")
MINUTE, PARTS = 60.0, 50  # between two checkpoints in seconds; points of a curve
CONTEXTS = 1024, 4096, 16384  # bytes, at which decoding is measured


def scores(arm: str, seed: int, steps: int, lr: float, size: str, **how: Any) -> dict[str, Any]:
    """Train one arm; return its bits per byte of held-out documents, a curve and a text.

    ``"documents"`` has for each test document its bits and bytes of each kind, see `document_bits`.
    """
    data = load_documents(how["data"])
    seed_everything(seed)
    model = page.build(arm, size).to(how["device"])
    windows = Windows(data.text, model.length, how["batch"], steps=1)
    path = weights_path(arm, seed, steps, lr, size, data.digest, **how)
    trunk = weights_path(arm, seed, 0, lr, size, data.digest, **how)
    losses = train_on(model, windows, seed, steps, lr, path, trunk)
    known = np.unique(n_grams(data.text.numpy()))
    tested = document_bits(model, data.test, known, model.length)
    other = document_bits(model, data.validation, known, model.length)
    bits, counts = np.concatenate([other.sum(0)[:1], tested.sum(0)]).T
    parts = np.array_split(np.array(losses) / np.log(2), min(PARTS, steps))
    return {
        **dict(zip(("validation", *KINDS), (bits / counts).tolist(), strict=True)),
        "documents": tested.round(2).tolist(),
        "curve": [float(part.mean()) for part in parts],
        "text": generate(model, "def read(", 400, temperature=0.7),
        "digest": data.digest,
    }


def weights_path(
    arm: str, seed: int, steps: int, lr: float, size: str, text: str, **how: Any
) -> Path:
    """Return where the weights of a run are; `text` is the digest of the documents."""
    name = digest(code_of_training(size), text, arm, seed, steps, lr, size, sorted(how.items()))
    return cache_dir("runs") / f"{name}.safetensors"


def code_of_training(size: str) -> list[Any]:
    """Return what determines the weights of a run, apart from its configuration."""
    return [*page.SIZES[size].values(), torch.__version__, CODE]


def find_modules() -> set[str]:
    """Return the modules of the package that the models of all arms and their training are from."""
    found = {Windows.__module__, Trainer.__module__, seed_everything.__module__}
    for arm in page.ARMS:
        with torch.device("meta"):
            layers = list(page.build(arm, "laptop").modules())
        values = (getattr(x, "func", x) for layer in layers for x in vars(layer).values())
        found |= {inspect.unwrap(x).__module__ for x in values if isinstance(x, FunctionType)}
        found |= {type(layer).__module__ for layer in layers}
    return found & run_key.PACKAGE.texts.keys()


def read_code() -> list[Any]:
    """Return the code of the models, of their training, and of what both need of the package."""
    functions = page.build, page.rotated, page.train, page.factor, train_on
    own = (ast.dump(ast.parse(textwrap.dedent(inspect.getsource(f)))) for f in functions)
    return [run_key.PACKAGE.digest(find_modules()), *own]


def train_on(
    model: torch.nn.Module,
    batches: Windows,
    seed: int,
    steps: int,
    lr: float,
    path: Path,
    trunk: Path,
) -> list[float]:
    """Train as the page does, and return all losses; go on from the checkpoint at `path`.

    At the end, the file has the weights and the losses only. At `trunk` is a checkpoint of before
    the learning rate falls, from which longer runs go on, too: up to there their steps are equal.
    """
    device = next(model.parameters()).device
    trainer = Trainer(model, byte_loss, chosen_precision(None, model, device), device)
    common = shared_steps(steps)
    losses, saved = resume(trainer, path, steps) or resume(trainer, trunk, common), time.monotonic()
    if len(losses) == steps:
        return losses
    for loss in page.train(trainer, batches, seed, range(len(losses), steps), lr):
        losses.append(loss)
        if len(losses) == common and not trunk.exists():
            store(trainer, losses, trunk)
        if time.monotonic() - saved > MINUTE:
            store(trainer, losses, path)
            saved = time.monotonic()
    trainer.optimiser.state.clear()
    store(trainer, losses, path)
    return losses


def shared_steps(steps: int) -> int:
    """Return how many first steps a run has in common with one of twice as many steps."""
    return sum(page.factor(i, steps) == page.factor(i, 2 * steps) for i in range(steps))


def store(trainer: Trainer, losses: list[float], path: Path) -> None:
    """Write a checkpoint of weights, losses, and what the optimiser has."""
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for i, p in enumerate(trainer.model.parameters()):
        state = {"weight": p.detach(), **trainer.optimiser.state[p]}
        tensors |= {f"{i} {key}": x.contiguous() for key, x in state.items()}
    write_atomically(path, save(tensors))


def resume(trainer: Trainer, path: Path, most: int) -> list[float]:
    """Read the checkpoint at `path`, if there is one, and return the losses so far.

    One of more than `most` steps is not read.
    """
    found = load(path.read_bytes()) if path.exists() else {"losses": torch.zeros(0)}
    if not 0 < len(found["losses"]) <= most:
        return []
    for i, p in enumerate(trainer.model.parameters()):
        p.data.copy_(found[f"{i} weight"])
        if f"{i} step" in found:
            state = {key: found[f"{i} {key}"].to(p.device) for key in ("exp_avg", "exp_avg_sq")}
            trainer.optimiser.state[p] = {"step": found[f"{i} step"], **state}
    losses: list[float] = found["losses"].tolist()
    for loss in losses:  # so that `watch_losses` has those before the interruption
        torch.tensor(loss, requires_grad=True).backward()
    return losses


def ship(run: dict[str, Any], **settings: Any) -> None:
    """Train a run, and store its weights beside the records, with its scores as metadata."""
    found = scores(**run, **settings)
    path = weights_path(**run, text=found["digest"], **settings)
    stored = load(path.read_bytes())
    model = page.build(run["arm"], settings["size"])
    for i, p in enumerate(model.parameters()):
        p.data.copy_(stored[f"{i} weight"])
    measured = {key: found[key] for key in ("digest", "documents", "validation", *KINDS)}
    write_atomically(
        FOLDER / WEIGHTS, save(model.state_dict(), {"run": json.dumps(run | measured)})
    )


def plan(size: str, steps: int, **how: Any) -> dict[str, Any]:
    """Describe the runs of a size, for `steps` steps and for half of them."""
    columns = [(kind, f"bits per byte, {kind}", 1, 3) for kind in ("validation", *KINDS)]
    how |= dict(steps=(steps // 2, steps), seeds=3, tuning_seeds=(1000,), tie=0.002, size=size)
    how |= dict(best=min, data="code")
    return experiment(f"ten attentions, {size}", scores, page.ARMS, columns, **how)


PLANS = {"laptop": plan("laptop", 3000, batch=8, device="cpu")}
PLANS["gpu"] = plan("gpu", 4000, batch=8, device="cuda")
EXPERIMENTS = {"laptop": PLANS["laptop"]}  # that the page has results of
SHIPPED = {"arm": "softmax", "seed": 0, "steps": 6000, "lr": 3e-3}  # of `load_language_model`


# --- what training and decoding take --------------------------------------------------------------


def cost(size: str = "laptop", batch: int = 8, rounds: int = 15) -> dict[str, Any]:
    """Measure a step of training, and decoding after contexts, side by side, on one thread."""
    models = {arm: page.build(arm, size) for arm in page.ARMS}
    x = torch.randint(256, (batch, page.SIZES[size]["length"] + 1))
    rows: list[dict[str, Any]] = []

    def step(model: torch.nn.Module) -> None:
        model.zero_grad()
        byte_loss(model, (x,))[0].backward()

    def add(task: str, length: int, calls: dict[str, Any], past: dict[str, Any]) -> None:
        sizes = {arm: page.bytes_kept(kept) for arm, kept in past.items()}
        for arm, (seconds, ratio) in measure.compare(calls, repeats=rounds, device="cpu").items():
            own = {"seconds": seconds, "ratio": ratio, "bytes": sizes.get(arm)}
            rows.append({"arm": arm, "seed": 0, "task": task, "length": length} | own)

    add("training", x[:, 1:].numel(), {a: partial(step, m) for a, m in models.items()}, {})
    for n in CONTEXTS:
        past, calls = {}, {}
        for arm in page.DECODED:
            for part in torch.randint(256, (1, n)).split(256, 1):
                past[arm] = models[arm].step(part, past.get(arm))[1]
            calls[arm] = partial(models[arm].step, x[:1, :1], past[arm])
        add("decoding", n, calls, past)
    title = "Time of a training step, and time and memory of decoding a byte"
    settings = {"size": size, "batch": batch, "rounds": rounds}
    columns = [("ratio", "time, softmax = 1", 1, 2)]
    found = {"machine": measure.machine(), "settings": settings, "columns": columns, "rows": rows}
    return {"schema": SCHEMA, "title": title, "device": "cpu"} | found


CODE = read_code()  # as it is when this module is imported: a file may be edited during a run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the size or the weights that the command line names, or measure the costs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["cost"]:
        torch.set_num_threads(1)
        written = json.dumps(cost(), indent=1) + "\n"
        write_atomically(FOLDER / "chapterL_cost_cpu.json", written.encode())
        return 0
    if given == ["weights"]:
        torch.set_num_threads(1)
        ship(SHIPPED, **PLANS["laptop"]["settings"])
        return 0
    named = PLANS if any(x in PLANS for x in given) else {"laptop": PLANS["laptop"]}
    return command("chapterL", named, FOLDER, __doc__, given)


if __name__ == "__main__":
    sys.exit(main())
