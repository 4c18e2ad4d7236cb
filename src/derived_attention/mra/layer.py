"""The layer of `mra_attention` (appendix D)."""

from __future__ import annotations

import functools
from typing import Any

from derived_attention.common.checks import Mechanism
from derived_attention.layer import Heads, MultiheadAttention
from derived_attention.mra.core import LATER, check_sizes, mra_attention


class MRAAttention(MultiheadAttention):
    """MRA-2 in H heads, with the interface and the parameters of `MultiheadAttention`.

    Padded keys are left out of pooled keys, and padded queries of pooled queries. The forward pass
    takes neither `attn_mask` nor `is_causal`; padding goes into `key_padding_mask`.

    Parameters
    ----------
    block, kept, over, sparse
        As in `mra_attention`.
    """

    shown = ("block", "kept", "over", "sparse")
    refused = ("attn_mask", "is_causal")
    because = LATER

    def __init__(
        self,
        *args: Any,
        block: int = 32,
        kept: int = 4,
        over: str = "rows",
        sparse: bool = False,
        attention: Mechanism = mra_attention,
        **options: Any,
    ) -> None:
        super().__init__(*args, attention=attention, **options)
        check_sizes(block, kept, over, sparse)
        self.block, self.kept, self.over, self.sparse = block, kept, over, sparse

    def mechanism(self, base: Mechanism, heads: Heads) -> Mechanism:
        """Add the options of the layer."""
        options = {"block": self.block, "kept": self.kept, "over": self.over, "sparse": self.sparse}
        return functools.partial(base, **options)
