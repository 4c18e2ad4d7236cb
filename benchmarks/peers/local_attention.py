"""local-attention: softmax over a window, with our window and no rotary positions."""

from local_attention import LocalAttention
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.peers import Peer


def local(q: Tensor, k: Tensor, v: Tensor, *, window: int, is_causal: bool = False) -> Tensor:
    """Return attention to the keys at a distance of at most `window`."""
    layer = LocalAttention(
        window,
        causal=is_causal,
        autopad=True,
        exact_windowsize=True,
        use_rotary_pos_emb=False,
    )
    return layer(q, k, v)


PEERS = {
    "local_attention": Peer("local-attention", "local-attention", local, CASES["window"]),
    "local_attention_causal": Peer(
        "local-attention", "local-attention, causal", local, CASES["window_causal"]
    ),
}
