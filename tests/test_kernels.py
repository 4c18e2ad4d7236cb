"""Who runs a kernel, and what the compiler makes of all of them without a GPU."""

import pytest
import torch

from derived_attention import kernels

Q = torch.zeros(1, 2, 4, 8)


def test_nobody_s_choice_is_the_tensors():
    assert kernels.interpreted() is not torch.cuda.is_available()
    assert not kernels.chosen(None, Q) and not kernels.chosen(False, Q), "not by the interpreter"
    assert kernels.chosen(True, Q) is True


@pytest.mark.parametrize("wrong", [1, "yes"])
def test_fused_is_a_flag_or_nothing(wrong):
    with pytest.raises(TypeError, match=f"fused is of type {type(wrong).__name__}"):
        kernels.chosen(wrong, Q)


@pytest.mark.parametrize(
    ("what", "found"),
    [("interpreted", "q is on cpu"), ("available", "no Triton")],
)
def test_who_insists_hears_what_is_missing(monkeypatch, what, found):
    monkeypatch.setattr(kernels, what, lambda: False)
    with pytest.raises(ValueError, match=f"fused is True, and .*{found}"):
        kernels.chosen(True, Q)
    assert kernels.chosen(None, Q) is False


def test_compilers_and_transforms_get_what_they_can_look_into():
    seen = []

    def look(q):
        seen.append(kernels.chosen(None, q))
        with pytest.raises(ValueError, match="torch.func"):
            kernels.chosen(True, q)
        return q

    torch.func.vmap(look)(Q)
    assert seen == [False]
