"""Built-in workload: a decoder of text with random weights, tiny or in the shapes of Llama 3.2 1B; for `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from perfladder.workloads.construction import (
    quiet_imports,
    require_size,
    resolve_device,
    resolve_dtype,
    seeded_construction,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "tie_word_embeddings": True,
    },
    # Source: the published configuration of Llama 3.2 1B.
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}


def build(
    size: Literal["tiny", "llama-1b"] = "tiny",
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Build the model in evaluation mode, with random weights that are the same for the same seed and device.

    It ends at no token, so that a call always makes as many as were asked for.

    Args:
        size: `llama-1b` has the layer shapes and parameter count of Llama 3.2 1B.
        device: Where the weights are made; `meta` makes none.
        dtype: Of all weights; None is float32.
        seed: Of the weights.

    Raises:
        InputError: Unknown size, device name or dtype.
        NotPossibleHereError: The device is not there.
    """
    require_size(size, _SHAPES, "llama-1b")
    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    with quiet_imports():
        from transformers import LlamaConfig, LlamaForCausalLM

    with seeded_construction(target_device, target_dtype, seed):
        model = LlamaForCausalLM(LlamaConfig(**_SHAPES[size], bos_token_id=1, eos_token_id=None, pad_token_id=0))
    return model.eval()
