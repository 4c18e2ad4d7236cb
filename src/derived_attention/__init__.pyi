"""Types of the public names, for editors and type checkers: `__init__.py` loads them on demand."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from derived_attention.batch_norm.layer import NormalizedAttention as NormalizedAttention
from derived_attention.common.filters import downsample as downsample
from derived_attention.common.filters import upsample as upsample
from derived_attention.common.masks import causal_mask as causal_mask
from derived_attention.common.pooling import ConvolutionPooling as ConvolutionPooling
from derived_attention.convolutional.core import mixing_matrix_1d as mixing_matrix_1d
from derived_attention.convolutional.layer import Conv1DAttention as Conv1DAttention
from derived_attention.convolutional.layer import Conv2DAttention as Conv2DAttention
from derived_attention.convolutional.layer import CvTAttention as CvTAttention
from derived_attention.delta.core import delta_state as delta_state
from derived_attention.delta.layer import DeltaAttention as DeltaAttention
from derived_attention.formulas import signed_power as signed_power
from derived_attention.formulas import soft_threshold as soft_threshold
from derived_attention.layer import MultiheadAttention as MultiheadAttention
from derived_attention.linear.core import elu_feature_map as elu_feature_map
from derived_attention.linear.core import linear_attention_weights as linear_attention_weights
from derived_attention.linear.core import linear_state as linear_state
from derived_attention.linear_time.core import flipped_elu_feature_map as flipped_elu_feature_map
from derived_attention.linear_time.core import orthogonal_features as orthogonal_features
from derived_attention.linear_time.layer import FMMAttention as FMMAttention
from derived_attention.linear_time.layer import LinformerAttention as LinformerAttention
from derived_attention.linear_time.layer import LunaAttention as LunaAttention
from derived_attention.linear_time.layer import PerformerAttention as PerformerAttention
from derived_attention.mixture.core import em_priors as em_priors
from derived_attention.mixture.core import responsibilities as responsibilities
from derived_attention.mixture.layer import MixtureAttention as MixtureAttention
from derived_attention.mixture.shifted import shifted_keys as shifted_keys
from derived_attention.mra.core import mra_attention_weights as mra_attention_weights
from derived_attention.mra.layer import MRAAttention as MRAAttention
from derived_attention.multiresolution.layer import (
    MultiresolutionAttention as MultiresolutionAttention,
)
from derived_attention.multiresolution.layer import multiresolution_layer as multiresolution_layer
from derived_attention.primal.core import cosine_feature_map as cosine_feature_map
from derived_attention.primal.core import ksvd_objective as ksvd_objective
from derived_attention.primal.core import ksvd_objectives as ksvd_objectives
from derived_attention.primal.core import primal_scores as primal_scores
from derived_attention.primal.layer import PrimalAttention as PrimalAttention
from derived_attention.registry import MECHANISMS as MECHANISMS
from derived_attention.registry import list_attentions as list_attentions
from derived_attention.scaled_heads.layer import (
    NormalizedScaledHeadsAttention as NormalizedScaledHeadsAttention,
)
from derived_attention.scaled_heads.layer import ScaledHeadsAttention as ScaledHeadsAttention
from derived_attention.softmax.controls import PositionOnlyAttention as PositionOnlyAttention
from derived_attention.softmax.core import attention_weights as attention_weights
from derived_attention.softmax.sink import SinkAttention as SinkAttention
from derived_attention.softmax.sink import sink_attention_weights as sink_attention_weights
from derived_attention.sparse.core import fixed_mask as fixed_mask
from derived_attention.sparse.core import strided_mask as strided_mask
from derived_attention.sparse.core import window_mask as window_mask
from derived_attention.sparse_coding.admm import admm as admm
from derived_attention.sparse_coding.admm import printed_admm as printed_admm
from derived_attention.sparse_coding.core import RidgeState as RidgeState
from derived_attention.sparse_coding.core import ridge_state as ridge_state
from derived_attention.sparse_coding.layer import LassoAttention as LassoAttention
from derived_attention.sparse_coding.layer import RidgeAttention as RidgeAttention
from derived_attention.testing.contract import check_mechanism as check_mechanism

__version__: str
__all__: list[str]

class _Attention(Protocol):
    """A mechanism, called like PyTorch's `scaled_dot_product_attention`, with its own options."""

    __name__: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Tensor: ...

def places() -> Mapping[str, str]: ...
def get_attention(name: str) -> _Attention: ...

conv1d_attention: _Attention
conv1d_attention_reference: _Attention
conv2d_attention: _Attention
conv2d_attention_reference: _Attention
delta_attention: _Attention
delta_attention_reference: _Attention
fixed_attention: _Attention
fixed_attention_reference: _Attention
fmm_attention: _Attention
fmm_attention_reference: _Attention
hard_mixture_attention: _Attention
hard_mixture_attention_reference: _Attention
identity_attention: _Attention
lasso_attention: _Attention
lasso_attention_reference: _Attention
linear_attention: _Attention
linear_attention_reference: _Attention
linear_mixture_attention: _Attention
linear_mixture_attention_reference: _Attention
linformer_attention: _Attention
linformer_attention_reference: _Attention
luna_attention: _Attention
luna_attention_reference: _Attention
mixture_attention: _Attention
mixture_attention_reference: _Attention
mra_attention: _Attention
mra_attention_reference: _Attention
multiresolution_attention: _Attention
multiresolution_attention_reference: _Attention
normalized_attention: _Attention
normalized_attention_reference: _Attention
normalized_scaled_heads_attention: _Attention
normalized_scaled_heads_attention_reference: _Attention
performer_attention: _Attention
performer_attention_reference: _Attention
primal_attention: _Attention
primal_attention_reference: _Attention
ridge_attention: _Attention
ridge_attention_reference: _Attention
scaled_heads_attention: _Attention
scaled_heads_attention_reference: _Attention
selected_attention: _Attention
selected_attention_reference: _Attention
shifted_mixture_attention: _Attention
shifted_mixture_attention_reference: _Attention
sink_attention: _Attention
sink_attention_reference: _Attention
softmax_attention: _Attention
softmax_attention_reference: _Attention
strided_attention: _Attention
strided_attention_reference: _Attention
uniform_attention: _Attention
window_attention: _Attention
window_attention_reference: _Attention
