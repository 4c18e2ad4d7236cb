"""The number of the library's calls between a public call and its first matrix product."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import derived_attention
from derived_attention.registry import MECHANISMS

LIBRARY = str(Path(derived_attention.__file__).parent)
ATTENDS = {"bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"}
PRODUCTS = ATTENDS | {"mm", "addmm"}
N, H, D = 64, 4, 16
MOST = 20
LONG = 600  # too many tokens for a short form: forms by blocks call more functions
MORE = {"window": 31, "strided": 42, "fixed": 33, "fmm": 40, "mra": 29, "mgk": 29, "hard_mgk": 54}


class FirstProduct(TorchDispatchMode):
    """Stops a function at its first matrix product."""

    class Reached(Exception):
        """Raised there."""

    def __init__(self, products):
        super().__init__()
        self.products = products

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__ in self.products:
            raise self.Reached
        return operator(*args, **(kwargs or {}))


def calls_to_product(function, *args, products=PRODUCTS, **options):
    """Return the names of the functions of the library that are called before the product."""
    names = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            names.append(frame.f_code.co_name)

    with pytest.raises(FirstProduct.Reached), FirstProduct(products):
        sys.setprofile(note)
        try:
            function(*args, **options)
        finally:
            sys.setprofile(None)
    return names


def inputs(entry, N=N):
    q = torch.randn(2, H, N, D, requires_grad=True)
    return q, entry.keys(torch.randn(2, H, N, D)), torch.randn(2, H, N, D)


@pytest.mark.parametrize("N", [N, LONG])
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_reaches_its_first_product_in_few_calls(name, N):
    entry = MECHANISMS[name]
    for is_causal in [False, True] if entry.causal else [False]:
        options = entry.options(N, H, D) | {"is_causal": is_causal}
        entry.fast(*inputs(entry, N), **options)  # fill the caches first
        names = calls_to_product(entry.fast, *inputs(entry, N), **options)
        most = MOST if N < LONG else MORE.get(name, MOST + 4)
        assert len(names) <= most, names


def test_the_layer_reaches_the_product_of_queries_and_keys_in_25_calls():
    layer, x = MECHANISMS["softmax"].make_layer(H * D, H, N), torch.randn(2, N, H * D)
    names = calls_to_product(layer, x, x, x, products=ATTENDS, need_weights=False)
    assert len(names) <= 25, names


def test_calls_are_counted():
    q = torch.randn(1, 2, 3, 4)
    names = calls_to_product(MECHANISMS["softmax"].fast, q, q, q)
    assert names[0] == "attend" and names[-1] == "sdpa"
