"""The layer of a mechanism that has a Triton kernel."""

from __future__ import annotations

from typing import Any

from derived_attention.common.checks import check_flag
from derived_attention.layer import MultiheadAttention


class FusedAttention(MultiheadAttention):
    """`MultiheadAttention` with the keyword ``fused`` of its mechanism.

    Parameters
    ----------
    fused : bool, optional
        Whether the mechanism runs its kernel; left out, it is not passed on.
    """

    def __init__(self, *args: Any, fused: bool | None = None, **options: Any) -> None:
        if fused is not None:
            check_flag("fused", fused)
        super().__init__(*args, **options)
        self.fused = fused

    def kernel_keywords(self) -> dict[str, bool]:
        """Return ``fused`` for the mechanism, if it was given."""
        return {} if self.fused is None else {"fused": self.fused}
