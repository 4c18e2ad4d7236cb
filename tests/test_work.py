"""What the kernels have to do, counted by hand."""

import pytest
from helpers import needs_triton

from benchmarks.work import WORK


def test_two_components_cost_less_than_two_heads():
    """Of the operations of twice as many heads of softmax attention, forward."""
    sizes = {"B": 2, "H": 4, "N": 100, "M": 300, "D": 64}
    count = WORK["mgk"](**sizes)
    heads = 4 * 2 * (2 * 4) * 100 * 300 * 64
    assert count["forward"].operations == 0.75 * heads
    assert count["forward + backward"].operations == (0.75 + 11 / 4) * heads
    assert WORK["smgk"](**sizes)["forward"].operations == 0.5 * heads
    causal = WORK["mgk"](**sizes, is_causal=True)["forward"]
    assert causal.operations == pytest.approx(0.75 * heads * 101 / 600)


@needs_triton
def test_a_segment_a_head_has_no_states_and_their_number_is_bounded():
    sizes = {"B": 1, "H": 1000, "N": 4096, "M": 4096, "D": 64}
    count = WORK["linear"](**sizes)
    forward, whole = count["forward"], count["forward + backward"]
    assert forward.bytes == 1000 * 4096 * (4 * 64 * 2 + 4)
    assert forward.operations == 1000 * 4096 * (2 * 2 * 64 * 64 + 2 * 64 * (64 + 64))
    assert whole.bytes == forward.bytes + 1000 * 4096 * (13 * 64 * 2 + 6 * 4)
    short, long = (
        WORK["linear"](**sizes | {"H": 1, "N": n, "M": n})["forward"].bytes for n in (2**17, 2**19)
    )
    assert 3 * short < long < 4 * short


def test_five_steps_of_the_lasso_are_20_products_forward_and_72_backward():
    N, D = 2**20, 64
    sizes = {"B": 2, "H": 3, "N": N, "M": N, "D": D}
    count = WORK["lasso"](**sizes)
    product = 2 * 6 * N * N * D
    assert count["forward"].operations / product == pytest.approx(20, rel=1e-3)
    assert count["forward + backward"].operations / product == pytest.approx(92, rel=1e-3)
    causal = WORK["lasso"](**sizes, is_causal=True)["forward"]
    assert causal.operations / product == pytest.approx(10, rel=1e-3)
