"""A pipeline to watch: it encodes some frames and writes tokens."""

import torch
from torch import nn


class Captioner:
    """Holds its modules as attributes; a call runs them."""

    def __init__(self, width: int) -> None:
        layer = nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
        self.project = nn.Linear(64, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4).eval()
        self.head = nn.Linear(width, 4000)

    @torch.no_grad()
    def __call__(self, frames: torch.Tensor, num_tokens: int = 8) -> torch.Tensor:
        """Token ids [B, num_tokens] for frames [B, T, 64]."""
        state = self.encoder(self.project(frames))
        tokens = []
        for _ in range(num_tokens):
            logits = self.head(state.mean(dim=1))
            tokens.append(logits.argmax(dim=-1))
            state = state + logits.mean()
        return torch.stack(tokens, dim=1)


def build(width: int = 256) -> Captioner:
    """What the workload file names."""
    torch.manual_seed(0)
    return Captioner(width)
