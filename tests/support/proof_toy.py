"""A target with a module that waits, and backends that wait less; some serve from an archive what they should not."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import perfladder as pl
from perfladder.backend import Backend, BackendConfig

PLAIN_S, QUICK_S = 0.02, 0.004


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PLAIN_S)
        return self.inner(x)


class HoldConfig(BackendConfig):
    hold: str | None = None


class Quick(Backend):
    """Waits less. While the file `hold` is there, it is still being built."""

    name = "proof_quick"
    config_class = HoldConfig
    is_isolated = False

    def compile(self, request: Any) -> Callable[..., Any]:
        while self.config.hold and Path(self.config.hold).exists():
            time.sleep(0.02)

        def call(x: torch.Tensor) -> torch.Tensor:
            time.sleep(QUICK_S)
            return request.module.inner(x)

        return call


class WrongLater(Quick):
    """Right where it is tuned, and wrong in every process that loads its archive."""

    name = "proof_wrong_later"

    def load(self, request: Any) -> Callable[..., Any]:
        return lambda x: request.module.inner(x) + 1


class Slower(Quick):
    """Right, and no faster."""

    name = "proof_slower"

    def compile(self, request: Any) -> Callable[..., Any]:
        def call(x: torch.Tensor) -> torch.Tensor:
            time.sleep(PLAIN_S)
            return request.forward(x)

        return call


for kind in (Quick, WrongLater, Slower):
    pl.backend.register_backend(kind)


class Pipe:
    def __init__(self) -> None:
        self.net = Waiting().eval()
        self.head = nn.Linear(64, 8)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))


def build() -> Pipe:
    return Pipe()


def build_module() -> nn.Module:
    """The pipeline as a module, which holds the one that is tuned."""
    whole = nn.Module()
    whole.net = Waiting().eval()
    return whole
