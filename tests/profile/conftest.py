"""A small pipeline with what matters: modules, a method as entry point, glue, a plain object around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import perfladder as pl

NUM_STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(x)

    def decode(self, latents: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self._scaled(self.out(latents), scale)

    def _scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pipe:
    """Calls the unet several times, then the decoder by a method of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.unet = Unet().eval()
        self.vae = Decoder().eval()
        self.num_calls = 0
        self.grad_modes: set[bool] = set()

    def __call__(self, x: torch.Tensor, steps: int = NUM_STEPS) -> torch.Tensor:
        self.num_calls += 1
        self.grad_modes.add(torch.is_grad_enabled())
        for _ in range(steps):
            x = x - 0.1 * self.unet(x)
        return self.vae.decode(x, scale=0.5)


class Wrapper(nn.Module):
    """What stands for a tuned module until there is one: a module that carries the protocol of `perfladder.managed`."""

    def __init__(self, module: nn.Module, state: str = "tuned", by: str = "aot", name: str = "wrapped") -> None:
        super().__init__()
        self.module = module
        self.perfladder_managed = by
        self.perfladder_name = name
        self.perfladder_state = state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Show the wrapped module's attributes, which pipelines ask for (`config`, `dtype`)."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


@pytest.fixture
def block() -> Callable[[], nn.Module]:
    return Block


@pytest.fixture
def wrap() -> Callable[..., nn.Module]:
    return Wrapper


@pytest.fixture
def profile() -> Callable[..., pl.PerformanceProfile]:
    """Profile with few runs."""

    def call(obj: Any, input_data: Any = None, **options: Any) -> pl.PerformanceProfile:
        return pl.profile(obj, input_data, **{"warmup_runs": 1, "measured_runs": 2, **options})

    return call
