"""Built-in workload: a real Stable Diffusion pipeline with random weights, tiny or in the shapes of version 1.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from perfladder.errors import InputError
from perfladder.workloads.construction import quiet_imports, resolve_device, resolve_dtype, seeded_construction
from perfladder.workloads.tokens import MAX_NUM_TOKENS, build_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer


@dataclass(frozen=True)
class _Shapes:
    """The sizes of the three networks; the VAE has four levels in both, so a latent pixel is 8 x 8 image pixels."""

    unet_channels: tuple[int, ...]
    unet_layers_per_block: int
    unet_num_heads: int
    latent_size: int
    vae_channels: tuple[int, int, int, int]
    vae_layers_per_block: int
    text_width: int
    text_num_layers: int
    text_num_heads: int
    vocab_size: int | None
    norm_num_groups: int


_SHAPES = {
    "tiny": _Shapes(
        unet_channels=(32, 64),
        unet_layers_per_block=2,
        unet_num_heads=4,
        latent_size=8,
        vae_channels=(8, 8, 16, 16),
        vae_layers_per_block=1,
        text_width=32,
        text_num_layers=2,
        text_num_heads=4,
        vocab_size=None,
        norm_num_groups=8,
    ),
    # Source: the published configuration files of Stable Diffusion 1.5 and of the text model of CLIP ViT-L/14.
    "sd15": _Shapes(
        unet_channels=(320, 640, 1280, 1280),
        unet_layers_per_block=2,
        unet_num_heads=8,
        latent_size=64,
        vae_channels=(128, 256, 512, 512),
        vae_layers_per_block=2,
        text_width=768,
        text_num_layers=12,
        text_num_heads=12,
        vocab_size=49408,
        norm_num_groups=32,
    ),
}


def build(
    size: Literal["tiny", "sd15"] = "tiny",
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> StableDiffusionPipeline:
    """Build the pipeline in evaluation mode, with random weights that are the same for the same seed and device.

    Args:
        size: `tiny` is for one CPU core: 4 steps at 64 x 64 pixels take about 75 ms on an x86 server. `sd15` has the
            layer shapes and parameter counts of Stable Diffusion 1.5 and is meant for a GPU.
        device: Where the weights are made; `meta` makes none.
        dtype: Of all weights; None is float32.
        seed: Of the weights.

    Raises:
        InputError: Unknown size, device name or dtype.
        NotPossibleHereError: The device is not there.
    """
    if size not in _SHAPES:
        raise InputError(f"Unknown size {size!r} of the diffusion workload: expected one of {', '.join(_SHAPES)}.")
    shapes = _SHAPES[size]
    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    with quiet_imports():
        from diffusers import StableDiffusionPipeline

    tokenizer = build_tokenizer(shapes.vocab_size)
    with seeded_construction(target_device, target_dtype, seed):
        text_encoder = _build_text_encoder(shapes, tokenizer)
        unet = _build_unet(shapes)
        vae = _build_vae(shapes)
    pipeline = StableDiffusionPipeline(
        vae=vae.eval(),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=_build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _build_unet(shapes: _Shapes) -> UNet2DConditionModel:
    """The denoiser: attention at all levels but the lowest, as in Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel

    num_attention_levels = len(shapes.unet_channels) - 1
    return UNet2DConditionModel(
        sample_size=shapes.latent_size,
        block_out_channels=shapes.unet_channels,
        layers_per_block=shapes.unet_layers_per_block,
        cross_attention_dim=shapes.text_width,
        attention_head_dim=shapes.unet_num_heads,
        down_block_types=("CrossAttnDownBlock2D",) * num_attention_levels + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * num_attention_levels,
        norm_num_groups=shapes.norm_num_groups,
    )


def _build_vae(shapes: _Shapes) -> AutoencoderKL:
    """The autoencoder between images [B, 3, 8h, 8w] and latents [B, 4, h, w]."""
    from diffusers import AutoencoderKL

    num_levels = len(shapes.vae_channels)
    return AutoencoderKL(
        sample_size=8 * shapes.latent_size,
        block_out_channels=shapes.vae_channels,
        layers_per_block=shapes.vae_layers_per_block,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * num_levels,
        up_block_types=("UpDecoderBlock2D",) * num_levels,
        norm_num_groups=shapes.norm_num_groups,
    )


def _build_text_encoder(shapes: _Shapes, tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """The text encoder of CLIP: token ids [B, 77] to states [B, 77, text_width]."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=shapes.vocab_size or len(tokenizer),
        hidden_size=shapes.text_width,
        intermediate_size=4 * shapes.text_width,
        projection_dim=shapes.text_width,
        num_hidden_layers=shapes.text_num_layers,
        num_attention_heads=shapes.text_num_heads,
        max_position_embeddings=MAX_NUM_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def _build_scheduler() -> DDIMScheduler:
    """The noise schedule of Stable Diffusion 1.5 in a sampler that calls the UNet exactly once a step.

    It is made outside the device context: diffusers keeps a scheduler's tables on the CPU.
    """
    from diffusers import DDIMScheduler

    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
