"""Compare every mechanism with its shortest correct form, at the sizes at which the book trains.

``python -m benchmarks.small_sizes`` writes one file for this machine; with names of mechanisms, it
replaces only their rows. The shortest form is the formula with its (N, M) matrix, or one call of
SDPA if that computes the same; the faster of the two counts. Batch, heads and width are those of
the book's models, and the times include the backward pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import run
from benchmarks.cases import DENSE
from benchmarks.report import RESULTS, slug
from derived_attention import fixed_mask, strided_mask, window_mask
from derived_attention.mixture.shifted import shifted_keys
from derived_attention.registry import MECHANISMS, Entry
from derived_book.experiment_tables import markdown

BATCH, HEADS, DIM = 16, 4, 16
LENGTHS = (16, 64, 256, 512)
ROUNDS = 15
BRIEF = 0.01  # seconds; shorter calls are timed in proportionally more rounds
LIMIT = 1.05  # times the shortest form's time; what takes longer is listed
HOPELESS = 3  # times the fast form's time; slower forms are timed once
DECIDED = 0.2  # times the shortest form's time; below it, no longer sequence is measured


def masked(pattern: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return SDPA under the mask of a pattern."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **own: Any) -> Tensor:
        allowed = pattern(q.shape[-2], k.shape[-2], **own)
        allowed = allowed.tril() if is_causal else allowed
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    return attend


def joined(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """Return attention to R·M keys (…, R, M, D): softmax of q·k/√D − ‖k‖²/2√D."""
    R, M, D = k.shape[-3:]
    bias = -k.square().sum(-1).flatten(-2).unsqueeze(-2) / (2 * D**0.5)  # (…, 1, R·M)
    if is_causal:
        future = torch.ones(q.shape[-2], M).triu(1).bool().repeat(1, R)
        bias = bias.masked_fill(future, float("-inf"))
    values = v.unsqueeze(-3).expand(*k.shape[:-1], v.shape[-1]).flatten(-3, -2)
    return F.scaled_dot_product_attention(q, k.flatten(-3, -2), values, attn_mask=bias)


def joined_shifted(q: Tensor, k: Tensor, v: Tensor, *, shifts: Tensor, **own: Any) -> Tensor:
    """Return attention to the R shifted copies of each key."""
    return joined(q, shifted_keys(k, shifts), v, **own)


SHORT: dict[str, Callable[..., Tensor]] = {
    "window": masked(window_mask),
    "strided": masked(strided_mask),
    "fixed": masked(fixed_mask),
    "mgk": joined,
    "smgk": joined_shifted,
}


def forms(name: str, entry: Entry, is_causal: bool) -> dict[str, Callable[..., Tensor]]:
    """Return the fast form and the short ones of a mechanism."""
    case = name + "_causal" * is_causal
    found = {"fast": entry.fast, "formula": DENSE.get(case, entry.reference)}
    return found | ({"SDPA": SHORT[name]} if name in SHORT else {})


def compare(name: str, is_causal: bool, length: int, rounds: int) -> dict[str, Any]:
    """Time a mechanism's forms in the same rounds; return the fast form's seconds and ratio."""
    entry = MECHANISMS[name]
    options = entry.options(length, HEADS, DIM) | ({"is_causal": True} if is_causal else {})
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, length, DIM)
    q, k, v, gradient = (torch.randn(shape, generator=generator) for _ in range(4))
    tensors = [*(x.requires_grad_() for x in (q, entry.keys(k).detach(), v)), gradient]
    calls = {
        form: run.call(function, tensors, options)
        for form, function in forms(name, entry, is_causal).items()
    }
    outputs = {form: function()[0] for form, function in calls.items()}
    near = 1e-2 * float(outputs["fast"].norm())  # rounding may switch a lasso code on or off
    for form, output in outputs.items():
        if not (off := float((output - outputs["fast"]).norm())) <= near:
            raise ValueError(f"{form} of {name} is off by {off:.3g}; expected at most {near:.3g}")
    once = {form: run.seconds(function) for form, function in calls.items()}
    close = {form for form in calls if once[form] < HOPELESS * once["fast"]}
    rounds = max(rounds, int(rounds * BRIEF / once["fast"])) if len(close) > 1 else 1
    close |= {min(calls.keys() - {"fast"}, key=once.__getitem__)}
    taken = run.time_rounds({form: calls[form] for form in calls if form in close}, rounds)
    shortest = min(close - {"fast"}, key=lambda form: float(np.median(taken[form])))
    return {
        "mechanism": name,
        "causal": is_causal,
        "length": length,
        "beside": shortest,
        "rounds": rounds,
        "seconds": run.quartiles(taken["fast"]),
        "ratio": run.quartiles(taken["fast"] / taken[shortest]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named mechanisms, or all; write the file, and print the ratios."""
    names = list(arguments if arguments is not None else sys.argv[1:]) or list(MECHANISMS)
    if unknown := [name for name in names if name not in MECHANISMS]:
        sys.exit(f"{unknown[0]!r} is not a mechanism; expected some of {', '.join(MECHANISMS)}")
    torch.set_num_threads(1)
    rows = []
    for name in names:
        for causal in (False, True) if MECHANISMS[name].causal else (False,):
            print(name + ", causal" * causal, end="", flush=True)
            for length in LENGTHS:
                row = compare(name, causal, length, ROUNDS) | {"commit": run.commit()}
                rows.append(row)
                print(f" | {row['ratio']['median']:.2f} ({row['beside']})", end="", flush=True)
                if row["ratio"]["median"] < DECIDED:
                    break
            print()
    here = run.processor()
    path = RESULTS / f"small-sizes-{slug(here)}.json"
    if path.exists():
        kept = json.loads(path.read_text("utf8"))["rows"]
        rows += [row for row in kept if row["mechanism"] in MECHANISMS.keys() - set(names)]
        rows.sort(key=lambda row: list(MECHANISMS).index(row["mechanism"]))
    settings = {"B": BATCH, "H": HEADS, "D": DIM, "lengths": LENGTHS, "rounds": ROUNDS}
    run.save(path, {"machine": here, "settings": settings, "rows": rows})
    slow = [row for row in rows if row["ratio"]["median"] > LIMIT]
    header = ["mechanism", "N", "compared with", "ratio"]
    lines = [
        [
            row["mechanism"] + ", causal" * row["causal"],
            str(row["length"]),
            row["beside"],
            f"{row['ratio']['median']:.2f}",
        ]
        for row in slow
    ]
    print(f"\n{len(slow)} of {len(rows)} take more than {LIMIT} times the shortest form's time.\n")
    print(markdown((header, lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
