"""What kernels take with other sizes of tiles: ``python -m benchmarks.tiles``.

Every candidate that `benchmarks.gpu.verify` times on a GPU is compiled ahead of time,
without one, for each architecture: registers, spills, shared memory, and whether it fits. What is
done is in ``benchmarks/results/tiles.json``, and is not compiled again by the same Triton.
``benchmarks/results/spills.json`` keeps what spills of the shipped sizes, by the version of Triton.
Another version needs no other environment: install it into a folder, ``pip install --no-deps
--target FOLDER triton==VERSION``, and put that first, ``PYTHONPATH=FOLDER:src``.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import run
from benchmarks.gpu.resources import ARCHITECTURES, launches, usage
from derived_attention.common.kernels import HEAD_DIMS, Launch, available, interpreted
from derived_attention.common.tuning import Sizes, candidates
from derived_book.tables import RESULTS, SPILLS, load_spills

TILES = RESULTS / "tiles.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SIZES = ("BLOCK_N", "BLOCK_M", "C", "num_warps", "num_stages")


def sizes_of(launch: Launch) -> Sizes:
    """Return the sizes of a launch that candidates change."""
    known = {**launch.constants, "num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return {x: known[x] for x in SIZES if x in known}


def resized(launch: Launch, sizes: Sizes) -> Launch:
    """Return a launch with other sizes."""
    constants = {x: sizes.get(x, y) for x, y in launch.constants.items()}
    warps, stages = sizes["num_warps"], sizes["num_stages"]
    return dataclasses.replace(launch, constants=constants, num_warps=warps, num_stages=stages)


def jobs(shipped: bool, capabilities: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each compilation, and what `compiled` wants; shipped sizes first."""
    for dtype, dim, capability in itertools.product(DTYPES, HEAD_DIMS, capabilities):
        for launch in launches(dim, DTYPES[dtype], capability):
            own = sizes_of(launch)
            for sizes in [own] if shipped else list(candidates(own))[1:]:
                numbers = ",".join(map(str, sizes.values()))
                name = f"{launch.name} {dtype} {dim} {numbers} sm_{capability}"
                yield name, (resized(launch, sizes), capability, dim, dtype)


def compiled(launch: Launch, capability: int, dim: int, dtype: str) -> dict[str, Any]:
    """Compile a launch, and return what it takes, or what the compiler says."""
    try:
        found = dataclasses.asdict(usage(launch, capability, dim, dtype))
    except Exception as error:  # of Triton's compiler or ptxas: this size is none for it
        return {"fault": re.sub(r"\S*/", "", str(error)).strip().splitlines()[0][:200]}
    fits = found["shared"] <= ARCHITECTURES[capability].block_shared
    return {x: found[x] for x in ("registers", "spills", "shared", "resident")} | {"fits": fits}


def spilling(data: dict[str, Any]) -> dict[str, Any]:
    """Return how many kernels were compiled with shipped sizes, and the bytes of those that spill.

    Raises
    ------
    RuntimeError
        If one of them does not compile.
    """
    shipped = {name: data["compiled"][name] for name, _ in jobs(True, list(ARCHITECTURES))}
    for name, x in shipped.items():
        if "fault" in x:
            raise RuntimeError(f"{name} does not compile with {data['triton']}: {x['fault']}")
    spills = {name: x["spills"] for name, x in shipped.items() if x["spills"]}
    return {"compiled": len(shipped), "spills": spills}


def table(data: dict[str, Any]) -> str:
    """Return what shipped sizes take, a line for each kernel and architecture."""
    lines = [f"{'kernel dtype D sizes architecture':<72} registers spills shared fits"]
    for name, x in data["compiled"].items():
        numbers = ("registers", "spills", "shared", "fits")
        cells = [str(x[y]) for y in numbers] if "fault" not in x else [x["fault"]]
        lines.append(f"{name:<72} " + " ".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what has not been compiled; return 3 if time ended before."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--capability", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--candidates", action="store_true", help="not only the shipped sizes")
    options = parser.parse_args(arguments)
    if not available() or interpreted():
        print("Triton is not installed, or interprets: no kernel can be compiled.")
        return 2
    end = time.monotonic() + 60 * options.minutes
    data: dict[str, Any] = {"triton": run.version_of("triton"), "compiled": {}}
    if TILES.exists():
        before = json.loads(TILES.read_text("utf8"))
        data = before if before["triton"] == data["triton"] else data
    for shipped in (True, False)[: 1 + options.candidates]:
        for name, job in jobs(shipped, options.capability):
            if name in data["compiled"]:
                continue
            if time.monotonic() > end:
                print("Time is up: the same command goes on.")
                return 3
            data["compiled"][name] = compiled(*job)
            run.save(TILES, data)
    if set(options.capability) >= set(ARCHITECTURES):
        known = load_spills(SPILLS) | {data["triton"]: spilling(data)}
        run.save(SPILLS, known)
    print(table(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
