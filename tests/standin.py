"""A device without hardware, "standin", on which code fails where it would fail on a GPU.

Its tensors wrap CPU tensors. Each operation refuses to mix the two devices, unwraps its arguments,
runs on the CPU, and wraps the result. If Python reads a value for which a GPU would have to finish
its work, a synchronisation is counted. PyTorch's fused attention is one operation, as on a GPU. No
time is measured, and neither `torch.compile` nor kernels run on this device.

Import this module before any gradient is computed, in a separate process, because it changes
PyTorch: ``tests/test_standin.py`` starts one. As a command it runs chapters on the device::

    python tests/standin.py 04_three_attentions 12_primal_attention

For each chapter it prints the numbers of operations and synchronisations, or the error; the exit
status is the number of chapters that failed. Without a name it runs every page that has code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import sys
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "standin"
CPU = torch.device("cpu")
ASKS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique"}
ASKS |= {"_unique2", "unique_dim", "unique_consecutive"}  # operations whose results Python awaits
MAY_MIX = {"copy_", "_copy_from", "_to_copy", "index", "index_put_", "_index_put_impl_"}
counts = collections.Counter(operations=0, synchronisations=0)
places = collections.Counter()  # the lines of code that caused synchronisations


class Module(backend_registration._DummyBackendModule):
    """The functions that PyTorch expects in ``torch.standin``."""

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]

    def is_available(self):
        return True

    def get_rng_state(self, device=None):
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state, device=None):
        pass

    def synchronize(self, device=None):
        pass


backend_registration._setup_privateuseone_for_python_backend(NAME, Module())


class StandIn(Tensor):
    """A tensor on the device "standin"; `raw` is the CPU tensor that it wraps."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        layout = dict(strides=raw.stride(), storage_offset=raw.storage_offset())
        made = Tensor._make_wrapper_subclass(
            cls, raw.shape, dtype=raw.dtype, device=f"{NAME}:0", **layout
        )
        made.raw = raw
        return made

    def __repr__(self):
        return f"StandIn({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})

    def tolist(self):
        synchronise()
        return self.raw.tolist()

    def numpy(self, *args, **kwargs):
        raise TypeError(f"can't convert {NAME} device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy

    def __reduce_ex__(self, protocol):
        return self.raw.__reduce_ex__(protocol)  # a file stores the CPU tensor

    def __getitem__(self, index):
        return super().__getitem__(with_tensors(index))

    def __setitem__(self, index, value):
        super().__setitem__(with_tensors(index), value)


def with_tensors(index):
    """Return an index with its lists converted to tensors, as C++ would convert them."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(x) if isinstance(x, list) else x for x in index)
    return torch.tensor(index) if isinstance(index, list) else index


def here(device):
    """Return whether a device is the stand-in."""
    return device is not None and torch.device(device).type == NAME


def synchronise():
    """Count a synchronisation, and the line of the library that caused it."""
    counts["synchronisations"] += 1
    own = [f for f in traceback.extract_stack() if "derived_attention" in f.filename]
    if own:
        places[f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"] += 1


def waits(name, args, kwargs, ours, foreign, to_cpu):
    """Return whether CUDA would make Python wait for all earlier work of the device."""
    if name in ("_to_copy", "copy_", "_copy_from"):  # copies between the devices
        asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        crosses = bool(foreign) or to_cpu or not ours or not isinstance(args[0], StandIn)
        return crosses and (to_cpu or not asked)
    if name.startswith("index") or name == "_index_put_impl_":
        at = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor)]
        counted = name == "index" and any(x.dtype == torch.bool for x in at)
        return counted or any(not isinstance(x, StandIn) for x in at)
    return name in ASKS


def run(operation, args, kwargs):
    """Run an operation on the CPU tensors of its arguments; return its wrapped result."""
    counts["operations"] += 1
    name = operation._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, StandIn)]
    foreign = [x for x in tensors if not isinstance(x, StandIn) and x.dim() > 0]
    if ours and foreign and name not in MAY_MIX:
        raise RuntimeError(f"{name} has tensors on {NAME}:0 and on cpu; expected one device")
    to_cpu = name == "_to_copy" and kwargs.get("device") is not None and not here(kwargs["device"])
    if waits(name, args, kwargs, ours, foreign, to_cpu):
        synchronise()
    args, kwargs = tree_map(raw, args), tree_map(raw, kwargs)
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    result = operation(*args, **kwargs)
    if to_cpu or name == "copy_" and not ours:
        return result
    known = {id(x.raw): x for x in ours}

    def wrapped(x):
        if not isinstance(x, Tensor) or isinstance(x, StandIn):
            return x
        if id(x) not in known:
            return StandIn(x)
        if known[id(x)].shape != x.shape:  # the shape of a wrapper is fixed
            raise NotImplementedError(f"{operation} changes the size of its argument")
        return known[id(x)]

    if name == "copy_" and isinstance(tensors[0], Tensor) and not isinstance(tensors[0], StandIn):
        return tensors[0]
    return tree_map(wrapped, result)


def raw(x):
    """Return an argument in the form that the operation on the CPU takes."""
    if isinstance(x, StandIn):
        return x.raw
    return CPU if isinstance(x, torch.device) and x.type == NAME else x


library = torch.library.Library("_", "IMPL")
library.fallback(lambda operation, *args, **kwargs: run(operation, args, kwargs), "PrivateUse1")
library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # autocast casts nothing


def maker(operation):
    """Return a function that runs `operation` on the CPU: C++ would resize an empty wrapper."""
    return lambda *args, **kwargs: run(operation, args, kwargs)


made_here = torch.library.Library("aten", "IMPL", "PrivateUse1")
for overload in ("arange", "arange.start", "arange.start_step", "eye", "eye.m"):
    packet, _, kind = overload.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), kind or "default")
    made_here.impl(overload, maker(operation))

# --- tensors that C++ creates without calling the device ------------------------------------------


def made_on_cpu(make):
    """Return a function that creates a tensor on the CPU, and moves it to the device."""

    @functools.wraps(make)
    def made(*args, device=None, requires_grad=False, **kwargs):
        if not here(device):
            kwargs |= {} if device is None else {"device": device}
            kwargs |= {"requires_grad": True} if requires_grad else {}
            return make(*args, **kwargs)
        x = make(*args, device="cpu", **kwargs) if not isinstance(args[0], StandIn) else args[0]
        return x.to(NAME).requires_grad_(requires_grad)

    return made


torch.tensor, torch.as_tensor = made_on_cpu(torch.tensor), made_on_cpu(torch.as_tensor)
_new_tensor = Tensor.new_tensor


def new_tensor(self, data, *, dtype=None, device=None, requires_grad=False):
    device = self.device if device is None else device
    if here(device):
        x = torch.tensor(data, dtype=dtype or self.dtype, device=device)
        return x.requires_grad_(requires_grad)
    return _new_tensor(self, data, dtype=dtype, device=device, requires_grad=requires_grad)


Tensor.new_tensor = StandIn.new_tensor = new_tensor

# --- PyTorch's fused attention is one operation ---------------------------------------------------

_sdpa = F.scaled_dot_product_attention


@functools.wraps(_sdpa)
def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Compute PyTorch's attention, with the CPU's fused kernel where a GPU has a fused kernel."""
    tensors = query, key, value
    fused = all(isinstance(x, StandIn) and x.dim() == 4 and x.stride(-1) == 1 for x in tensors)
    if not fused or dropout_p or (attn_mask is not None and attn_mask.requires_grad):
        return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                     enable_gqa=enable_gqa)  # fmt: skip
    D, Dv = query.shape[-1], value.shape[-1]
    width = max(D, Dv)
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = q.new_zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
    scale = D**-0.5 if scale is None else scale
    form = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return form(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0][..., :Dv]


F.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = sdpa


@contextlib.contextmanager
def counting():
    """Reset the counts, and yield them: they count the operations of a with block."""
    counts.update(operations=-counts["operations"], synchronisations=-counts["synchronisations"])
    places.clear()
    yield counts


# --- chapters -------------------------------------------------------------------------------------


def run_chapter(path):
    """Run the code of a page; raise RuntimeError with the cell that fails."""
    import matplotlib

    matplotlib.use("Agg")
    from IPython.core.interactiveshell import InteractiveShell

    from execute import read_page

    shell = InteractiveShell.instance()
    shell.reset(new_session=False)
    notebook = read_page(path)
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code" or "skip-execution" in cell.metadata.get("tags", []):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = shell.run_cell(cell.source, silent=True)
        error = outcome.error_before_exec or outcome.error_in_exec
        if error and "raises-exception" not in cell.metadata.get("tags", []):
            raise RuntimeError(f"cell {number} of {path.name}:\n{cell.source}") from error


def computing_there(measured):
    """Wrap `measured` to raise RuntimeError if `fn` runs nothing on the stand-in, its `device`."""

    @functools.wraps(measured)
    def refusing(fn, *, device):
        before = counts["operations"]
        found = measured(fn, device=device)
        if here(device) and counts["operations"] == before:
            raise RuntimeError(f"fn runs nothing on {NAME}; expected an operation on that device")
        return found

    return refusing


def main(names):
    """Run chapters, or all pages with code, on the stand-in; return how many failed."""
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "_ext"), str(root)]
    import dataclasses

    from derived_book import runtime
    from derived_book.training import measure

    start = runtime.start

    @functools.wraps(start)
    def start_here(*args, **kwargs):
        return dataclasses.replace(start(*args, **kwargs), device=torch.device(NAME))

    runtime.start = start_here
    measure.peak_bytes = computing_there(measure.peak_bytes)
    pages = (p for p in sorted(root.glob("book/*.md")) if "{code-cell}" in p.read_text("utf8"))
    paths = [p for p in pages if not names or p.stem in names]
    failed = 0
    for path in paths:
        with counting():
            try:
                run_chapter(path)
            except Exception:
                failed += 1
                print(f"{path.stem} FAILED", flush=True)
                traceback.print_exc()
            else:
                numbers = " ".join(f"{n:,} {what}" for what, n in counts.items())
                print(f"{path.stem}: {numbers}; most often at {places.most_common(5)}", flush=True)
    return failed


if __name__ == "__main__":
    sys.modules["standin"] = sys.modules["__main__"]
    sys.exit(main(sys.argv[1:]))
