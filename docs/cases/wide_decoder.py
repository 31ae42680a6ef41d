"""Encode in bfloat16, then decode to pixels; the decoder was left in the dtype that it was loaded in."""

import torch
from torch import nn


def block(width, layers):
    """Layers of one width."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(layers)))


class Codec:
    """A narrow encoder and a wide decoder."""

    def __init__(self, width=1024, device="cpu"):
        self.encoder = block(width, 2).to(device, torch.bfloat16).eval()
        self.decoder = nn.Sequential(block(width, 6), nn.Linear(width, 768)).to(device).eval()

    @torch.inference_mode()
    def __call__(self, frames):
        dtype = next(self.decoder.parameters()).dtype
        return self.decoder(self.encoder(frames.to(torch.bfloat16)).to(dtype)).float()


def main():
    """Decode one clip."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    codec = Codec(device=device)
    print(codec(torch.randn(256, 1024, device=device)).std())


if __name__ == "__main__":
    main()
