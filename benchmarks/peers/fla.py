"""flash-linear-attention: causal linear attention, chunk by chunk, with our feature map.

On a GPU it is their Triton kernel. On a CPU there is only their formula in PyTorch, which they call
naive and keep as a reference: nobody's choice, and here for completeness.
"""

import torch
from fla.ops.linear_attn import chunk_linear_attn
from fla.ops.linear_attn.naive import naive_chunk_linear_attn
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.peers import Peer
from derived_attention.linear.core import elu_feature_map

CUDA = torch.cuda.is_available()


def chunks(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Linear attention with elu + 1, normalised; on a CPU the length is a multiple of 64."""
    assert is_causal
    q, k = elu_feature_map(q), elu_feature_map(k)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if CUDA:
        return chunk_linear_attn(q, k, v, normalize=True)[0].transpose(1, 2)
    return naive_chunk_linear_attn(q, k, v, normalize=True).transpose(1, 2)


LABEL = "fla, chunk kernel" if CUDA else "fla, naive chunks"
PEERS = {
    "fla_causal": Peer("fla-core", LABEL, chunks, CASES["linear_causal"], tokens_first=True),
}
