"""Train mixtures of keys beside softmax and linear attention: ``python -m benchmarks.mixtures``.

About an hour and a half on one thread of a CPU. A run that has finished is not repeated: start it
again after a break, or one experiment at a time. The results go to `derived_attention.recorded`,
from where chapter 10 reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.table import experiment_caption, experiment_table
from benchmarks.table import markdown as as_markdown
from derived_attention import (
    MixtureAttention,
    MultiheadAttention,
    identity_attention,
    linear_attention,
    tasks,
    uniform_attention,
)
from derived_attention.experiments import run_grid
from derived_attention.measure import machine
from derived_attention.models import Config
from derived_attention.recorded import FOLDER, SCHEMA
from derived_attention.runtime import write_atomically

SEEDS = 3
Arm = tuple[Callable[..., Any], int]  # attention and heads


def arms(heads: int, width: int) -> dict[str, Arm]:
    """All mechanisms, with `heads` heads of `width` features, and with half as many."""
    half = heads // 2
    plain = partial(MultiheadAttention, head_dim=width)
    mixed = partial(MixtureAttention, head_dim=width, priors="learned")
    linear = partial(plain, attention=linear_attention)
    wider = partial(MultiheadAttention, head_dim=width * 5 // 4)
    dots = {"distance": False}
    return {
        f"softmax, {heads} heads": (plain, heads),
        f"softmax, {half} heads": (plain, half),
        f"softmax, {half} heads, a quarter wider": (wider, half),
        f"MGK, {half} heads": (mixed, half),
        f"sMGK, {half} heads": (partial(mixed, shifted=True), half),
        f"MGK, {heads} heads": (mixed, heads),
        f"sMGK, {heads} heads": (partial(mixed, shifted=True), heads),
        f"MGK, {half} heads, hard E-step": (partial(mixed, hard=True), half),
        f"MGK, {half} heads, priors by EM": (partial(mixed, priors="em"), half),
        f"MGK, {half} heads, dot products": (partial(mixed, mixture=dots), half),
        f"one Gaussian, {half} heads": (partial(mixed, components=1), half),
        f"linear, {heads} heads": (linear, heads),
        f"linear, {half} heads": (linear, half),
        f"MLK, {half} heads": (partial(mixed, linear=True), half),
        f"sMLK, {half} heads": (partial(mixed, linear=True, shifted=True), half),
        f"multi-query softmax, {heads} heads": (partial(plain, kv_heads=1), heads),
        f"multi-query MGK, {half} heads": (partial(mixed, kv_heads=1), half),
        "control: uniform weights": (partial(plain, attention=uniform_attention), heads),
        "control: no mixing": (partial(plain, attention=identity_attention), heads),
    }


MAIN = (0, 1, 2, 3, 4)  # places in `arms` of what the slow experiments train


def language(arm: str, **settings: Any) -> dict[str, float]:
    """Model a text."""
    attention, heads = arms(4, 16)[arm]
    config = Config(dim=64, heads=heads, dropout=0.0, attention=attention)
    return tasks.language(config, **settings)


def series(arm: str, name: str, **settings: Any) -> dict[str, float]:
    """Classify time series."""
    attention, heads = arms(8, 8)[arm]
    config = Config(dim=64, heads=heads, layers=1, attention=attention)
    return tasks.series(config, name, **settings)


def listops(arm: str, **settings: Any) -> dict[str, float]:
    """Evaluate lists."""
    attention, heads = arms(4, 8)[arm]
    config = Config(dim=32, heads=heads, hidden=64, attention=attention)
    return tasks.listops(config, **settings)


def translation(arm: str, **settings: Any) -> dict[str, float]:
    """Translate German into English."""
    attention, heads = arms(4, 16)[arm]
    config = Config(dim=64, heads=heads, dropout=0.0, attention=attention)
    return tasks.translation(config, **settings)


def experiment(
    title: str,
    function: Callable[..., dict[str, float]],
    names: Sequence[str],
    columns: Sequence[Sequence[Any]],
    seeds: int = SEEDS,
    **settings: Any,
) -> dict[str, Any]:
    """Describe an experiment; `columns` are (metric, heading, factor, decimals)."""
    return {
        "title": title,
        "function": function,
        "names": names,
        "columns": columns,
        "seeds": seeds,
        "settings": settings,
    }


ACCURACY = (("accuracy", "accuracy in %", 100, 1), ("best", "best test epoch", 100, 1))
LANGUAGE, SERIES, LISTOPS = (list(arms(*sizes)) for sizes in ((4, 16), (8, 8), (4, 8)))
main_of = [LANGUAGE[i] for i in MAIN]
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "language": experiment(
        "Python's documentation",
        language,
        LANGUAGE,
        [("bits", "bits per byte", 1, 3)],
        steps=1000,
    ),
    "language_longer": experiment(
        "Python's documentation, four times as long",
        language,
        main_of,
        [("bits", "bits per byte", 1, 3)],
        steps=4000,
    ),
    "japanese_vowels": experiment(
        "JapaneseVowels", series, SERIES, ACCURACY, name="JapaneseVowels", epochs=20
    ),
    "basic_motions": experiment(
        "BasicMotions", series, SERIES, ACCURACY, name="BasicMotions", epochs=40
    ),
    "listops": experiment("ListOps", listops, LISTOPS, ACCURACY, epochs=6),
    "translation": experiment(
        "German to English",
        translation,
        [*(name for name in main_of if "wider" not in name), "control: uniform weights"],
        [("bleu", "BLEU", 1, 1), ("chrf", "chrF", 1, 1), ("bits", "bits per token", 1, 2)],
        epochs=10,
    ),
}


def run(name: str, device: str) -> dict[str, Any]:
    """Run one experiment, or read what of it has been run; return what is to be written."""
    plan = EXPERIMENTS[name]
    settings = plan["settings"] | {"device": device}
    grid = [
        {"arm": arm, "seed": seed, **settings}
        for seed in range(plan["seeds"])
        for arm in plan["names"]
    ]
    results = run_grid(plan["function"], grid)
    rows = [{k: v for k, v in row.items() if k not in settings} for row in results]
    return {
        "schema": SCHEMA,
        "title": plan["title"],
        "device": device,
        "machine": machine(),
        "settings": plan["settings"],
        "columns": plan["columns"],
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, write it, and print its tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixtures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    names = parser.parse_args(arguments).names or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        parser.error(f"no experiment {', '.join(unknown)}; there are {', '.join(EXPERIMENTS)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    for name in names:
        data = run(name, device)
        text = json.dumps(data, indent=1) + "\n"
        write_atomically(FOLDER / f"mixtures_{name}_{device}.json", text.encode())
        print(f"{experiment_caption(data)}\n\n{as_markdown(experiment_table(data))}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
