"""Train one model with nine kinds of attention: ``python -m experiments.chapterL``.

Sixteen hours on one thread of a CPU for the size `laptop`, the default; the size `gpu` needs a GPU.
An interrupted run resumes at its last checkpoint; there is one each minute. The weights of all
finished runs stay in ``cache_dir("runs")``, so that a change of what is measured trains nothing
again: some 300 MB. Those of softmax with seed 0 are stored beside the record, too. One seed chooses
each learning rate, at the last number of steps, on the validation documents.

``python -m experiments.chapterL cost`` measures training and decoding: on a machine that does
nothing else.
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
from derived_book.training import measure, run_key
from derived_book.training.fit import Trainer, chosen_precision
from derived_book.training.recorded import FOLDER, SCHEMA, load_experiment
from experiments.page_models import chapter
from experiments.protocol import command, deciding

page = chapter("L")
MINUTE, PARTS = 60.0, 50  # between two checkpoints in seconds; points of a curve
WEIGHTS = "chapterL_softmax.safetensors"  # those that are stored beside the record
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
    losses = train_on(model, windows, seed, steps, lr, path)
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
    own = (textwrap.dedent(inspect.getsource(f)) for f in (page.build, page.train, train_on))
    return [run_key.PACKAGE.digest(find_modules()), *(ast.dump(ast.parse(text)) for text in own)]


def train_on(
    model: torch.nn.Module, batches: Windows, seed: int, steps: int, lr: float, path: Path
) -> list[float]:
    """Train as `fit` does, and return all losses; go on from the checkpoint at `path`.

    At the end, the file has the weights and the losses only.
    """
    device = next(model.parameters()).device
    trainer = Trainer(model, byte_loss, chosen_precision(None, model, device), device)
    losses, saved = resume(trainer, path), time.monotonic()
    if len(losses) == steps:
        return losses
    for loss in page.train(trainer, batches, seed, range(len(losses), steps), lr):
        losses.append(loss)
        if time.monotonic() - saved > MINUTE:
            store(trainer, losses, path)
            saved = time.monotonic()
    trainer.optimiser.state.clear()
    store(trainer, losses, path)
    return losses


def store(trainer: Trainer, losses: list[float], path: Path) -> None:
    """Write a checkpoint of weights, losses, and what the optimiser has."""
    tensors = {"losses": torch.tensor(losses, dtype=torch.float64)}
    for i, p in enumerate(trainer.model.parameters()):
        state = {"weight": p.detach(), **trainer.optimiser.state[p]}
        tensors |= {f"{i} {key}": x.contiguous() for key, x in state.items()}
    write_atomically(path, save(tensors))


def resume(trainer: Trainer, path: Path) -> list[float]:
    """Read the checkpoint at `path`, if there is one, and return the losses so far."""
    if not path.exists():
        return []
    found = load(path.read_bytes())
    for i, p in enumerate(trainer.model.parameters()):
        p.data.copy_(found[f"{i} weight"])
        if f"{i} step" in found:
            state = {key: found[f"{i} {key}"].to(p.device) for key in ("exp_avg", "exp_avg_sq")}
            trainer.optimiser.state[p] = {"step": found[f"{i} step"], **state}
    losses: list[float] = found["losses"].tolist()
    for loss in losses:  # so that `watch_losses` has those before the interruption
        torch.tensor(loss, requires_grad=True).backward()
    return losses


def ship(arm: str = "softmax", seed: int = 0) -> None:
    """Store the weights of a recorded run beside the record."""
    (record,) = load_experiment("chapterL_laptop", FOLDER)
    asked = {"arm": arm, "seed": seed, "steps": record["steps"][-1], "lr": record["rates"][arm]}
    (row,) = (row for row in record["rows"] if asked.items() <= row.items())
    found = load(weights_path(**asked, text=row["digest"], **record["settings"]).read_bytes())
    model = page.build(arm, record["settings"]["size"])
    for i, p in enumerate(model.parameters()):
        p.data.copy_(found[f"{i} weight"])
    write_atomically(FOLDER / WEIGHTS, save(model.state_dict()))


def plan(size: str, steps: int, **how: Any) -> dict[str, Any]:
    """Describe the runs of a size, for `steps` steps and for half of them."""
    columns = [(kind, f"bits per byte, {kind}", 1, 3) for kind in ("validation", *KINDS)]
    how |= dict(steps=(steps // 2, steps), seeds=3, tuning_seeds=(1000,), tie=0.002, size=size)
    how |= dict(best=min, data="code")
    return deciding(f"nine attentions, {size}", scores, page.ARMS, columns, **how)


PLANS = {"laptop": plan("laptop", 3000, batch=8, device="cpu")}
PLANS["gpu"] = plan("gpu", 4000, batch=8, device="cuda")


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
    """Train the size that the command line names, or measure the costs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["cost"]:
        torch.set_num_threads(1)
        written = json.dumps(cost(), indent=1) + "\n"
        write_atomically(FOLDER / "chapterL_cost_cpu.json", written.encode())
        return 0
    sizes = [x for x in given if x.isalpha()]
    named = PLANS if sizes else {"laptop": PLANS["laptop"]}
    refused = command("chapterL", named, FOLDER, __doc__, given)
    if not refused and "laptop" in (sizes or named):
        ship()
    return refused


if __name__ == "__main__":
    sys.exit(main())
