"""linear-attention-transformer: linear attention with softmax as its feature map.

Without a mask, each feature of the keys is a softmax over the *tokens*, so there is no denominator.
In the causal form φ = exp. With buckets of 64, as timed here, a query does not attend to its own
bucket. With buckets of 1, the library's default, the causal form is our `linear_attention` with
``feature_map=torch.exp``, and stores a (D, D) matrix for each token.
"""

from linear_attention_transformer.linear_attention_transformer import (
    causal_linear_attn,
    linear_attn,
)
from torch import Tensor

from benchmarks.cases import CASES
from benchmarks.peers import Peer


def softmaxes(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, bucket: int = 64
) -> Tensor:
    """Return softmax(Q) (softmax(K)ᵀ V), over features of Q and tokens of K, or the causal form."""
    return causal_linear_attn(q, k, v, bucket_size=bucket) if is_causal else linear_attn(q, k, v)


PACKAGE = "linear-attention-transformer"
PEERS = {
    "linear_attention_transformer": Peer(
        PACKAGE, PACKAGE, softmaxes, CASES["linear"], "other features: softmax over the tokens"
    ),
    "linear_attention_transformer_causal": Peer(
        PACKAGE,
        f"{PACKAGE}, causal",
        softmaxes,
        CASES["linear_causal"],
        "other features, exp; a query does not see its own 64 tokens",
    ),
}
