import numpy as np
import pytest
import torch

from perfladder.errors import InputError
from perfladder.workload import load_workload
from perfladder.workloads import diffusion

diffusers = pytest.importorskip("diffusers")


def _images(pipeline, *, seed=0, **inputs):
    torch.manual_seed(seed)
    defaults = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "np"}
    return pipeline(**(defaults | inputs)).images


def _num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_is_a_real_pipeline_ready_for_inference(pipeline):
    assert type(pipeline) is diffusers.StableDiffusionPipeline
    assert not any(module.training for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder))


def test_packaged_inputs_give_a_finite_picture(pipeline, capfd):
    images = _images(pipeline, **load_workload("diffusion").workload.inputs)
    assert images.shape == (1, 64, 64, 3)
    assert np.isfinite(images).all()
    assert images.std() > 0.01
    assert capfd.readouterr().err == ""


def test_unet_is_called_once_a_step(pipeline):
    calls = []
    hook = pipeline.unet.register_forward_hook(lambda *_: calls.append(1))
    _images(pipeline, num_inference_steps=4)
    hook.remove()
    assert len(calls) == 4


def test_picture_depends_on_the_seed_and_the_prompt_only(pipeline):
    first = _images(pipeline)
    assert np.array_equal(first, _images(pipeline))
    assert not np.array_equal(first, _images(pipeline, seed=1))
    assert not np.array_equal(first, _images(pipeline, prompt="a dog"))


def test_same_seed_builds_the_same_weights(pipeline):
    again, other = diffusion.build(), diffusion.build(seed=1)
    for name in ("unet", "vae", "text_encoder"):
        weights = [list(getattr(p, name).parameters()) for p in (pipeline, again, other)]
        assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(weights[0], weights[2], strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_stays_finite(dtype):
    pipeline = diffusion.build(dtype=dtype)
    # diffusers clamps the picture, and a clamp turns an infinity into 1.0, so the decoder's own output is looked at.
    decoded = []
    hook = pipeline.vae.decoder.register_forward_hook(lambda _module, _args, output: decoded.append(output))
    _images(pipeline)
    hook.remove()
    assert decoded[0].dtype == getattr(torch, dtype)
    assert decoded[0].isfinite().all()


def test_sd15_has_the_published_parameter_counts():
    pipeline = diffusion.build("sd15", device="meta", dtype="float16")
    modules = (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    assert [_num_parameters(module) for module in modules] == [859_520_964, 83_653_863, 123_060_480]
    assert {parameter.dtype for module in modules for parameter in module.parameters()} == {torch.float16}
    assert (pipeline.unet.config.sample_size, pipeline.vae_scale_factor) == (64, 8)


def test_unknown_size_is_refused():
    with pytest.raises(InputError, match="tiny, sd15"):
        diffusion.build("sdxl")


@pytest.mark.gpu
def test_sd15_gives_a_finite_picture_on_a_gpu():
    workload = load_workload("diffusion-sd15").workload
    pipeline = diffusion.build(**workload.target_args, device="cuda", dtype=workload.dtype)
    decoded = []
    pipeline.vae.decoder.register_forward_hook(lambda _module, _args, output: decoded.append(output))
    images = _images(pipeline, **workload.inputs)
    assert images.shape == (1, 512, 512, 3)
    assert decoded[0].isfinite().all()
