"""Arguments of scaled dot-product attention by their names, for providers of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

ATTENTION: Final = "scaled_dot_product_attention"


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call; `query` is [B, H, S, D], `key` and `value` are [B, H, T, D]; names and defaults as in torch."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def heads_last(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value as [B, S, H, D], which most libraries take."""
        return self.query.transpose(1, 2), self.key.transpose(1, 2), self.value.transpose(1, 2)


def why_not_half_precision(*args: Any, **kwargs: Any) -> str | None:
    """Why a call is none for kernels that know 16-bit numbers and causal masks only."""
    call = AttentionCall(*args, **kwargs)
    if call.query.dim() != 4:
        return f"it takes tensors of 4 axes, not of {call.query.dim()}"
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {str(call.query.dtype).removeprefix('torch.')}"
    if call.attn_mask is not None:
        return "it takes no mask"
    if call.dropout_p:
        return "it has no dropout that could be compared"
    if call.is_causal and call.query.shape[2] != call.key.shape[2]:
        return "it aligns the causal mask of sequences of different lengths otherwise than torch"
    return None
