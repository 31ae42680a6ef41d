"""Built-in workloads: the denoising loops of SDXL and FLUX.1, with random weights, tiny or in the published shapes.

Only the denoiser and its scheduler are there, with random states in the place of a text encoder's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from perfladder.workloads.construction import (
    quiet_imports,
    require_size,
    resolve_device,
    resolve_dtype,
    seeded_construction,
)

if TYPE_CHECKING:
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

_LATENT_SCALE = 8
_SDXL: dict[str, dict[str, Any]] = {
    # Source: the published configuration of the UNet of Stable Diffusion XL 1.0 (base).
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    "tiny": {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": [1, 2],
        "attention_head_dim": [2, 4],
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
        "norm_num_groups": 8,
    },
}
_FLUX: dict[str, dict[str, Any]] = {
    # Source: the published configuration of the transformer of FLUX.1 [schnell].
    "flux": {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24},
    "tiny": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (4, 6, 6),
    },
}


class SdxlDenoiser:
    """The loop of an SDXL pipeline around its UNet: latents [B, 4, height / 8, width / 8] in each step."""

    def __init__(self, unet: UNet2DConditionModel, device: torch.device, dtype: torch.dtype) -> None:
        from diffusers import EulerDiscreteScheduler

        self.unet, self.device, self.dtype = unet, device, dtype
        self.scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")

    @torch.no_grad()
    def __call__(
        self,
        num_inference_steps: int = 4,
        height: int = 1024,
        width: int = 1024,
        batch_size: int = 1,
        guidance_scale: float = 5.0,
    ) -> torch.Tensor:
        """Denoise; with guidance the UNet takes two samples for each picture."""
        config, count = self.unet.config, batch_size * (2 if guidance_scale > 1 else 1)
        like: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        text = torch.randn(count, 77, config.cross_attention_dim, **like)
        pooled_width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {
            "text_embeds": torch.randn(count, pooled_width, **like),
            "time_ids": torch.tensor([[height, width, 0, 0, height, width]] * count, **like),
        }
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        latents = torch.randn(batch_size, 4, height // _LATENT_SCALE, width // _LATENT_SCALE, **like)
        latents = latents * self.scheduler.init_noise_sigma
        for step in self.scheduler.timesteps:
            model_input = torch.cat([latents] * (count // batch_size))
            model_input = self.scheduler.scale_model_input(model_input, step)
            noise = self.unet(
                model_input, step, encoder_hidden_states=text, added_cond_kwargs=added, return_dict=False
            )[0]
            if count > batch_size:
                without, with_text = noise.chunk(2)
                noise = without + guidance_scale * (with_text - without)
            latents = self.scheduler.step(noise, step, latents, return_dict=False)[0]
        return latents


class FluxDenoiser:
    """The loop of a FLUX pipeline around its transformer: packed latents [B, height * width / 256, 64] in each step."""

    def __init__(self, transformer: FluxTransformer2DModel, device: torch.device, dtype: torch.dtype) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.transformer, self.device, self.dtype = transformer, device, dtype
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(
        self,
        num_inference_steps: int = 4,
        height: int = 1024,
        width: int = 1024,
        batch_size: int = 1,
        num_tokens: int = 256,
    ) -> torch.Tensor:
        """Denoise."""
        config = self.transformer.config
        like: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        rows, columns = height // (2 * _LATENT_SCALE), width // (2 * _LATENT_SCALE)
        image_ids = torch.zeros(rows, columns, 3, **like)
        image_ids[..., 1] += torch.arange(rows, device=self.device)[:, None]
        image_ids[..., 2] += torch.arange(columns, device=self.device)[None]
        text = torch.randn(batch_size, num_tokens, config.joint_attention_dim, **like)
        pooled = torch.randn(batch_size, config.pooled_projection_dim, **like)
        latents = torch.randn(batch_size, rows * columns, config.in_channels, **like)
        self.scheduler.set_timesteps(num_inference_steps, device=self.device)
        for step in self.scheduler.timesteps:
            noise = self.transformer(
                hidden_states=latents,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=step.expand(batch_size).to(self.dtype) / 1000,
                img_ids=image_ids.reshape(-1, 3),
                txt_ids=torch.zeros(num_tokens, 3, **like),
                return_dict=False,
            )[0]
            latents = self.scheduler.step(noise, step, latents, return_dict=False)[0]
        return latents


def build_sdxl(
    size: Literal["tiny", "sdxl"] = "tiny",
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> SdxlDenoiser:
    """Build the denoiser of SDXL, with random weights that are the same for the same seed and device.

    Args:
        size: `sdxl` has the layer shapes and parameter count of Stable Diffusion XL 1.0 and is meant for a GPU.
        device: Where the weights are made; `meta` makes none.
        dtype: Of all weights; None is float32.
        seed: Of the weights.

    Raises:
        InputError: Unknown size, device name or dtype.
        NotPossibleHereError: The device is not there.
    """
    require_size(size, _SDXL, "sdxl-unet")
    with quiet_imports():
        from diffusers import UNet2DConditionModel

    shared = {"addition_embed_type": "text_time", "use_linear_projection": True, "layers_per_block": 2}
    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    with seeded_construction(target_device, target_dtype, seed):
        unet = UNet2DConditionModel(**shared, **_SDXL[size])
    return SdxlDenoiser(unet.eval(), target_device, target_dtype)


def build_flux(
    size: Literal["tiny", "flux"] = "tiny",
    *,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
) -> FluxDenoiser:
    """Build the denoiser of FLUX.1 [schnell], with random weights that are the same for the same seed and device.

    Args:
        size: `flux` has the layer shapes and parameter count of FLUX.1 [schnell]: 24 GB in bfloat16.
        device: Where the weights are made; `meta` makes none.
        dtype: Of all weights; None is float32.
        seed: Of the weights.

    Raises:
        InputError: Unknown size, device name or dtype.
        NotPossibleHereError: The device is not there.
    """
    require_size(size, _FLUX, "flux-transformer")
    with quiet_imports():
        from diffusers import FluxTransformer2DModel

    target_device, target_dtype = resolve_device(device), resolve_dtype(dtype)
    with seeded_construction(target_device, target_dtype, seed):
        transformer: nn.Module = FluxTransformer2DModel(**_FLUX[size])
    return FluxDenoiser(transformer.eval(), target_device, target_dtype)
