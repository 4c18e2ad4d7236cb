"""Whether a kernel is to be trusted here: it was tried on this GPU, by this Triton and PyTorch.

The first call that would run a kernel tries it on a small random problem of the same kind: a
`Trial`, with the same dtype, widths, components and kind of mask. Where the kernel does not
compile, or is less exact than it has to be, PyTorch's form runs from then on, and one warning says
what to report. What came out is kept, in the process and in a file in the user's cache folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.files import cache_dir, write_atomically
from derived_attention.common.kernel_cases import Trial, compare
from derived_attention.common.kernels import versions

SOURCES = ("common", "linear", "sparse", "delta")
_verdicts: dict[tuple[torch.device, Trial], str] = {}  # of this process: why not, or nothing


def is_trusted(trial: Trial, device: torch.device, first: bool = True) -> bool:
    """Return whether a kernel agrees with PyTorch's form on a device; try it if nobody has.

    Unless this may be the `first` call of the kind, one that nobody has tried is not trusted.

    Warns
    -----
    RuntimeWarning
        Where it does not, once in a process for each kind of problem.

    Raises
    ------
    RuntimeError
        If the trial has left the GPU unable to compute in this process, as a wrong address does.
        That kernel is not tried again, so that the next process runs PyTorch's form.
    """
    if (key := (device, trial)) in _verdicts:  # cheap, because every call comes here
        return not _verdicts[key]
    name = place_of(device)
    fault = _read(device).get(str(trial))
    if fault is None and not first:
        return False
    if fault is None:
        try:
            fault = fault_of(trial, device)
        except torch.OutOfMemoryError:
            return False  # says nothing of the kernel: another call may try it
        _write(device, _read(device) | {str(trial): fault})
    _verdicts[key] = fault
    if fault and not usable(device):
        raise RuntimeError(
            f"{trial.engine} for {trial} {fault}, on {name}, and this process cannot use the "
            "GPU any more. Start it again: PyTorch's form will run in the kernel's place. "
            "Please report this line."
        )
    if fault:
        warnings.warn(
            f"{trial.engine} for {trial} {fault}, on {name}. PyTorch's form runs in its place. "
            "Please report this line, with what `python -m benchmarks.gpu.verify` "
            "prints.",
            RuntimeWarning,
            stacklevel=2,
        )
    return not fault


def fault_of(trial: Trial, device: torch.device) -> str:
    """Try a kernel, and return what is wrong with it, or nothing."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.device("cpu"),  # not the default that the caller has set
    ):
        try:
            found = compare(trial, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's compiler, its launcher and PTX have many
            lines = str(error).strip().splitlines() or [""]
            return f"does not run ({type(error).__name__}: {lines[0][:200]})"
    if found.agrees:
        return ""
    return f"is not exact enough (its error is {found.worst:.3g} of what it may be)"


def usable(device: torch.device) -> bool:
    """Return whether a GPU can still compute in this process, not so after a wrong address."""
    try:
        return bool(torch.ones(1, device=device).sum() == 1)
    except RuntimeError:
        return False


def place_of(device: torch.device) -> str:
    """Name a device, the compilers and the kernels' source, as a file may be called."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    words = [name, *(f"{x} {y}" for x, y in versions().items()), f"kernels {digest()}"]
    return ", ".join(words)


@functools.cache
def digest() -> str:
    """Return a digest of the kernels' source: other kernels are to be tried again."""
    root, sha = Path(__file__).parents[1], hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).glob("*.py")):
            sha.update(file.read_bytes())
    return sha.hexdigest()[:12]


def file_of(kind: str, device: torch.device) -> Path:
    """Return the file that keeps something of a device between processes."""
    words = f"{kind}, {place_of(device)}.json"
    return cache_dir("kernels") / words.replace("/", "-").replace(", ", "_").replace(" ", "-")


def _read(device: torch.device) -> dict[str, str]:
    try:
        found: Any = json.loads(file_of("trusted", device).read_text("utf8"))
    except (OSError, ValueError, RuntimeError):  # the last one: the user has no home folder
        return {}
    return found if isinstance(found, dict) else {}


def _write(device: torch.device, verdicts: dict[str, str]) -> None:
    text = json.dumps(verdicts, indent=1, sort_keys=True)
    try:
        write_atomically(file_of("trusted", device), text.encode())
    except (OSError, RuntimeError):  # then the next process tries again
        return
