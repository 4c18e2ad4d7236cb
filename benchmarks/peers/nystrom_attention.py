"""nystrom-attention: softmax approximated by landmarks, which are means of queries and of keys.

It computes softmax(Q K'ᵀ) (softmax(Q' K'ᵀ))⁺ (softmax(Q' Kᵀ) V), with six iterations for the
inverse. None of our forms computes this, so it is compared with Linformer, which also keeps 128
rows. The library's convolution of the values is switched off.
"""

import torch
from nystrom_attention import NystromAttention
from torch import Tensor, nn

from benchmarks.cases import CASES
from benchmarks.peers import Given, Peer, join_heads, split_heads


def landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention with 128 landmarks, or with 1 + N // 4 if that is less."""
    _, heads, length, dim = q.shape
    kept = min(128, 1 + length // 4)
    with torch.device("meta"):  # allocates no weights, as none are used
        layer = NystromAttention(
            heads * dim, dim_head=dim, heads=heads, num_landmarks=kept, residual=False
        )
    q, k, v = map(join_heads, (q, k, v))
    layer.to_qkv, layer.to_out = Given(q, k, v), nn.Identity()
    return split_heads(layer(q), heads)


PEERS = {
    "nystrom_attention": Peer(
        "nystrom-attention",
        "nystrom-attention, 128 landmarks",
        landmarks,
        CASES["linformer"],
        "another approximation of softmax, from as many rows",
        options=lambda N, D=64: {},
        tokens_first=True,
    )
}
