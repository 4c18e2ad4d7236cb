"""performer-pytorch: FAVOR+ with our projection, and therefore with the same random features.

By default the library adds 1e-4 to every feature and 1e-6 to the causal sums. Here both numbers are
0, which takes the same time. Its causal form needs the CUDA extension of fast-transformers; without
it, as timed here, it stores a (D, features) matrix for each token.
"""

from performer_pytorch.performer_pytorch import (
    causal_linear_attention_noncuda,
    linear_attention,
    softmax_kernel,
)
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.peers import Peer


def favor(
    q: Tensor, k: Tensor, v: Tensor, *, projection: Tensor, is_causal: bool = False
) -> Tensor:
    """Return linear attention with positive random features."""
    how = {"projection_matrix": projection, "eps": 0.0}
    q, k = softmax_kernel(q, is_query=True, **how), softmax_kernel(k, is_query=False, **how)
    return (
        causal_linear_attention_noncuda(q, k, v, eps=0.0)
        if is_causal
        else linear_attention(q, k, v)
    )


PEERS = {
    "performer_pytorch": Peer("performer-pytorch", "performer-pytorch", favor, CASES["performer"]),
    "performer_pytorch_causal": Peer(
        "performer-pytorch",
        "performer-pytorch, causal, without CUDA",
        favor,
        CASES["performer_causal"],
        longest=2048,
    ),
}
