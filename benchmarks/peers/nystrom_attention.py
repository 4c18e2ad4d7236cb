"""nystrom-attention: softmax approximated from landmarks, means of queries and of keys.

It computes none of ours. It stands beside Linformer, which keeps as many rows, 128, of a matrix as
wide: softmax(Q K'ᵀ) (softmax(Q' K'ᵀ))⁺ (softmax(Q' Kᵀ) V), the inverse by six iterations. Without
its convolution of the values.
"""

import torch
from nystrom_attention import NystromAttention
from torch import Tensor, nn

from benchmarks.cases import CASES
from benchmarks.peers import Given, Peer, join_heads, split_heads


def landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by way of 128 landmarks, or a quarter of the tokens if that is less."""
    _, heads, length, dim = q.shape
    kept = min(128, 1 + length // 4)
    with torch.device("meta"):  # its own weights are not made
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
