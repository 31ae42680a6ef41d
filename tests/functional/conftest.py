"""Modules that the tests of the kernel profiler share."""

import pytest
import torch
from torch import nn

import perfladder as pl


class Attention(nn.Module):
    """Calls no functional: operators and methods of tensors only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.transpose(-1, -2)).softmax(dim=-1)
        return torch.matmul(weights, x)[:, :2]


class Block(nn.Module):
    """A nested hierarchy with functional calls at two levels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.attention(self.norm(x)))


@pytest.fixture
def block() -> Block:
    """A block for inputs [B, S, 8]."""
    return Block().eval()


@pytest.fixture
def profile():
    """Profile a function once, unwarmed; returns the frame, the samples and the profiler."""

    def run(function, data=None, *, names=frozenset(), module=None, warmup_iterations=0, **options):
        profiler = pl.ModuleFunctionKernelProfiler(names, **options)
        frame, samples = profiler.profile(function, data, module=module, warmup_iterations=warmup_iterations)
        return frame, samples, profiler

    return run


@pytest.fixture
def calls_of():
    """The (module, function) pairs of a frame."""

    def pairs(frame):
        return set(zip(frame["module_name"], frame["function_name"], strict=True))

    return pairs
