"""Self-checks wait for an answer, accept right answers and explain wrong ones."""

import numpy as np
import pytest
import torch

from derived_book.exercises import ExerciseError, Once, check, check_properties, largest_tensor
from exercises import BOOK, read_exercises


def test_a_placeholder_is_not_an_error(capsys):
    check(..., 1.0)
    assert "Not attempted yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        *((0.5, 1 / 2), (np.eye(2), np.eye(2)), (True, True), ("row", "row")),
        *(((1, [2.0]), (1, [2.0])), ([-np.inf, 1.0], [-np.inf, 1.0])),
        (torch.ones(2, dtype=torch.bfloat16), np.ones(2)),
        (torch.tensor([1j]).conj().imag, [-1.0]),
    ],
)
def test_right_answers_pass(answer, expected, capsys):
    check(answer, expected)
    assert capsys.readouterr().out == "Correct.\n"


def test_functions_are_compared_on_all_cases(capsys):
    check(lambda a: a + a, lambda a: 2 * a, on=[(1.0,), (np.arange(3),)])
    assert "Correct" in capsys.readouterr().out
    with pytest.raises(ExerciseError, match="case 2 of 2"):
        check(lambda a: a**2, lambda a: 2 * a, on=[(2.0,), (3.0,)])


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (0.6, 0.5, "has error"),
        (float("nan"), 0.5, "has error"),
        ([1.0, 2.0], 1.0, "has shape"),
        (False, True, "is not right"),
        ("column", "row", "is not right"),
        (1.0, (1.0, 2.0), "expected a tuple of 2"),
        ((1.0, 3.0), (1.0, 2.0), "part 2"),
        ("0.5", 0.5, "your answer is '0.5'; expected a number or an array"),
        ([0.5, None], np.ones(2), "expected a number or an array"),
        (np.array([1 + 5j]), np.array([1.0]), "expected a number or an array"),
        (np.array([1, 2]), True, "is not right"),
        (np.inf, -np.inf, "has error"),
        (torch.tensor([1j]).conj(), [1.0], "expected a number or an array"),
    ],
)
def test_wrong_answers_are_explained(answer, expected, message):
    with pytest.raises(ExerciseError, match=message):
        check(answer, expected)


def test_a_value_where_a_function_is_expected_is_explained():
    with pytest.raises(ExerciseError, match="expected a function"):
        check(3.0, lambda a: a, on=[(1.0,)])
    with pytest.raises(ExerciseError, match="case 1 of 1 is None; expected a number or an array"):
        check(lambda a: None, lambda a: a, on=[(1.0,)])


# --- properties ----------------------------------------------------------------------------------


def is_odd(f):
    """f(-x) = -f(x)"""
    for x in (0.0, 1.0, 3.0):
        yield f"x = {x}", f(-x) + f(x)


def is_near(f):
    """f is near 1
    at random places"""
    for _ in range(3):
        x = torch.rand(2)
        yield "two numbers", (f(x) - 1).abs() < 0.5


def test_properties_wait_pass_and_name_what_fails(capsys):
    check_properties(..., is_odd)
    assert "Not attempted yet" in capsys.readouterr().out
    check_properties(lambda x: x**3, is_odd)
    assert capsys.readouterr().out == "Correct.\n"
    message = r"f\(-x\) = -f\(x\) \(x = 1.0\): it is off by 2; expected at most 1e-08"
    with pytest.raises(ExerciseError, match=message):
        check_properties(lambda x: x**2, is_odd)
    with pytest.raises(ExerciseError, match="f is near 1 at random places \\(two numbers"):
        check_properties(lambda x: 2 + x, is_near)
    with pytest.raises(ExerciseError, match="after the case x = 0.0. ZeroDivisionError"):
        check_properties(lambda x: 1 / x if x else 0.0, lambda_with_zero)


def lambda_with_zero(f):
    """f is finite"""
    yield "x = 0.0", f(0.0)
    yield "nothing", 1 / 0


def test_a_property_has_a_statement_and_a_case():
    with pytest.raises(ValueError, match="has no docstring; expected its statement"):
        check_properties(1, lambda answer: [("a case", True)])

    def empty(answer):
        """It holds."""
        return []

    with pytest.raises(ValueError, match="yields no case"):
        check_properties(1, empty)
    with pytest.raises(ValueError, match="properties is empty; expected at least one"):
        check_properties(1)


@pytest.mark.parametrize("property_", [is_odd, is_near])
def test_an_empty_answer_has_no_property(property_):
    with pytest.raises(ExerciseError, match=r"\): the answer is empty; expected numbers"):
        check_properties(lambda x: torch.empty(0, 1), property_)


def test_draws_are_the_same_each_time_and_leave_the_generator():
    seen = []

    def draws(answer):
        """Numbers are drawn."""
        seen.append(torch.rand(3))
        yield "three", True

    state = torch.get_rng_state()
    check_properties(1, draws)
    torch.rand(1)
    check_properties(1, draws)
    assert torch.equal(*seen)
    torch.set_rng_state(state)
    first = torch.rand(1)
    torch.set_rng_state(state)
    check_properties(1, draws)
    assert torch.equal(torch.rand(1), first)


def test_an_iterator_sees_what_is_kept():
    def pairs():
        return Once(lambda i: (float(i), torch.full((2,), i)), 50)

    kept = pairs()
    list(kept)
    assert kept.kept == 50
    read = pairs()
    total = sum(s * v.sum().item() for s, v in read)
    assert total == sum(2 * i * i for i in range(50)) and read.kept <= 2
    assert list(read) == []


def test_the_largest_tensor_is_the_matrix_that_is_formed():
    x = torch.randn(7, 2)
    assert largest_tensor(lambda a: a @ (a.T @ a), x) == 14
    assert largest_tensor(lambda a: (a @ a.T) @ a, x) == 49


SINK = """def with_sink(q, k, v, b):
    scale = q.shape[-1] ** -0.5
    one, nothing = q.new_ones(len(q), 1), k.new_zeros(len(k), 1)
    sink = torch.cat([q.new_zeros(1, q.shape[-1]), q.new_full((1, 1), b / scale)], 1)
    Q, K = torch.cat([q, one], 1), torch.cat([torch.cat([k, nothing], 1), sink])
    V = torch.cat([v, v.new_zeros(1, v.shape[-1])])
    return F.scaled_dot_product_attention({}, scale=scale){}"""
MASK = """def with_sink(q, k, v, b):
    K, V = (torch.cat([x, 0 * x[:1]]) for x in (k, v))
    mask = torch.cat([q.new_zeros(1, len(k)), q.new_full((1, 1), b)], 1)
    return F.scaled_dot_product_attention({}, mask){}"""
DIRECT = "import torch.nn.functional as F\n"
RIGHT = [
    ("16_what_to_keep", "ex-16-sdpa", form.format(arguments, index))
    for form, names in ((SINK, "QKV"), (MASK, "qKV"))
    for arguments, index in (
        (", ".join(names), ""),
        (", ".join(f"{x}[None]" for x in names), "[0]"),
        (", ".join(f"{x}[None, None]" for x in names), "[0, 0]"),
    )
] + [
    (
        "05_normalise_and_scale",
        "ex-05-common",
        f"{DIRECT}own_attention = lambda q, k, v: "
        "F.scaled_dot_product_attention(q - q.mean(-2, keepdim=True), k, v)",
    ),
    (
        "05_normalise_and_scale",
        "ex-05-causal",
        f"{DIRECT}def causal_bn(q, k, v, beta):\n"
        "    mean = k.cumsum(-2) / torch.arange(1, k.shape[-2] + 1)[:, None]\n"
        "    return F.scaled_dot_product_attention(q - beta * mean, k, v, is_causal=True)",
    ),
]


@pytest.mark.parametrize(("page", "label", "answer"), RIGHT)
def test_other_right_answers_pass_whatever_pytorch_s_attention_forms(page, label, answer, capsys):
    (exercise,) = (x for x in read_exercises(BOOK / f"{page}.md") if x.label == label)
    exec("\n".join([*exercise.needed, exercise.before, answer, exercise.test]), {})
    assert capsys.readouterr().out == "Correct.\n"


def test_a_matrix_around_pytorch_s_attention_counts():
    x = torch.randn(1, 9, 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert largest_tensor(lambda: attention(x, x, x)) == 18
    assert largest_tensor(lambda: attention(x, x, x, x.new_zeros(9, 9))) == 81
    assert largest_tensor(lambda: attention(x, x, torch.eye(9)[None])) == 81
