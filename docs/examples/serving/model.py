"""The model that is served: built alike where it is tuned and where it is served."""

from __future__ import annotations

import torch
from torch import nn

NUM_FEATURES = 64
NUM_CLASSES = 10
MAX_BATCH_SIZE = 16
"""Rows that one request may have; the module is tuned for all sizes up to it."""


def build(seed: int = 0) -> nn.Module:
    """A small classifier, from [B, 64] to [B, 10]; an archive brings the weights that it was tuned with."""
    torch.manual_seed(seed)
    layers = [nn.Linear(NUM_FEATURES, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, NUM_CLASSES)]
    return nn.Sequential(*layers, nn.Softmax(-1)).eval()
