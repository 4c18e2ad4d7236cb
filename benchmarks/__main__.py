"""Run ``python -m benchmarks`` from the root of the repository; ``--help`` lists the options."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import beside
from benchmarks.cases import CASES
from benchmarks.peers import LIBRARIES
from benchmarks.report import (
    NOTE,
    RESULTS,
    caption,
    memory_table,
    slug,
    time_table,
)
from benchmarks.run import (
    DIMS,
    LENGTHS,
    ROUNDS,
    code,
    must_measure,
    processor,
    rename,
    run,
    save,
    settings,
)
from derived_book.experiment_tables import markdown


def whole(text: str) -> int:
    """Convert a command-line argument to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure time and memory of every mechanism and of PyTorch's attention, on one "
        "thread of the CPU; python -m benchmarks.gpu measures them on a GPU.",
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        metavar="NAME",
        help=f"one or more of {', '.join(CASES)}; default: those that have no results on this "
        "machine, or results for other options or other code; the reason is printed",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=LIBRARIES,
        metavar="LIBRARY",
        help=f"measure only other libraries, again: {', '.join(LIBRARIES)}; default: all",
    )
    parser.add_argument("--all", action="store_true", help="measure everything again")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=whole,
        metavar="N",
        help=f"default {LENGTHS}; if given, the run is a trial, which writes no results "
        "unless --output names a folder",
    )
    parser.add_argument(
        "--dims",
        nargs="+",
        type=whole,
        metavar="D",
        help=f"widths of a head; default {DIMS}; if given, a trial, as for --lengths",
    )
    parser.add_argument("--rounds", type=whole, default=ROUNDS, help="default %(default)s")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of the results, with a folder for each machine and a file for each case; "
        "default benchmarks/results, which the book shows",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure cases and other libraries, write the results, and print their tables."""
    torch.set_num_threads(1)
    options = parse(arguments)
    lengths = sorted(set(options.lengths or LENGTHS))
    dims = sorted(set(options.dims or DIMS))
    results, here = options.output or RESULTS, slug(processor())
    trial = bool(options.lengths or options.dims) and options.output is None
    folder = None if trial else results / here
    only = options.cases is not None or options.peers is not None
    names = options.cases or [] if only else list(CASES)
    if not only and not (options.all or trial):
        wanted = {name: settings(CASES[name], lengths, dims) for name in names}
        names = [
            name
            for name in names
            if must_measure(results / here / f"{name}.json", wanted[name], code(CASES[name]))
        ]
    if not trial:
        rename(results)
    done: dict[str, dict[str, Any]] = {}
    for baseline in dict.fromkeys(CASES[name].baseline for name in names):
        group = [name for name in CASES if name in names and CASES[name].baseline == baseline]
        measured = run(baseline, group, lengths, dims, options.rounds)
        done |= measured
        if folder is not None:
            for name, data in measured.items():
                save(folder / f"{name}.json", data)
    if done:
        report({here: done}, lengths, dims)
    libraries = options.peers or LIBRARIES if options.peers is not None or not only else []
    if libraries:
        again = options.all or trial or only
        done |= beside.main(libraries, options.lengths, dims, options.rounds, folder, again)
    if not done and not only:
        print(f"All cases have results in {results / here}; --all measures them again.")
    return 0


def report(results: Mapping[str, Any], lengths: Sequence[int], dims: Sequence[int]) -> None:
    """Print the tables of the results of this machine."""
    (done,) = results.values()
    print(f"{caption(done)}.\n{NOTE}\n")
    for dim, length in itertools.product(dims, lengths):
        print(markdown(time_table(dict(results), length=length, dim=dim)) + "\n")
    print("Peak of the extra memory, and its growth from half that length:\n")
    print(markdown(memory_table(done)))


if __name__ == "__main__":
    sys.exit(main())
