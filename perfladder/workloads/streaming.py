"""Built-in workload: a video generator that streams; each chunk of frames is denoised, decoded and yielded in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from perfladder.errors import InputError
from perfladder.workloads.construction import resolve_device, resolve_dtype, seeded_construction
from perfladder.workloads.video_networks import ChunkTransformer, FrameDecoder


@dataclass(frozen=True)
class _Shapes:
    """The sizes of the two networks."""

    latent_channels: int
    width: int
    num_layers: int
    num_heads: int
    decoder_channels: tuple[int, ...]


_SHAPES = {
    "tiny": _Shapes(latent_channels=4, width=128, num_layers=4, num_heads=4, decoder_channels=(32, 16, 8)),
    "base": _Shapes(latent_channels=16, width=1024, num_layers=16, num_heads=16, decoder_channels=(512, 256, 128)),
}


class FlowEulerScheduler:
    """Euler steps along a straight path from noise (time 1) to data (time 0), whose velocity the transformer predicts.

    Source:
        Liu, Gong, Liu, "Flow Straight and Fast: Learning to Generate and Transfer Data with Rectified Flow", 2022.
    """

    def times(self, num_inference_steps: int) -> list[float]:
        """The borders of the steps, from 1.0 down to 0.0: one more than there are steps."""
        return [1.0 - index / num_inference_steps for index in range(num_inference_steps + 1)]

    def step(self, velocity: torch.Tensor, time: float, next_time: float, latents: torch.Tensor) -> torch.Tensor:
        """Move the latents from one time to the next along the velocity; same shape as the latents."""
        return latents + (next_time - time) * velocity


class StreamingVideoGenerator:
    """Generates a video chunk by chunk, each continuing from the last frame of the one before.

    Args:
        transformer: Predicts the velocity of a chunk of latents.
        decoder: Turns latents into frames.
        scheduler: Steps the latents.
    """

    def __init__(self, transformer: ChunkTransformer, decoder: FrameDecoder, scheduler: FlowEulerScheduler) -> None:
        self.transformer = transformer
        self.decoder = decoder
        self.scheduler = scheduler

    @property
    def device(self) -> torch.device:
        """Where the networks are and where frames are yielded."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the latents and the frames."""
        return next(self.transformer.parameters()).dtype

    def to(self, device: str | torch.device) -> StreamingVideoGenerator:
        """Move the networks, in place."""
        nn.ModuleList([self.transformer, self.decoder]).to(device)
        return self

    @torch.no_grad()
    def __call__(
        self,
        num_chunks: int = 4,
        num_inference_steps: int = 4,
        frames_per_chunk: int = 8,
        height: int = 64,
        width: int = 64,
        seed: int = 0,
    ) -> Iterator[torch.Tensor]:
        """Yield each chunk [F, 3, H, W], values 0 to 1, as soon as it is decoded.

        Args:
            num_chunks: How many chunks to yield; a chunk is computed when it is asked for.
            num_inference_steps: Transformer calls a chunk.
            frames_per_chunk: F.
            height: H in pixels, a multiple of 16.
            width: W in pixels, a multiple of 16.
            seed: Of the noise; the same seed on the same device gives the same video.

        Raises:
            ValueError: At the first chunk: a count is below 1, or a height or width does not divide into patches.
        """
        self._check_counts(
            num_chunks=num_chunks, num_inference_steps=num_inference_steps, frames_per_chunk=frames_per_chunk
        )
        latent_height, latent_width = self._latent_size(height, width)
        generator = torch.Generator(self.device).manual_seed(seed)
        channels = self.transformer.latent_channels
        context = torch.zeros(1, channels, latent_height, latent_width, device=self.device, dtype=self.dtype)
        for _ in range(num_chunks):
            noise_shape = (frames_per_chunk, channels, latent_height, latent_width)
            noise = torch.randn(noise_shape, generator=generator, device=self.device, dtype=self.dtype)
            latents = self.denoise(noise, context, num_inference_steps)
            yield self.decoder(latents)
            context = latents[-1:]

    def denoise(self, latents: torch.Tensor, context: torch.Tensor, num_inference_steps: int) -> torch.Tensor:
        """Turn noise into the latents of one chunk.

        Args:
            latents: Noise [F, C, h, w].
            context: The last latents of the chunk before [1, C, h, w]; zeros for the first chunk.
            num_inference_steps: Transformer calls.
        """
        times = self.scheduler.times(num_inference_steps)
        # All times go to the device in one copy; one a step would stall the host at every step.
        times_on_device = torch.tensor(times, device=latents.device, dtype=torch.float32)
        for index in range(num_inference_steps):
            velocity = self.transformer(latents, times_on_device[index], context)
            latents = self.scheduler.step(velocity, times[index], times[index + 1], latents)
        return latents

    @staticmethod
    def _check_counts(**counts: int) -> None:
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"Cannot generate a video with {name}={count}: expected at least 1.")

    def _latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the latents of a frame."""
        multiple = self.decoder.upscale * self.transformer.patch_size
        for name, pixels in (("height", height), ("width", width)):
            if pixels < 1 or pixels % multiple:
                raise ValueError(
                    f"Cannot generate frames with {name}={pixels}: expected a multiple of {multiple} "
                    f"(latents are {self.decoder.upscale} times smaller, in patches of {self.transformer.patch_size})."
                )
        return height // self.decoder.upscale, width // self.decoder.upscale


def build(
    size: Literal["tiny", "base"] = "tiny",
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> StreamingVideoGenerator:
    """Build the generator in evaluation mode, with random weights that are the same for the same seed and device.

    Args:
        size: `tiny` is for one CPU core: a chunk of 8 frames at 64 x 64 pixels takes about 35 ms on an x86 server.
            `base` has 308 million parameters and is meant for a GPU.
        device: Where the weights are made; `meta` makes none.
        dtype: Of all weights, latents and frames; None is float32.
        seed: Of the weights.

    Raises:
        InputError: Unknown size, device name or dtype.
        NotPossibleHereError: The device is not there.
    """
    if size not in _SHAPES:
        raise InputError(f"Unknown size {size!r} of the streaming workload: expected one of {', '.join(_SHAPES)}.")
    shapes = _SHAPES[size]
    with seeded_construction(resolve_device(device), resolve_dtype(dtype), seed):
        transformer = ChunkTransformer(
            latent_channels=shapes.latent_channels,
            width=shapes.width,
            num_layers=shapes.num_layers,
            num_heads=shapes.num_heads,
        )
        decoder = FrameDecoder(shapes.latent_channels, shapes.decoder_channels)
    return StreamingVideoGenerator(transformer.eval(), decoder.eval(), FlowEulerScheduler())
