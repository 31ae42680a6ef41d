"""Filter a signal with a chain of short recursive filters, tap by tap: many small operators, hardly any arithmetic."""

import torch
from torch import nn


class Equalizer(nn.Module):
    """A few operators for each of many taps."""

    def __init__(self, taps=200):
        super().__init__()
        self.gain = nn.Parameter(1 + 0.001 * torch.randn(taps, 1))
        self.bias = nn.Parameter(0.001 * torch.randn(taps, 1))

    def forward(self, signal):
        for gain, bias in zip(self.gain.unbind(), self.bias.unbind(), strict=True):
            signal = torch.tanh(signal * gain + bias)
        return signal


class Synthesizer:
    """Equalizes what a small network makes."""

    def __init__(self, device="cpu"):
        self.source = nn.Linear(64, 64).to(device).eval()
        self.equalizer = Equalizer().to(device).eval()

    @torch.inference_mode()
    def __call__(self, notes):
        return self.equalizer(self.source(notes))


def main():
    """Synthesize once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    synthesizer = Synthesizer(device)
    print(synthesizer(torch.randn(8, 64, device=device)).std())


if __name__ == "__main__":
    main()
