"""flash-linear-attention: causal linear attention, chunk by chunk, with our feature map.

On a CPU the library has only a formula in PyTorch, which it calls naive and keeps as a reference.
`benchmarks.gpu.table` measures its kernels.
"""

from fla.ops.linear_attn.naive import naive_chunk_linear_attn
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.peers import Peer
from derived_attention.linear.core import elu_feature_map


def chunks(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Return normalised linear attention with φ = elu + 1; N must be a multiple of 64."""
    assert is_causal
    q, k = elu_feature_map(q), elu_feature_map(k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return naive_chunk_linear_attn(q, k, v, normalize=True).transpose(1, 2)


PEERS = {
    "fla_causal": Peer(
        "fla-core", "fla, naive chunks", chunks, CASES["linear_causal"], tokens_first=True
    ),
}
