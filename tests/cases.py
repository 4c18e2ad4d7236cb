"""Test cases of the mechanism contract, re-exported for other tests."""

from __future__ import annotations

from helpers import assert_all_close

from derived_attention.testing.cases import Case as Case
from derived_attention.testing.cases import M as M
from derived_attention.testing.cases import N as N
from derived_attention.testing.cases import added as added
from derived_attention.testing.cases import keys_of as keys_of
from derived_attention.testing.cases import variants as causality_of  # noqa: F401


def assert_forms_agree(name, what, tol=1e-10, **changed):
    case = Case(name, **changed)
    assert_all_close(case.results("fast"), case.results("reference"), tol, f"{name}, {what}")
