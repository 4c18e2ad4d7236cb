"""x-transformers: attention by squared distances, reduced to SDPA by two additional features.

Our mixture with one Gaussian for each token computes the same function. The values keep their D
features, so PyTorch stores an (N, N) matrix on a CPU.
"""

from typing import Any

from torch import Tensor
from x_transformers.attend import Attend

from benchmarks.cases import Case
from benchmarks.peers import Peer
from derived_attention import mixture_attention_reference
from derived_attention.mixture.core import mixture_attention


def one_key(form: Any) -> Any:
    """Return a mixture form that has one Gaussian for each token."""
    return lambda q, k, v, **options: form(q, k.unsqueeze(-3), v, **options)


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention whose weights are the softmax of −‖q − k‖²/2√D."""
    scale = q.shape[-1] ** -0.5 / 2
    return Attend(flash=True, l2_distance=True, heads=q.shape[1], scale=scale)(q, k, v)[0]


OURS = Case(
    "MGK, 1 key",
    one_key(mixture_attention),
    one_key(mixture_attention_reference),
    lambda N, D=64: {},
    "sdpa",
)
PEERS = {"x_transformers": Peer("x-transformers", "x-transformers, L2, flash", distances, OURS)}
