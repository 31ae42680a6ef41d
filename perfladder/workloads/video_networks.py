"""The two networks of the streaming workload: a diffusion transformer over a chunk of latents, and a frame decoder."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

_LARGEST_PERIOD = 10_000.0


def sinusoidal_features(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of positions [N] at `width` / 2 frequencies: [N, width] in float32.

    Source:
        Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """
    exponents = torch.arange(width // 2, device=positions.device, dtype=torch.float32) / (width // 2)
    angles = positions.float()[:, None] * torch.exp(-math.log(_LARGEST_PERIOD) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class SelfAttention(nn.Module):
    """Multi-head attention of all tokens [B, S, D] to all."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Same shape as the tokens."""
        batch, length, width = tokens.shape
        qkv = self.to_qkv(tokens).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        return self.to_out(attended.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and MLP, each with shift, scale and gate from the time embedding (adaptive layer norm).

    Source:
        Peebles and Xie, "Scalable Diffusion Models with Transformers", 2022, section 3.2.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = SelfAttention(width, num_heads)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, tokens: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, D] and time embedding [B, D] to tokens of the same shape."""
        parts = self.modulation(condition)[:, None].chunk(6, dim=-1)
        shift_attention, scale_attention, gate_attention, shift_mlp, scale_mlp, gate_mlp = parts
        attention_input = self.norm_attention(tokens) * (1 + scale_attention) + shift_attention
        tokens = tokens + gate_attention * self.attention(attention_input)
        mlp_input = self.norm_mlp(tokens) * (1 + scale_mlp) + shift_mlp
        return tokens + gate_mlp * self.mlp(mlp_input)


class ChunkTransformer(nn.Module):
    """Predicts the velocity of a chunk of latents, given the time and the last latents of the chunk before.

    Each frame is cut into patches; a token is one patch of one frame. The context is one more frame in front, which all
    others attend to and whose own output is dropped.

    Args:
        latent_channels: C.
        width: D of a token.
        num_layers: Blocks.
        num_heads: Attention heads; a divisor of the width.
        patch_size: Side of a patch, in latent pixels.
    """

    def __init__(
        self, latent_channels: int, width: int, num_layers: int, num_heads: int, *, patch_size: int = 2
    ) -> None:
        super().__init__()
        self.latent_channels = latent_channels
        self.patch_size = patch_size
        self.width = width
        self.embed = nn.Conv2d(latent_channels, width, kernel_size=patch_size, stride=patch_size)
        self.time_embed = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([TransformerBlock(width, num_heads) for _ in range(num_layers)])
        self.norm_out = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.to_patches = nn.Linear(width, latent_channels * patch_size**2)

    def forward(self, latents: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Predict the velocity [F, C, h, w].

        Args:
            latents: [F, C, h, w]; h and w are multiples of the patch size.
            time: A scalar tensor; 1 is noise and 0 is data.
            context: The last latents of the chunk before [1, C, h, w].
        """
        grid = self.embed(torch.cat([context, latents]))
        frames, _, rows, columns = grid.shape
        tokens = grid.permute(0, 2, 3, 1).reshape(1, frames * rows * columns, self.width)
        tokens = tokens + self._positions(frames, rows, columns, tokens)
        condition = self.time_embed(sinusoidal_features(1000 * time.reshape(1), self.width).to(tokens.dtype))
        for block in self.blocks:
            tokens = block(tokens, condition)
        patches = self.to_patches(self.norm_out(tokens)).view(frames, rows, columns, -1)
        return functional.pixel_shuffle(patches[1:].permute(0, 3, 1, 2), self.patch_size)

    def _positions(self, frames: int, rows: int, columns: int, tokens: torch.Tensor) -> torch.Tensor:
        """The sum of features of frame, row and column [1, S, D], in the dtype and on the device of the tokens."""
        frame, row, column = (
            sinusoidal_features(torch.arange(length, device=tokens.device), self.width)
            for length in (frames, rows, columns)
        )
        total = frame[:, None, None] + row[:, None] + column
        return total.reshape(1, -1, self.width).to(tokens.dtype)


class FrameDecoder(nn.Module):
    """Turns latents [F, C, h, w] into frames [F, 3, H, W] with values 0 to 1; each level doubles height and width.

    Args:
        latent_channels: C.
        channels: Channels of each level, from the smallest picture to the largest.
    """

    def __init__(self, latent_channels: int, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.upscale = 2 ** len(channels)
        self.conv_in = nn.Conv2d(latent_channels, channels[0], kernel_size=3, padding=1)
        inputs = (channels[0], *channels[:-1])
        self.levels = nn.ModuleList([UpLevel(*pair) for pair in zip(inputs, channels, strict=True)])
        self.conv_out = nn.Conv2d(channels[-1], 3, kernel_size=3, padding=1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """See the class."""
        hidden = self.conv_in(latents)
        for level in self.levels:
            hidden = level(hidden)
        return self.conv_out(hidden).sigmoid()


class UpLevel(nn.Module):
    """Doubles height and width, then one convolution with norm and activation."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(num_groups=4, num_channels=out_channels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[F, C, h, w] to [F, C', 2h, 2w]."""
        larger = functional.interpolate(hidden, scale_factor=2.0, mode="nearest")
        return functional.silu(self.norm(self.conv(larger)))
