"""What the Triton kernels of all families share: tiles of matrices, their products, what is hidden.

A tile is some rows of a matrix ``(length, COLUMNS)``, from the row `start` on, padded with zeros to
``(ROWS, WIDTH)``, two powers of two. A program has one block of the rows of one head, and meets the
rows of other matrices tile by tile: scores are products of tiles that no memory holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from derived_attention.common.kernels import uses_interpreter

INTERPRETED = tl.constexpr(uses_interpreter())


@triton.jit
def place(length, BLOCK: tl.constexpr):
    """Return the head of a program, in 64 bits, and the first row of its block of `length`."""
    blocks = tl.cdiv(length, BLOCK)
    return (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK


@triton.jit
def _tile(x, start, length, stride, COLUMNS, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return pointers to a tile, and which of them are within the matrix."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    within = (rows < length - start)[:, None]
    if COLUMNS < WIDTH:
        within = within & (columns < COLUMNS)[None, :]
    first = x + tl.cast(start, tl.int64) * stride  # the rest is the same for all blocks
    return first + rows[:, None] * stride + columns[None, :], within


@triton.jit
def load_rows(x, start, length, stride, COLUMNS, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile, with zeros beyond the matrix."""
    at, within = _tile(x, start, length, stride, COLUMNS, ROWS, WIDTH)
    return tl.load(at, within, other=0.0)


@triton.jit
def store_rows(x, tile, start, length, COLUMNS, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store a tile of a contiguous matrix, in its dtype."""
    at, within = _tile(x, start, length, COLUMNS, COLUMNS, ROWS, WIDTH)
    tl.store(at, tile.to(x.dtype.element_ty), within)


@triton.jit
def load_numbers(x, start, length, other, SIZE: tl.constexpr):
    """Load SIZE entries of a vector ``(length,)``, with `other` beyond them."""
    each = tl.arange(0, SIZE)
    return tl.load(x + start + each, each < length - start, other=other)


@triton.jit
def store_numbers(x, numbers, start, length, SIZE: tl.constexpr):
    """Store SIZE entries of a vector ``(length,)``."""
    each = tl.arange(0, SIZE)
    tl.store(x + start + each, numbers, each < length - start)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """Return A B, added to `total` unless it is None; half precision is summed in float32."""
    ACC: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    if INTERPRETED and a.dtype == tl.bfloat16:  # the interpreter would multiply its bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    ROUNDED: tl.constexpr = PRECISION == "rounded"
    if ROUNDED:
        a, b = _nearest(a), _nearest(b)
    return tl.dot(a, b, total, input_precision="tf32" if ROUNDED else PRECISION, out_dtype=ACC)


@triton.jit
def _nearest(x):
    """Round float32 to the nearest number of TF32: tensor cores cut off all further digits."""
    bits = x.to(tl.int32, bitcast=True) + 0x1000
    return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)


@triton.jit
def scores(q, k, total, PRECISION: tl.constexpr):
    """Return q_i·k_j of two tiles, added to `total` unless it is None."""
    return dot(q, tl.trans(k), total, PRECISION)


@triton.jit
def hide(x, i, j, CAUSAL: tl.constexpr, EXCLUDE: tl.constexpr):
    """Set to 0 what query i may not see of key j: j > i if causal, and j = i if excluded."""
    if CAUSAL:
        x = tl.where(j <= i - EXCLUDE, x, 0.0)
    elif EXCLUDE:
        x = tl.where(j != i, x, 0.0)
    return x


def launch(
    kernel: Any, grid: tuple[int, ...], device_of: Tensor, arguments: Mapping[str, Any]
) -> None:
    """Run that many programs of a kernel, with those of the arguments that it takes."""
    names = (*kernel.arg_names, "num_warps", "num_stages")
    with torch.cuda.device_of(device_of):
        kernel[grid](**{name: arguments[name] for name in names})


def tile_width(size: int, least: int = 16) -> int:
    """Return the width of a tile for a size: a power of two, at least 16 for a product."""
    return max(least, triton.next_power_of_2(size))


def narrowest(dtype: torch.dtype, device: torch.device) -> int:
    """Return the least width of tiles that are multiplied in a dtype on a device.

    On GPUs of compute capability 9.0 (Hopper) tiles of half precision are 64 wide at least. The
    assembler that comes with Triton 3.5 to 3.7, of CUDA 12.8, computes the address of a narrower
    factor wrong where it does not change in a loop: results are wrong, or memory is missed.
    """
    return 64 if dtype.itemsize == 2 and is_hopper(device) else 16


def is_hopper(device: torch.device) -> bool:
    """Return whether a device has compute capability 9.0, as the H100 and the H200 have."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def precision(dtype: torch.dtype | None = None) -> str:
    """Return how products of float32 are taken: as PyTorch takes its own.

    TF32 has the digits of float16, so tensors of that dtype always get it, rounded to nearest.
    """
    if dtype == torch.float16:
        return "rounded"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
