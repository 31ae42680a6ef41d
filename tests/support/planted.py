"""Pipelines with one planted fault each, small enough to run in a second; targets of workloads."""

import torch
from torch import nn


def _stack(width, layers, dtype, device):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device, dtype).eval()


class Scheduler:
    """A loop's own arithmetic, some of it in Python, and a wait for the device if it is asked for."""

    def __init__(self, waits):
        self.waits = waits

    def step(self, noise, latents):
        scale = noise.float().abs().mean()
        if self.waits:
            scale = scale.item()
        self.last = sum(number * number for number in range(15_000))
        return latents + noise * 0.01 / (1 + scale)


class Denoiser:
    """A loop over a heavy module and its scheduler."""

    def __init__(self, device, waits):
        is_gpu = device != "cpu"
        self.unet = _stack(4096 if is_gpu else 256, 8, torch.float16 if is_gpu else torch.float32, device)
        self.scheduler = Scheduler(waits)
        self.latents = torch.randn(4096 if is_gpu else 64, self.unet[0].in_features).to(
            device, self.unet[0].weight.dtype
        )

    @torch.inference_mode()
    def __call__(self, steps=10):
        latents = self.latents
        for _ in range(steps):
            latents = self.scheduler.step(self.unet(latents), latents)
        return latents


class Chain(nn.Module):
    """Hundreds of operators with next to nothing to do each."""

    def __init__(self, operators=300):
        super().__init__()
        self.operators, self.scale = operators, nn.Parameter(torch.ones(16))

    def forward(self, x):
        for _ in range(self.operators):
            x = x * self.scale
        return x


class Glue(nn.Module):
    """Python that works for longer than the operators between it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        for _ in range(10):
            self.last = sum(number * number for number in range(10_000))
            x = x * self.scale
        return x


class Pipe:
    """One module, called on an input that is there already, or on one that comes from the host each time."""

    def __init__(self, stage, x, device, is_copied=False):
        self.stage, self.x, self._device, self._is_copied = stage.to(device).eval(), x, device, is_copied
        if not is_copied:
            self.x = x.to(device)

    @torch.inference_mode()
    def __call__(self):
        x = self.x.to(self._device) if self._is_copied else self.x
        out = self.stage(x)
        return out.cpu() if self._is_copied else out


class Decoding:
    """A narrow encoder, and a decoder that stayed wide."""

    def __init__(self, device):
        narrow = torch.float16 if device != "cpu" else torch.bfloat16
        width = 2048 if device != "cpu" else 256
        self.encoder, self.decoder = _stack(width, 2, narrow, device), _stack(width, 8, torch.float32, device)
        self.x = torch.randn(4096 if device != "cpu" else 64, width).to(device, narrow)

    @torch.inference_mode()
    def __call__(self):
        return self.decoder(self.encoder(self.x).float())


def _device(device):
    return "cuda" if device is None and torch.cuda.is_available() else device or "cpu"


def waiting(device=None):
    """A wait in each step of a loop."""
    return Denoiser(_device(device), waits=True)


def ahead(device=None):
    """The same loop without it."""
    return Denoiser(_device(device), waits=False)


def chain(device=None):
    """Bound by dispatch."""
    return Pipe(Chain(), torch.ones(16), _device(device))


def glue(device=None):
    """Bound by Python."""
    return Pipe(Glue(), torch.ones(16), _device(device))


def copies(device=None):
    """Bound by copies."""
    return Pipe(nn.Identity(), torch.ones(1 << 24), _device(device), is_copied=True)


def products(device=None):
    """Bound by the device, in products of matrices."""
    return Pipe(_stack(4096, 8, torch.float32, "cpu"), torch.ones(4096, 4096), _device(device))


def wide(device=None):
    """A decoder in float32."""
    return Decoding(_device(device))
