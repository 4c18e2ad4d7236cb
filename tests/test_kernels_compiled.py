"""Kernels under torch.compile: in the graph, with the values and gradients of eager mode."""

from __future__ import annotations

import pytest
import torch
from helpers import NO_TRITON, assert_all_close, tensors
from torch._dynamo import lookup_backend
from torch.autograd import forward_ad

from derived_attention import LassoAttention, get_attention
from derived_attention.common import kernel_cases, kernel_selftest, kernels
from derived_attention.common.kernel_cases import Trial
from derived_attention.mixture.layer import MixtureAttention

if not kernels.available():
    pytest.skip(NO_TRITON, allow_module_level=True)
from derived_attention.linear import triton as linear
from derived_attention.mixture import triton as mixture
from derived_attention.sparse_coding import triton as splitting

# Compilers look past a cache, and say so: what they are not to look into is one constant.
pytestmark = pytest.mark.filterwarnings("error:.*lru_cache")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE, TOL = ("fp32", 1e-4) if DEVICE == "cuda" else ("fp64", 1e-12)
OPS = torch.ops.derived_attention
OF = {"linear": OPS.causal_sums, "mlk": OPS.causal_sums, "lasso": OPS.lasso}
SIZES = {"D": 5, "DV": 4, "own": True}
TRIALS = [
    Trial("mgk", DTYPE, 17, 21, **SIZES, mask="causal"),
    Trial("mgk", DTYPE, 17, 21, **SIZES, mask="floating", strided=True),
    Trial("hard_mgk", DTYPE, 17, 21, **SIZES, mask="boolean"),
    Trial("smgk", DTYPE, 17, 21, **SIZES, R=3, mask="boolean"),
    Trial("linear", DTYPE, 70, 37, **SIZES, mask="causal", features=True),
    Trial("mlk", DTYPE, 70, 70, **SIZES, R=3, mask="causal"),
    Trial("lasso", DTYPE, 17, 21, **SIZES, mask="keys"),
    Trial("lasso", DTYPE, 17, 24, **SIZES, mask="causal", power=5, prefix=7, exclude=True),
]
every_trial = pytest.mark.parametrize("trial", TRIALS, ids=str)


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


def operator_of(trial):
    return OF.get(trial.kernel, OPS.mixture).default


class Graphs:
    """A backend of torch.compile that collects what is called in each graph that it gets."""

    def __init__(self, backend="eager"):
        self.inner, self.targets = lookup_backend(backend), []

    def __call__(self, graph, inputs):
        self.targets.append([node.target for node in graph.graph.nodes])
        return self.inner(graph, inputs)

    def compile(self, form, **options):
        return torch.compile(form, fullgraph=True, backend=self, **options)


def results(form, trial, **more):
    """The output and the gradients of a linear functional, by the kernel."""
    made, options = kernel_cases.inputs(trial, DEVICE)
    made = {x: y.detach().requires_grad_() for x, y in made.items()}
    out = form(**made, **{"fused": True} | options | more)
    weights = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights.view_as(out)).sum(), list(made.values()))]


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_trial
def test_a_graph_has_the_kernel_and_the_results_of_eager_mode(trial, backend):
    form, graphs = get_attention(trial.kernel), Graphs(backend)
    compiled = graphs.compile(form)
    assert_all_close(results(compiled, trial), results(form, trial), TOL)
    (targets,) = graphs.targets
    assert targets.count(operator_of(trial)) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_other_dtypes(kernel, dtype):
    causal = "causal" if kernel == "linear" else ""
    trial = Trial(kernel, dtype, 19, 21, D=5, DV=4, mask=causal)
    form, graphs = get_attention(kernel), Graphs("aot_eager")
    assert_all_close(results(graphs.compile(form), trial), results(form, trial), 1e-6)
    assert operator_of(trial) in graphs.targets[0]


def test_the_compiler_that_is_the_default_keeps_the_kernel():
    """Inductor makes code of what is around it, and may choose other strides there."""
    trial = Trial("mgk", "fp32", 17, 21, D=5, DV=4, mask="causal")
    form, graphs = get_attention("mgk"), Graphs("inductor")
    assert_all_close(results(graphs.compile(form), trial), results(form, trial), 1e-4)
    assert operator_of(trial) in graphs.targets[0]


@pytest.mark.parametrize(
    ("make", "operator", "options"),
    [
        (lambda **o: MixtureAttention(8, 2, learn_variances=True, **o), OPS.mixture, {}),
        (lambda **o: MixtureAttention(8, 2, shifted=True, **o), OPS.mixture, {"is_causal": True}),
        (lambda **o: MixtureAttention(8, 2, linear=True, **o), OPS.causal_sums, {"is_causal": 1}),
        (lambda **o: LassoAttention(8, 2, learned=True, **o), OPS.lasso, {}),
    ],
    ids=["mixture", "shifted", "linear", "lasso"],
)
def test_layers(make, operator, options):
    options = {x: bool(y) for x, y in options.items()}
    layer = make(batch_first=True, fused=True, device=DEVICE)
    x = tensors((2, 9, 8), dtype=torch.float32, device=DEVICE)[0]

    def run(form):
        out = form(x, x, x, need_weights=False, **options)[0]
        return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]

    graphs = Graphs()
    assert_all_close(run(graphs.compile(layer)), run(layer), 1e-5)
    assert operator.default in graphs.targets[0]


@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_autocast_computes_in_the_dtypes_of_eager_mode(kernel):
    causal = "causal" if kernel == "linear" else ""
    trial = Trial(kernel, "fp32", 19, 21, D=5, DV=4, mask=causal)
    form = get_attention(kernel)

    def run(form):
        with torch.autocast(DEVICE, torch.bfloat16):
            return results(form, trial)

    ours = run(Graphs("aot_eager").compile(form))
    assert_all_close(ours, run(form), 1e-5)
    assert torch.equal(ours[0], results(form, trial)[0]) is (kernel != "mgk"), "what rounds"


# --- what PyTorch asks of an operator -------------------------------------------------------------


def calls(trial, monkeypatch):
    """The arguments of both operators, as a mechanism calls them."""
    seen = []
    for module, name in ((mixture, "_attend"), (linear, "_causal"), (splitting, "_coding")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, run=run: (seen.append(x), run(*x))[1])
    results(get_attention(trial.kernel), trial)
    (inputs,) = seen
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    count = sum(x is None or isinstance(x, torch.Tensor) for x in given)
    out, *kept = operator_of(trial)(*given)
    needs = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs[:count]]
    learned = [x.requires_grad_(need) for x, need in zip(given, needs, strict=False) if need]
    assert learned
    grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).to(out.dtype).view_as(out)
    without = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    return given, [grad, *without[:count], out, *kept, *without[count:], needs]


HALF = [
    Trial("mgk", "bf16", 17, 21, D=5, DV=4),
    Trial("linear", "fp16", 70, 37, D=5, DV=4, mask="causal"),
    Trial("lasso", "bf16", 17, 21, D=5, DV=4, power=5),
]


@pytest.mark.parametrize("trial", TRIALS + HALF, ids=str)
def test_operators_are_what_they_say(trial, monkeypatch):
    """Schemas, results without data, gradients, and tracing of any size."""
    forward, backward = calls(trial, monkeypatch)
    torch.library.opcheck(operator_of(trial), forward)
    learned = [x.requires_grad for x in operator_of(trial)(*forward)]
    assert learned == [True, False, False], "only the output has a derivative"
    name = f"{operator_of(trial)._schema.name.split('::')[1]}_backward"
    torch.library.opcheck(getattr(OPS, name).default, backward)


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["mgk", "smgk", "linear", "lasso"])
def test_lengths_need_no_graphs_of_their_own(kernel):
    form, graphs = get_attention(kernel), Graphs("aot_eager")
    compiled = graphs.compile(form)
    for n in (150, 9, 70, 33, 300):
        causal = "causal" if kernel == "linear" else ""
        trial = Trial(kernel, DTYPE, n, n, H=1, D=2, DV=2, mask=causal)
        made, options = kernel_cases.inputs(trial, DEVICE)
        for x in "qkv":
            made[x] = made[x].detach().requires_grad_()
            torch._dynamo.mark_dynamic(made[x], made[x].dim() - 2)
        found = compiled(**made, **options, fused=True)
        beside = form(**made, **options, fused=False)
        torch.testing.assert_close(found, beside, rtol=TOL * 100, atol=TOL * 100)
    # A sequence of one segment has no states before any: one more graph, for all such lengths.
    assert len(graphs.targets) == 1 + (kernel == "linear")
    assert all(operator_of(trial) in targets for targets in graphs.targets)


@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_an_exported_program_of_any_length_has_the_kernel(kernel):
    causal = "causal" if kernel == "linear" else ""

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            options = {"is_causal": bool(causal), "fused": True}
            return get_attention(kernel)(q, k, v, **options)

    lengths = [Trial(kernel, DTYPE, n, n, D=2, DV=2, mask=causal) for n in (70, 150)]
    made = [[kernel_cases.inputs(trial, DEVICE)[0][x] for x in "qkv"] for trial in lengths]
    sizes = [{x.dim() - 2: torch.export.Dim.DYNAMIC} for x in made[0]]
    program = torch.export.export(Model(), tuple(made[0]), dynamic_shapes=sizes, strict=False)
    assert operator_of(lengths[0]) in [node.target for node in program.graph.nodes]
    for x in made:
        torch.testing.assert_close(program.module()(*x), Model()(*x), rtol=TOL, atol=TOL)


# --- by default -----------------------------------------------------------------------------------


@pytest.fixture
def a_new_gpu(monkeypatch, tmp_path):
    """On which nobody has tried anything; the interpreter counts as a GPU."""
    monkeypatch.setenv("DERIVED_ATTENTION_KERNELS", str(tmp_path))
    monkeypatch.setattr(kernel_selftest, "_verdicts", {})
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: True)
    monkeypatch.setattr(kernels, "TRIED", 20)


@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_by_default_a_graph_has_the_kernels_that_were_tried_before(kernel, a_new_gpu, monkeypatch):
    form = get_attention(kernel)
    causal = "causal" if kernel == "linear" else ""
    trial = Trial(kernel, "fp32", 9, 21, D=5, DV=4, mask=causal)

    def has_kernel(**options):
        torch._dynamo.reset()
        graphs = Graphs()
        results(graphs.compile(form, **options), trial, fused=None)
        return operator_of(trial) in graphs.targets[0]

    compare = kernel_selftest.compare
    monkeypatch.setattr(
        kernel_selftest, "compare", None
    )  # nothing is tried while a compiler traces
    assert not has_kernel() and not kernel_selftest._verdicts
    monkeypatch.setattr(kernel_selftest, "compare", compare)
    results(form, trial, fused=None)
    assert has_kernel() and has_kernel(dynamic=True)
    kernel_selftest._verdicts.clear()  # another process finds what was tried
    assert has_kernel()
    kernel_selftest._verdicts.update(
        dict.fromkeys(kernel_selftest._verdicts, "is not exact enough")
    )
    assert not has_kernel()


# --- what there is not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "said"), [("eager", "once_differentiable"), ("aot_eager", "double backward")]
)
@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_a_second_derivative_is_refused(kernel, backend, said):
    causal = "causal" if kernel == "linear" else ""
    made, options = kernel_cases.inputs(Trial(kernel, DTYPE, 5, 5, D=2, DV=2, mask=causal), DEVICE)
    q = made["q"].requires_grad_()
    out = Graphs(backend).compile(get_attention(kernel))(**made, **options, fused=True)
    with pytest.raises(RuntimeError, match=said):
        (slope,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        slope.sum().backward()


@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_transforms_are_refused_in_a_graph_as_they_are_outside(kernel, monkeypatch):
    monkeypatch.setattr(kernels, "_may_try", lambda tensors: not kernels._obstacle(tensors))
    monkeypatch.setattr(kernel_selftest, "trusted", lambda *_: True)
    causal = "causal" if kernel == "linear" else ""
    made, options = kernel_cases.inputs(
        Trial(kernel, "fp32", 5, 21, D=2, DV=2, mask=causal), DEVICE
    )
    q, rest = made.pop("q"), made | options
    form = get_attention(kernel)

    def mapped(fused):
        return torch.func.vmap(lambda q: form(q, **rest, fused=fused))(torch.stack([q, q]))

    for run in (mapped, torch.compile(mapped, backend="eager")):
        with pytest.raises(ValueError, match="a transform of torch.func is at work"):
            run(True)
        beside = form(q, **rest, fused=False)
        torch.testing.assert_close(run(None)[1], beside, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["mgk", "linear", "lasso"])
def test_there_is_no_forward_mode(kernel):
    causal = "causal" if kernel == "linear" else ""
    made, options = kernel_cases.inputs(Trial(kernel, DTYPE, 5, 5, D=2, DV=2, mask=causal), DEVICE)
    with forward_ad.dual_level():
        made["q"] = forward_ad.make_dual(made["q"], torch.ones_like(made["q"]))
        with pytest.raises(NotImplementedError, match="forward mode"):
            get_attention(kernel)(**made, **options, fused=True)
