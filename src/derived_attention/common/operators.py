"""Kernels as operators of PyTorch's, which compilers keep in their graphs as they are.

Of ``torch.library``'s two ways this is `custom_op`: opaque, so that the same lines do for Triton's
interpreter, which `wrap_triton` does not take, and for what a kernel launches around itself. That a
compiler sees the launches, as with `triton_op`, would gain nothing: it fuses nothing with them.

In eager mode an ``autograd.Function`` calls the same two functions. The dispatcher would hand on to
Python several times for each call of an operator, which takes longer than it does to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LIBRARY = "derived_attention"  # torch.ops.derived_attention.causal_sums, and its backward
TAGS = (torch.Tag.needs_exact_strides,)  # kernels have read them from the tensors that were traced


def operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Make an operator with a first derivative of two functions, whose types are its schema.

    Parameters
    ----------
    name : str
        ``torch.ops.derived_attention.<name>``; that of the gradients ends in ``_backward``.
    forward : callable
        From tensors, some of which may be None, and then numbers or flags, to the output and what
        tensors `backward` needs beside them.
    backward : callable
        From the gradient of the output, the tensors, those of `forward`, the numbers, and a flag
        for each tensor, whether it needs a gradient, to the list of those: new and contiguous.
    fake : callable
        Does what `forward` does for tensors that have no data: returns new ones, of shapes that may
        be symbolic.

    Returns
    -------
    callable
        Takes what `forward` does, and returns the output.
    """
    made = torch.library.custom_op(f"{LIBRARY}::{name}", forward, mutates_args=(), tags=TAGS)
    made.register_fake(fake)
    other = torch.library.custom_op(
        f"{LIBRARY}::{name}_backward", backward, mutates_args=(), tags=TAGS
    )
    other.register_fake(_fake_gradients)
    operators = getattr(torch.ops, LIBRARY)
    forward_operator = getattr(operators, name).default
    backward_operator = getattr(operators, f"{name}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # nobody reads zeros in their place

    @once_differentiable
    def gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        return _spread(ctx, backward_operator, grad)

    made.register_autograd(gradients, setup_context=setup)

    def eager(ctx: Any, *inputs: Any) -> Tensor:
        output: tuple[Tensor, ...] = forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @once_differentiable
    def eager_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _spread(ctx, backward, grad)

    methods = {"forward": staticmethod(eager), "backward": staticmethod(eager_gradients)}
    function: Any = type(name, (torch.autograd.Function,), methods)  # profilers show the name

    def run(*inputs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return forward_operator(*inputs)[0]
        return function.apply(*inputs)

    return run


def select_needed(slopes: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """Return those gradients that are needed."""
    return [x for x, need in zip(slopes, needs, strict=False) if need and x is not None]


def _fake_gradients(grad: Tensor, *inputs: Any) -> list[Tensor]:
    *tensors, needs = inputs
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=False) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the gradients need."""
    tensors = [x for x in inputs if x is None or isinstance(x, Tensor)]
    ctx.numbers, ctx.count = inputs[len(tensors) :], len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _spread(ctx: Any, backward: Callable[..., Any], grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs, None for those without one."""
    needs = list(ctx.needs_input_grad[: ctx.count])
    slopes = iter(backward(grad, *ctx.saved_tensors, *ctx.numbers, needs))
    return (*(next(slopes) if need else None for need in needs), *(None for _ in ctx.numbers))
