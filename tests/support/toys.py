"""Modules and backends whose speed a test sets: they move a clock by the time that they pretend to take."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import nn

from perfladder.backend import Backend, BackendConfig, BuildRequest, Built

calls: Counter[str] = Counter()
"""Calls that toy backends have served, by their label."""

builds: Counter[str] = Counter()
"""Builds of toy backends, by their label."""


class NoClock:
    """For toys whose speed does not matter."""

    def pass_ms(self, ms: float) -> None:
        """No time."""


class Toy(nn.Module):
    """Scales its input; a call takes `ms`, and `sample_ms` for each of its samples."""

    def __init__(self, clock: Any = None, ms: float = 10.0, sample_ms: float = 0.0) -> None:
        super().__init__()
        self.clock = clock or NoClock()
        self.ms, self.sample_ms = ms, sample_ms
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.eval()

    def compute(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * self.weight * scale

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.clock.pass_ms(self.ms + self.sample_ms * len(x))
        return self.compute(x, scale)


class FasterConfig(BackendConfig):
    label: str = "faster"
    ms: float = 5.0
    sample_ms: float = 0.0
    noise: float = Field(default=0.0, description="Times are off by up to this part, at random but alike in each run.")


class Faster(Backend):
    """Right, and as fast as its options say."""

    name = "toy_faster"
    config_class: ClassVar = FasterConfig
    is_isolated = False

    def compile(self, request: BuildRequest) -> Built:
        config, module = self.config, request.module
        builds[config.label] += 1
        generator = random.Random(0)

        def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls[config.label] += 1
            factor = 1 + config.noise * generator.uniform(-1, 1)
            module.clock.pass_ms((config.ms + config.sample_ms * len(x)) * factor)
            return self.result(module.compute(x, *args, **kwargs), x)

        return Built(call, {"label": config.label})

    def result(self, right: torch.Tensor, x: torch.Tensor) -> Any:
        """What the call returns, given what is right."""
        return right


def samples(count: int = 2) -> list[torch.Tensor]:
    """Inputs of a `Toy`."""
    return [torch.arange(4.0) + index for index in range(count)]
