"""Denoise latents in a loop, as a sampler does: a network, then a step of the scheduler."""

import argparse

import torch
from torch import nn


class Scheduler:
    """An update whose size follows from the noise that was predicted."""

    def step(self, noise, latents):
        scale = noise.float().abs().mean().item()
        return latents + noise * 0.01 / (1 + scale)


class Sampler:
    """A network and its scheduler."""

    def __init__(self, width, device):
        dtype = torch.float16 if device == "cuda" else torch.float32
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
        self.denoiser = nn.Sequential(*layers).to(device, dtype).eval()
        self.scheduler = Scheduler()

    @torch.inference_mode()
    def sample(self, latents, steps):
        """Return the latents after so many steps."""
        for _ in range(steps):
            latents = self.scheduler.step(self.denoiser(latents), latents)
        return latents


def main():
    """Sample once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sampler = Sampler(options.width, device)
    latents = torch.randn(options.tokens, options.width, device=device, dtype=next(sampler.denoiser.parameters()).dtype)
    print(sampler.sample(latents, options.steps).float().std())


if __name__ == "__main__":
    main()
