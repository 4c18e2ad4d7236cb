"""Test the kernels on this machine's GPU: ``python -m benchmarks.gpu.verify``.

Every kernel is compared with PyTorch's form on problems that cover every pair of property values,
and run ten times, because its bits must repeat. Each result is stored at once, for this GPU, these
compilers and these kernels, so the same command resumes an interrupted run.

Without a GPU, and with ``TRITON_INTERPRET=1``, some tiny problems run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.problems import design, repeats
from derived_attention.common import kernels
from derived_attention.common.files import write_atomically
from derived_attention.common.kernel_cases import LIBRARIES, PATTERNS, Trial, compare
from derived_attention.common.kernel_selftest import file_of, place_of, usable
from derived_attention.delta import fla

TIMES = 10  # runs that must return the same bits
KERNELS = ("linear", "mlk", *PATTERNS, *LIBRARIES)


class Record:
    """The results so far, in files that are complete at any time."""

    def __init__(self, device: torch.device, out: Path | None) -> None:
        own = file_of("verified", device)
        self.files = [
            x for x in (own, out and out / f"verified-{slug(place_of(device))}.json") if x
        ]
        self.data: dict[str, Any] = {
            "place": place_of(device),
            "versions": kernels.versions(),
            "capability": list(torch.cuda.get_device_capability(device))
            if device.type == "cuda"
            else None,
            "trials": {},
        }
        for file in self.files:
            if file.exists():
                self.data |= json.loads(file.read_text("utf8"))
                break

    def keep(self, name: str, found: Any) -> None:
        """Store one result."""
        self.data["trials"][name] = found
        for file in self.files:
            write_atomically(file, (json.dumps(self.data, indent=1) + "\n").encode())


def slug(name: str) -> str:
    """Return a text as the name of a file."""
    return "".join(x if x.isalnum() or x in ".+" else "-" for x in name).replace("--", "-").lower()


def problems(device: torch.device) -> list[Trial]:
    """Return the problems for a device."""
    if device.type == "cuda":
        widths = [(64, 64), (128, 128), (40, 24), (136, 130)]
        return [*design(lambda trial: 1000, widths), *delta_problems()]
    tiny: dict[str, Any] = {"N": 20, "M": 18, "D": 5, "DV": 6, "H": 1}
    own = [kernel for kernel in KERNELS if kernel not in LIBRARIES]
    return [Trial(kernel, "fp32", **tiny, mask="causal") for kernel in own]


def delta_problems() -> list[Trial]:
    """Return problems for fla-core, if it is installed, in two widths and two dtypes."""
    if not fla.is_installed():
        return []
    kinds: list[dict[str, Any]] = [{}, {"gated": True}, {"gated": True, "erase": False}]
    sizes: list[dict[str, Any]] = [fla.TRIED | {"D": D, "DV": D} for D in (64, 128)]
    return [
        Trial("delta", dtype, mask="causal", **size, **kind)
        for dtype in ("bf16", "fp16")
        for size in sizes
        for kind in kinds
    ]


def try_one(trial: Trial, device: torch.device) -> dict[str, Any]:
    """Compare a kernel with PyTorch's form, and check whether its bits repeat."""
    try:
        found = compare(trial, device)
        again = repeats(trial, TIMES if device.type == "cuda" else 2, device)
    except Exception as error:  # of Triton's compiler or launcher; the other problems still run
        lines = str(error).strip().splitlines() or [""]
        return {"agrees": False, "fault": f"{type(error).__name__}: {lines[0][:300]}"}
    errors = {"kernel": found.kernel, "pytorch": found.pytorch, "rounded": found.rounded}
    return {"agrees": found.agrees, "repeats": again, "worst": found.worst, "errors": errors}


# --- the command ----------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> str:
    """Return a table of the results."""
    lines = [data["place"], ""]
    for kernel in KERNELS:
        rows = [(n, x) for n, x in data["trials"].items() if n.split()[0] == kernel]
        if not rows:
            continue
        good = [x for _, x in rows if x["agrees"] and x["repeats"]]
        worst = max((x["worst"] for _, x in rows if "worst" in x), default=float("nan"))
        lines.append(
            f"{kernel:<9} {len(good)} of {len(rows)} problems agree and repeat; "
            f"worst error {worst:.2f} of what is allowed"
        )
        for name, x in rows:
            if not (x["agrees"] and x["repeats"] if "repeats" in x else False):
                what = x.get("fault", f"error {x.get('worst', 0):.3g}, repeats: {x.get('repeats')}")
                lines.append(f"  FAILED {name}: {what}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the remaining problems; return 1 if a kernel fails, 2 if none can run, 3 to resume."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.verify", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for a copy")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit; the next call resumes"
    )
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not kernels.available() or (device.type == "cpu" and not kernels.uses_interpreter()):
        print("No kernel can run here: there is no GPU, or no Triton. With TRITON_INTERPRET=1")
        print("some tiny problems run on the CPU.")
        return 2
    end = time.monotonic() + 60 * options.minutes

    def late() -> bool:
        return time.monotonic() > end

    record = Record(device, options.output)
    if device.type == "cpu":
        print("Tiny problems run in Triton's interpreter, on the CPU.")
    if not try_all(record, device, late):
        print("This problem made the GPU unusable. Run the same command again for the others.")
        return 3
    print(report(record.data))
    if late():
        print("The time is up. Run the same command again to resume.")
        return 3
    return int(not all(x["agrees"] and x["repeats"] for x in record.data["trials"].values()))


def try_all(record: Record, device: torch.device, late: Callable[[], bool]) -> bool:
    """Run the problems that are not in the record; return whether the device is still usable."""
    for trial in problems(device):
        if str(trial) not in record.data["trials"] and not late():
            print(f"try: {trial}", file=sys.stderr, flush=True)
            record.keep(str(trial), try_one(trial, device))
            if device.type == "cuda" and not usable(device):
                return False
    return True


if __name__ == "__main__":
    sys.exit(main())
