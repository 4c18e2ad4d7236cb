"""What kernels use of a GPU, compiled ahead of time: no GPU and no driver are needed.

``python -m benchmarks.gpu.resources`` prints a line of JSON for each kernel.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.kernels import HEAD_DIMS, Launch

MODULES = ("linear", "mixture", "splitting")  # each with a function `launches`


@dataclass(frozen=True)
class Architecture:
    """What a multiprocessor has, by the CUDA C++ Programming Guide's table of capabilities."""

    capability: int
    shared: int  # bytes a multiprocessor has
    block_shared: int  # bytes a block may have of it
    registers: int = 65536
    warps: int = 64
    blocks: int = 32

    def resident(self, registers: int, shared: int, num_warps: int) -> int:
        """Return how many warps of a kernel a multiprocessor holds at once."""
        by_warp = -(-registers * 32 // 256) * 256  # registers are given to a warp 256 at a time
        limits = [self.blocks, self.warps // num_warps, self.registers // (by_warp * num_warps)]
        limits.append(self.shared // (shared + 1024))  # the system takes 1 KiB of each block
        return min(limits) * num_warps


ARCHITECTURES = {
    80: Architecture(80, 164 * 1024, 163 * 1024),  # A100
    86: Architecture(86, 100 * 1024, 99 * 1024, warps=48, blocks=16),  # A10, A40, RTX 30
    89: Architecture(89, 100 * 1024, 99 * 1024, warps=48, blocks=24),  # L4, L40, RTX 40
    90: Architecture(90, 228 * 1024, 227 * 1024),  # H100, H200
}
PRINTED = (80, 90)


@dataclass(frozen=True)
class Usage:
    """What a kernel takes: registers a thread, bytes of shared memory a block, bytes of spills."""

    kernel: str
    capability: int
    head_dim: int
    dtype: str
    num_warps: int
    registers: int
    shared: int
    spills: int
    resident: int  # warps on a multiprocessor, of 64


def launches(head_dim: int, dtype: torch.dtype, capability: int) -> Iterator[Launch]:
    """Yield all kernels as they are launched on an architecture, for so many features a head."""
    for name in MODULES:
        yield from importlib.import_module(f"derived_attention.{name}.triton").launches(
            head_dim, dtype, capability == 90
        )


def usage(launch: Launch, capability: int, head_dim: int, dtype: str) -> Usage:
    """Compile a kernel for an architecture, and read what it takes from the machine code."""
    compiled = compile_for(launch, capability)
    registers, stack, local = _resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    here = ARCHITECTURES[capability]
    return Usage(
        launch.name,
        capability,
        head_dim,
        dtype,
        launch.num_warps,
        registers,
        shared,
        stack + local,
        here.resident(registers, shared, launch.num_warps),
    )


def compile_for(launch: Launch, capability: int) -> Any:
    """Return what Triton's compiler makes of a kernel: PTX and a cubin in its ``asm``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(launch.arguments)
    # Pointers are multiples of 16 bytes, as PyTorch's are, and so are strides typed ":16".
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if launch.arguments[n][0] == "*" or launch.arguments[n].endswith(":16")
    }
    source = ASTSource(
        fn=launch.kernel,
        signature={n: kind.removesuffix(":16") for n, kind in launch.arguments.items()},
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs=aligned,
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Return registers a thread, and bytes of stack and of local memory, as cuobjdump has them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.findall(rf"\b{x}:(\d+)", text)[-1]) for x in ("REG", "STACK", "LOCAL")
    )
    return registers, stack, local


def main() -> int:
    """Print what each kernel takes on two architectures, for both head dimensions."""
    for head_dim in HEAD_DIMS:
        for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
            for capability in PRINTED:
                for launch in launches(head_dim, dtype, capability):
                    print(json.dumps(asdict(usage(launch, capability, head_dim, name))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
