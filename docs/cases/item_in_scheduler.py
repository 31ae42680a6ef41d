"""Denoise latents in a loop, as a sampler does: a network, then a step of the scheduler."""

import argparse
import math

import torch
from torch import nn


class Scheduler:
    """An update whose size follows from the time and from the noise that was predicted."""

    def signal_left(self, time):
        """The part of the signal that is left, by the integral of the noise rate up to this time."""
        rates = (0.1 + 19.9 * time * index / 10_000 for index in range(10_000))
        return math.exp(-time * sum(rates) / 10_000)

    def step(self, noise, latents, time):
        """The latents after this step."""
        scale = noise.float().abs().mean().item()
        return latents + noise * (0.01 * self.signal_left(time) / (1 + scale))


class Sampler:
    """A network and its scheduler."""

    def __init__(self, device="cpu"):
        is_gpu = device != "cpu"
        width, dtype = (4096, torch.float16) if is_gpu else (256, torch.float32)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
        self.denoiser = nn.Sequential(*layers).to(device, dtype).eval()
        self.scheduler = Scheduler()
        self.latents = torch.randn(4096 if is_gpu else 64, width).to(device, dtype)

    @torch.inference_mode()
    def sample(self, steps=10):
        """Return the latents after so many steps."""
        latents = self.latents
        for index in range(steps):
            latents = self.scheduler.step(self.denoiser(latents), latents, 1 - index / steps)
        return latents


def main():
    """Sample once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    sampler = Sampler("cuda" if torch.cuda.is_available() else "cpu")
    print(sampler.sample(options.steps).float().std())


if __name__ == "__main__":
    main()
