"""The functions that chapter P derives, compared with public code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from derived_attention import plugs
from derived_book.tasks.model import sinusoids

plugs.mend_torchvision()

from transformers import LlamaConfig  # noqa: E402
from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

PAGE = Path(__file__).parents[1] / "book" / "positions.md"
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)^```", re.M | re.S)
NAMES = ("sinusoidal", "alibi_slopes", "rotary", "rotary_halves", "neighbours")


def of_the_page():
    """Return each function as the page defines it last; for an exercise, that is the solution."""
    found = {"torch": torch}
    for code in CELL.findall(PAGE.read_text("utf8")):
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.FunctionDef) and statement.name in NAMES:
                exec(ast.unparse(statement), found)
    return found


FOUND = of_the_page()
sinusoidal, alibi_slopes, rotary, rotary_halves, neighbours = (FOUND[name] for name in NAMES)


@pytest.mark.parametrize("D", [4, 8, 64])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_rotary_is_that_of_llama_with_neighbours_for_pairs(D, base):
    size = {"hidden_size": 4 * D, "num_attention_heads": 4, "head_dim": D}
    config = LlamaConfig(**size, rope_parameters={"rope_type": "default", "rope_theta": base})
    q, k = torch.randn(2, 3, 4, 12, D)
    places = torch.arange(100, 112)
    cos, sin = LlamaRotaryEmbedding(config)(q, places[None].expand(3, -1))
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    for x, turned in zip((q, k), theirs, strict=True):
        ours = rotary(neighbours(x).double(), places.double(), base)
        assert (ours - neighbours(turned)).abs().max() < 1e-4  # their angles are float32
        if base == 10_000.0:
            assert (rotary_halves(x.double(), places.double()) - turned).abs().max() < 1e-4
    wrong = rotary(q.double(), places.double(), base)  # without the change of layout
    assert (wrong @ rotary(k.double(), places.double(), base).mT).sub(
        theirs[0] @ theirs[1].mT
    ).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotary_keeps_the_type_of_its_input_and_passes_gradients(dtype):
    x = torch.randn(2, 3, 5, 8, dtype=dtype, requires_grad=True)
    turned = rotary(x, torch.arange(5.0))
    assert turned.dtype == dtype and turned.shape == x.shape
    turned.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())  # lengths are kept


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_slopes_are_those_of_bloom_and_give_its_weights(heads):
    n = 9
    theirs = build_alibi_tensor(torch.ones(2, n), heads, torch.float64).view(2, heads, 1, n)
    slopes = alibi_slopes(heads)
    torch.testing.assert_close(theirs[0, :, 0, 1], slopes, rtol=1e-6, atol=0)  # float32 slopes
    S = torch.randn(heads, n, n, dtype=torch.float64)
    places = torch.arange(n).double()
    age = places[:, None] - places
    ours = S - slopes[:, None, None] * age
    future = age < 0
    weights = [z.masked_fill(future, -torch.inf).softmax(-1) for z in (ours, S + theirs[0])]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


def test_sinusoids_are_those_of_the_package():
    assert (sinusoidal(40, 12) - sinusoids(40, 12)).abs().max() < 1e-5  # theirs are float32
