"""Synthesize a signal, then equalize it band by band: many small operators, hardly any arithmetic."""

import torch
from torch import nn


class Equalizer(nn.Module):
    """A gain and a soft limit for each band."""

    def __init__(self, bands=200):
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(bands))
        self.bias = nn.Parameter(0.1 * torch.randn(bands))

    def forward(self, signal):
        """Equalize [bands, samples]."""
        bands = []
        for index in range(len(self.gain)):
            bands.append(torch.tanh(signal[index] * self.gain[index] + self.bias[index]))
        return torch.stack(bands)


class Synthesizer:
    """Equalizes what a small network makes."""

    def __init__(self, device="cpu"):
        self.source = nn.Linear(64, 256).to(device).eval()
        self.equalizer = Equalizer().to(device).eval()

    @torch.inference_mode()
    def __call__(self, notes):
        return self.equalizer(self.source(notes))


def main():
    """Synthesize once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    synthesizer = Synthesizer(device)
    print(synthesizer(torch.randn(200, 64, device=device)).std())


if __name__ == "__main__":
    main()
