"""Kernels under torch.compile: in the graph, with the values and gradients of eager mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from helpers import NO_TRITON, assert_all_close, needs_inductor, tensors
from torch._dynamo import lookup_backend
from torch.autograd import forward_ad

from derived_attention import get_attention, linear_attention
from derived_attention.common import kernel_cases, kernel_selftest, kernels
from derived_attention.common.kernel_cases import Trial
from derived_attention.mixture.layer import MixtureAttention

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.linear import triton as linear

# Dynamo ignores the cache of a function that it traces, and warns: it must trace none.
pytestmark = pytest.mark.filterwarnings("error:.*lru_cache")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOL = ("fp32", 1e-4) if DEVICE == "cuda" else ("fp64", 1e-12)
OPS = torch.ops.derived_attention
OPERATOR = OPS.causal_sums.default
SIZES = {"D": 5, "DV": 4, "own": True}
TRIALS = [
    Trial("linear", DTYPE, 70, 37, **SIZES, mask="causal", features=True),
    Trial("linear", DTYPE, 37, 70, **SIZES, mask="causal", strided=True),
    Trial("mlk", DTYPE, 70, 70, **SIZES, R=3, mask="causal"),
]


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


class Graphs:
    """A backend of torch.compile that collects the targets of the nodes of each graph."""

    def __init__(self, backend="eager"):
        self.inner, self.targets = lookup_backend(backend), []

    def __call__(self, graph, inputs):
        self.targets.append([node.target for node in graph.graph.nodes])
        return self.inner(graph, inputs)

    def compile(self, form, **options):
        return torch.compile(form, fullgraph=True, backend=self, **options)


def small(kernel, n=5, m=5, dtype=DTYPE, **sizes):
    """Return the tensors of a small causal problem, and the other arguments."""
    trial = Trial(kernel, dtype, n, m, D=2, DV=2, mask="causal", **sizes)
    return kernel_cases.inputs(trial, DEVICE)


def results(form, trial, **more):
    """Return the output, and the gradients of a weighted sum of it, by the kernel."""
    made, options = kernel_cases.inputs(trial, DEVICE)
    made = {x: y.detach().requires_grad_() for x, y in made.items()}
    out = form(**made, **{"fused": True} | options | more)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights.view_as(out)).sum(), list(made.values()))]


# --- values and gradients -------------------------------------------------------------------------


OTHERS = [
    (Trial("linear", "bf16", 19, 21, D=5, DV=4, mask="causal"), 1e-6, "aot_eager"),
    (Trial("mlk", "fp16", 19, 21, D=5, DV=4, mask="causal"), 1e-6, "aot_eager"),
    # Inductor compiles the code around the kernel, and may choose other strides there.
    pytest.param(
        Trial("mlk", "fp32", 17, 21, D=5, DV=4, mask="causal"), 1e-4, "inductor",
        marks=needs_inductor,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("trial", "tol", "backend"), [*((x, TOL, "aot_eager") for x in TRIALS), *OTHERS], ids=str
)
def test_a_graph_has_the_kernel_and_the_results_of_eager_mode(trial, tol, backend):
    form, graphs = get_attention(trial.kernel), Graphs(backend)
    compiled = graphs.compile(form)
    assert_all_close(results(compiled, trial), results(form, trial), tol)
    (targets,) = graphs.targets
    assert targets.count(OPERATOR) == 1


def test_a_layer():
    own = {"linear": True, "priors": "learned", "mixture": {"fused": True}}
    layer = MixtureAttention(8, 2, **own, device=DEVICE)
    x = tensors((2, 9, 8), dtype=torch.float32, device=DEVICE)[0]

    def run(form):
        out = form(x, x, x, need_weights=False, is_causal=True)[0]
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    graphs = Graphs()
    assert_all_close(run(graphs.compile(layer)), run(layer), 1e-5)
    assert OPERATOR in graphs.targets[0]


def test_autocast_computes_in_the_dtypes_of_eager_mode():
    trial = Trial("mlk", "fp32", 19, 21, D=5, DV=4, mask="causal")
    form = get_attention("mlk")

    def run(form):
        with torch.autocast(DEVICE, torch.bfloat16):
            return results(form, trial)

    ours = run(Graphs("aot_eager").compile(form))
    assert_all_close(ours, run(form), 1e-5)
    assert torch.equal(ours[0], results(form, trial)[0]), "autocast changes the output"


# --- PyTorch's rules for operators ----------------------------------------------------------------


def calls(trial, monkeypatch):
    """Return the arguments with which a mechanism calls the operator and its derivative."""
    seen = []
    run = linear._causal
    monkeypatch.setattr(linear, "_causal", lambda *x: (seen.append(x), run(*x))[1])
    results(get_attention(trial.kernel), trial)
    (inputs,) = seen
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    count = sum(x is None or isinstance(x, torch.Tensor) for x in given)
    out, *kept = OPERATOR(*given)
    needs = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs[:count]]
    learned = [x.requires_grad_(need) for x, need in zip(given, needs, strict=False) if need]
    assert learned
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view_as(out)
    without = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    return given, [grad, *without[:count], out, *kept, *without[count:], needs]


HALF = Trial("linear", "fp16", 19, 21, D=5, DV=4, mask="causal")


@pytest.mark.parametrize(
    "trial", [dataclasses.replace(x, H=1) for x in (*TRIALS[1:], HALF)], ids=str
)
def test_operators_are_what_they_say(trial, monkeypatch):
    """Check schema, fake tensors and autograd, and for mlk dynamic sizes as well."""
    forward, backward = calls(trial, monkeypatch)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    some = utilities + ("test_aot_dispatch_dynamic",) * (trial.kernel == "mlk")
    torch.library.opcheck(OPERATOR, forward, test_utils=some)
    learned = [x.requires_grad for x in OPERATOR(*forward)]
    assert learned == [True, False, False], "expected a derivative of the output only"
    name = f"{OPERATOR._schema.name.split('::')[1]}_backward"
    torch.library.opcheck(getattr(OPS, name).default, backward, test_utils=utilities)


# --- sizes ----------------------------------------------------------------------------------------


def test_lengths_need_no_graphs_of_their_own():
    form, graphs = get_attention("mlk"), Graphs("aot_eager")
    compiled = graphs.compile(form)
    for n in (150, 9, 70, 33):
        made, options = small("mlk", n, n, H=1)
        for x in "qkv":
            made[x] = made[x].detach().requires_grad_()
            torch._dynamo.mark_dynamic(made[x], made[x].dim() - 2)
        found = compiled(**made, **options, fused=True)
        beside = form(**made, **options, fused=False)
        torch.testing.assert_close(found, beside, rtol=TOL * 100, atol=TOL * 100)
    # Sequences of one segment have no earlier states, so these lengths share a second graph.
    assert len(graphs.targets) == 2
    assert all(OPERATOR in targets for targets in graphs.targets)


def test_an_exported_program_of_any_length_has_the_kernel():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return linear_attention(q, k, v, is_causal=True, fused=True)

    made = [[small("linear", n, n)[0][x] for x in "qkv"] for n in (70, 150)]
    sizes = [{x.dim() - 2: torch.export.Dim.DYNAMIC} for x in made[0]]
    program = torch.export.export(Model(), tuple(made[0]), dynamic_shapes=sizes, strict=False)
    assert OPERATOR in [node.target for node in program.graph.nodes]
    for x in made:
        torch.testing.assert_close(program.module()(*x), Model()(*x), rtol=TOL, atol=TOL)


# --- by default -----------------------------------------------------------------------------------


@pytest.fixture
def a_new_gpu(monkeypatch, tmp_path):
    """Imitate a GPU without tested kernels; the interpreter counts as a GPU."""
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)
    monkeypatch.setattr(kernels, "GPUS", (DEVICE,))
    monkeypatch.setattr(kernels, "TRIED", 20)


def test_by_default_a_graph_has_the_kernels_that_were_tried_before(a_new_gpu, monkeypatch):
    form = get_attention("mlk")
    trial = Trial("mlk", "fp32", 9, 21, D=5, DV=4, mask="causal")

    def has_kernel(**options):
        torch._dynamo.reset()
        graphs = Graphs()
        results(graphs.compile(form, **options), trial, fused=None)
        return OPERATOR in graphs.targets[0]

    compare = kernel_selftest.compare
    monkeypatch.setattr(
        kernel_selftest, "compare", None
    )  # no kernel is tested while a compiler traces
    assert not has_kernel() and not kernel_selftest._verdicts
    monkeypatch.setattr(kernel_selftest, "compare", compare)
    results(form, trial, fused=None)
    assert has_kernel() and has_kernel(dynamic=True)
    kernel_selftest._verdicts.clear()  # another process reads the stored verdicts
    assert has_kernel()
    kernel_selftest._verdicts.update(
        dict.fromkeys(kernel_selftest._verdicts, "is not exact enough")
    )
    assert not has_kernel()


# --- unsupported derivatives and transforms -------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "backend", "said"),
    [("linear", "eager", "once_differentiable"), ("mlk", "aot_eager", "double backward")],
)
def test_a_second_derivative_is_refused(kernel, backend, said):
    made, options = small(kernel)
    q = made["q"].requires_grad_()
    out = Graphs(backend).compile(get_attention(kernel))(**made, **options, fused=True)
    with pytest.raises(RuntimeError, match=said):
        (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        slope.sum().backward()


def test_transforms_are_refused_in_a_graph_as_they_are_outside(monkeypatch):
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: not kernels._obstacle(tensors))
    monkeypatch.setattr(kernel_selftest, "is_trusted", lambda *_: True)
    made, options = small("linear", m=21, dtype="fp32")
    q, rest = made.pop("q"), made | options
    form = linear_attention

    def mapped(fused):
        return torch.func.vmap(lambda q: form(q, **rest, fused=fused))(torch.stack([q, q]))

    for run in (mapped, torch.compile(mapped, backend="eager")):
        with pytest.raises(ValueError, match="a transform of torch.func is at work"):
            run(True)
        beside = form(q, **rest, fused=False)
        torch.testing.assert_close(run(None)[1], beside, rtol=1e-5, atol=1e-5)


def test_there_is_no_forward_mode():
    made, options = small("linear")
    with forward_ad.dual_level():
        made["q"] = forward_ad.make_dual(made["q"], torch.ones_like(made["q"]))
        with pytest.raises(NotImplementedError, match="forward mode"):
            linear_attention(**made, **options, fused=True)
