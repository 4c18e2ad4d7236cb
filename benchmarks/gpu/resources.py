"""What kernels use of a GPU, compiled ahead of time: no GPU and no driver are needed.

``python -m benchmarks.gpu.resources`` prints a line of JSON for each kernel.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.kernels import HEAD_DIMS, NAMES, Launch

ARCHITECTURES = (80, 90)  # compute capabilities: A100, and H100
DTYPES = (torch.bfloat16, torch.float32)


def usage(launch: Launch, capability: int) -> dict[str, int]:
    """Compile a kernel; return its registers a thread, and bytes of shared memory and of spills."""
    import triton

    compiled = compile_for(launch, capability)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        int(re.findall(rf"\b{x}:(\d+)", text)[-1]) for x in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "shared": compiled.metadata.shared, "spills": stack + local}


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


def main() -> int:
    """Print what each kernel takes on each architecture, for both head dimensions and dtypes."""
    from derived_attention.linear.triton import launches

    for dim, dtype, capability in itertools.product(HEAD_DIMS, DTYPES, ARCHITECTURES):
        for launch in launches(dim, dtype, capability == 90):
            what = {"kernel": launch.name, "D": dim, "dtype": NAMES[dtype], "sm": capability}
            print(json.dumps(what | usage(launch, capability)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
