"""The examples in docstrings of public names run unchanged; the names' types are declared."""

import doctest
import runpy

import pytest
import torch

import derived_attention as da
from derived_attention.registry import MECHANISMS

FUNCTIONS = {entry.fast.__name__ for entry in MECHANISMS.values()}
NEEDED = FUNCTIONS | {"MultiheadAttention", "check_mechanism", "ksvd_objectives"}
NEEDED |= {"uniform_attention", "identity_attention"}


def test_all_public_names_are_listed():
    assert da.__all__ == sorted(da.places()) and NEEDED <= {*da.__all__}
    stub = runpy.run_path(da.__file__ + "i")  # __init__.pyi must list new names, too
    assert {*da.__all__} <= {*stub, *stub["__annotations__"]}
    assert all(stub[x] is getattr(da, x) for x in da.__all__ if x in stub and x != "get_attention")


@pytest.mark.parametrize("name", da.__all__)
def test_examples_of_docstrings_run(name):
    thing = getattr(da, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        thing, name, globs={"torch": torch} | {x: getattr(da, x) for x in da.__all__}
    )
    assert test.examples or name not in NEEDED
    said = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)
