"""linformer: its layer with our two projections of tokens, and without projections of q, k, v."""

import torch
from linformer.linformer import LinformerSelfAttention
from torch import Tensor, nn

from benchmarks.cases import CASES
from benchmarks.peers import Given, Peer, join_heads, split_heads


def projected(
    q: Tensor, k: Tensor, v: Tensor, *, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    """Return softmax(Q (E K)ᵀ/√D) F V."""
    (_, heads, length, dim), kept = q.shape, len(key_projection)
    with torch.device("meta"):  # allocates no weights, as ours replace them
        layer = LinformerSelfAttention(heads * dim, length, k=kept, heads=heads)
    q, k, v = map(join_heads, (q, k, v))
    layer.to_q, layer.to_k, layer.to_v, layer.to_out = *map(Given, (q, k, v)), nn.Identity()
    del layer.proj_k, layer.proj_v
    layer.proj_k, layer.proj_v = key_projection.mT, value_projection.mT
    return split_heads(layer(q), heads)


PEERS = {
    "linformer": Peer("linformer", "linformer", projected, CASES["linformer"], tokens_first=True)
}
