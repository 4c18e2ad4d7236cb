"""Registers and shared memory of kernels that are compiled ahead of time, without a GPU or driver.

``python -m benchmarks.gpu.resources`` prints a line of JSON for each kernel and architecture.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from derived_attention.common.kernels import NAMES

ARCHITECTURES = (80, 90)  # compute capabilities: A100, and H100
DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 128)  # others are padded to a power of two
TYPES = {"N": "i32", "M": "i32", "H": "i32", "count": "i32", "priors_h": "i32", "scale": "fp32"}
TYPES |= dict.fromkeys(("priors", "states", "scales", "slopes", "dpriors"), "*fp32")
STRIDE = "i32:16"  # a multiple of 16, as the strides of rows are


@dataclass(frozen=True)
class Launch:
    """A kernel with everything that its compiler needs, and without data.

    `arguments` maps each argument to its type in Triton's notation: ``"*bf16"``, ``"i32"``, or
    ``"constexpr"`` for those in `constants`.
    """

    name: str  # in the output
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


def launches(head_dim: int, dtype: torch.dtype) -> list[Launch]:
    """Return the kernels as `linear_attention` launches them."""
    from derived_attention.linear import triton as linear

    options = linear.Options(1.0, True, True, dtype)
    values = min(head_dim, linear.values_at_once(head_dim, options))
    sizes = linear.tile_width(head_dim), linear.tile_width(values), options
    tensors = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    types = TYPES | dict.fromkeys(tensors, f"*{NAMES[dtype]}")
    names = "key_states accumulate outputs query_gradients query_states key_gradients"
    found = []
    for name in names.split():
        kernel = getattr(linear, f"_{name}")
        constants = linear._constants(head_dim, values, 1, options, False) | {"REVERSE": True}
        constants |= linear.blocks(*sizes, kernel in linear.BACKWARD)
        known = {x: constants[x] for x in kernel.arg_names if x in constants}
        kinds = types | dict.fromkeys(known, "constexpr")
        arguments = {x: kinds.get(x, STRIDE) for x in kernel.arg_names}
        how = constants["num_warps"], constants["num_stages"]
        found.append(Launch(f"linear_{name}", kernel, arguments, known, *how))
    return found


def usage(launch: Launch, capability: int) -> dict[str, int]:
    """Compile a kernel; return registers per thread, and bytes of shared memory and of spills."""
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
    """Return a kernel compiled by Triton, with PTX and a cubin in its ``asm``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(launch.arguments)
    # Pointers are multiples of 16 bytes, as in PyTorch; strides typed ":16" are multiples of 16.
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
    """Print the use of each kernel on each architecture, for both head dimensions and dtypes."""
    for dim, dtype, capability in itertools.product(HEAD_DIMS, DTYPES, ARCHITECTURES):
        for launch in launches(dim, dtype):
            what = {"kernel": launch.name, "D": dim, "dtype": NAMES[dtype], "sm": capability}
            print(json.dumps(what | usage(launch, capability)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
