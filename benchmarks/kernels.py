"""What kernels take of a GPU, and the least time they can take: ``python -m benchmarks.kernels``.

No GPU is needed: kernels are compiled ahead of time, and the rest is arithmetic. A roofline is the
time that a device needs for the operations at its peak, for the bytes at its full bandwidth, or for
the exponentials at the rate of its special function units, whichever is longest; no kernel is
faster, and none is as fast. It is a bound, not a measurement.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from typing import Any

from benchmarks import run
from benchmarks.cases import CASES, FUSED, HEADS
from benchmarks.work import WORK, Work, sdpa
from derived_attention.common.kernels import HEAD_DIMS, available
from derived_book.tables import KERNELS, MODES, RATES, load_kernels

LENGTHS = (1024, 4096, 16384, 65536)
SPECIAL = 16  # exponentials a clock and multiprocessor, by the CUDA C++ Programming Guide
# Dense operations of bfloat16 and bytes a second, by NVIDIA's data sheets; exponentials a second of
# so many multiprocessors, at the clock at which their tensor cores reach that peak.
DEVICES = {
    "A100 SXM 80 GB": (312e12, 2.039e12, SPECIAL * 108 * 1.41e9),
    "H100 SXM": (989e12, 3.35e12, SPECIAL * 132 * 1.83e9),
    "H200 SXM": (989e12, 4.8e12, SPECIAL * 132 * 1.83e9),
}


def usage() -> list[dict[str, Any]]:
    """Compile every kernel in a process of its own, where none is interpreted; what each takes."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.resources"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the kernels do not compile: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def seconds(work: Work) -> dict[str, float]:
    """Return the roofline of each device."""
    counts = astuple(work)
    return {
        name: max(count / rate for count, rate in zip(counts, rates, strict=True))
        for name, rates in DEVICES.items()
    }


def rooflines() -> Iterator[dict[str, Any]]:
    """Yield the least time of each kernel and of what it is beside, at B = 1, in bfloat16."""
    for name in FUSED:
        causal = name.endswith("_causal")
        heads = 2 * HEADS if "double" in CASES[name].baseline else HEADS
        for dim in HEAD_DIMS:
            for length in LENGTHS:
                sizes = {"B": 1, "H": HEADS, "N": length, "M": length, "D": dim}
                kind = name.removesuffix("_causal")
                masked = {"is_causal": True} if causal and kind not in ("linear", "mlk") else {}
                ours = WORK[kind](**sizes, **masked)
                theirs = sdpa(heads, length, dim, causal)
                for mode in MODES:
                    yield row(name, length, dim, mode, ours[mode], theirs[mode])


def row(name: str, length: int, dim: int, mode: str, ours: Work, theirs: Work) -> dict[str, Any]:
    """Return what the file says of a case at a length."""
    return {
        "case": name,
        "label": CASES[name].label,
        "length": length,
        "dim": dim,
        "mode": mode,
        **asdict(ours),
        "seconds": seconds(ours),
        "sdpa_seconds": seconds(theirs),
    }


def computed() -> Mapping[str, Any]:
    """Return all that the file holds."""
    return {
        "date": datetime.date.today().isoformat(),
        "versions": {name: run.version_of(name) for name in ("triton", "torch")},
        "settings": {"B": 1, "H": HEADS, "dtype": "bfloat16"},
        "devices": {name: dict(zip(RATES, rates, strict=True)) for name, rates in DEVICES.items()},
        "usage": usage(),
        "rooflines": list(rooflines()),
    }


def main() -> int:
    """Compile, count and write ``benchmarks/results/kernels.json``."""
    if not available():
        print("Triton is not installed, so no kernel can be compiled.")
        return 0
    data, before = computed(), load_kernels()
    if data | {"date": ""} != before | {"date": ""}:
        run.save(KERNELS, data)
    print(
        f"{len(data['usage'])} compiled kernels and {len(data['rooflines'])} rooflines: {KERNELS}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
