"""A target that loads quickly: two stages, of which one dominates; it can be told to fail, and to hang."""

import os
import time
from pathlib import Path

import torch


class Pipeline:
    def __init__(self, flag: str | None, hold: str | None) -> None:
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(64, 64)
        self.denoiser = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
        self.flag, self.hold = flag, hold

    @torch.no_grad()
    def __call__(self, fail: bool = False) -> torch.Tensor:
        if fail or (self.flag and Path(self.flag).exists()):
            raise ValueError("the toy was told to fail")
        while self.hold and Path(self.hold).exists():
            time.sleep(0.05)
        self.encoder(torch.ones(1, 64))
        latents = torch.ones(64, 256)
        for _ in range(4):
            latents = self.denoiser(latents)
        return latents


def build(flag: str | None = None, hold: str | None = None) -> Pipeline:
    return Pipeline(flag, hold)


def build_nothing() -> Pipeline:
    raise RuntimeError(f"the toy cannot be built in {os.getpid()}")
