"""The large workloads: published sizes without weights, and the same code in tiny."""

import pytest
import torch

from perfladder.errors import InputError
from perfladder.ladder import climb
from perfladder.workload import load_workload, parse_workload
from perfladder.workloads import denoisers, language

# Diffusers' schedulers, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


def num_parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_sizes_are_the_published_ones():
    assert num_parameters(denoisers.build_sdxl("sdxl", device="meta", dtype="float16").unet) == 2_567_463_684
    flux = denoisers.build_flux("flux", device="meta", dtype="bfloat16").transformer
    assert num_parameters(flux) == 11_891_178_560
    assert num_parameters(language.build("llama-1b", device="meta", dtype="bfloat16")) == 1_235_814_400


@pytest.mark.parametrize("name", ["sdxl-unet", "flux-transformer"])
def test_a_tiny_denoiser_runs_the_loop(name):
    build = {"sdxl-unet": denoisers.build_sdxl, "flux-transformer": denoisers.build_flux}[name]
    pipe = build()
    torch.manual_seed(0)
    out = pipe(num_inference_steps=2, height=32, width=64, batch_size=2)
    assert out.isfinite().all()
    assert out.shape == ((2, 4, 4, 8) if name == "sdxl-unet" else (2, 8, 64))
    torch.manual_seed(0)
    assert pipe(num_inference_steps=2, height=32, width=64, batch_size=2).equal(out)
    assert all(torch.equal(*pair) for pair in zip(weights(build()), weights(pipe), strict=True))


def weights(pipe):
    return [
        parameter
        for part in vars(pipe).values()
        if isinstance(part, torch.nn.Module)
        for parameter in part.parameters()
    ]


def test_without_guidance_the_unet_sees_each_picture_once():
    pipe, seen = denoisers.build_sdxl(), []
    pipe.unet.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    pipe(num_inference_steps=1, height=32, width=32, guidance_scale=1.0)
    pipe(num_inference_steps=1, height=32, width=32)
    assert seen == [1, 2]


def test_a_tiny_decoder_makes_as_many_tokens_as_asked():
    model = language.build()
    out = model.generate(torch.arange(8)[None], max_new_tokens=5, do_sample=False)
    assert out.shape == (1, 13)


@pytest.mark.parametrize("build", [denoisers.build_sdxl, denoisers.build_flux, language.build])
def test_an_unknown_size_is_refused(build):
    with pytest.raises(InputError, match="expected one of"):
        build("huge")


@pytest.mark.slow
def test_the_ladder_times_its_stages_in_tiny(tmp_path):
    workload = load_workload("llama-1b").workload
    smaller = {"target_args": {"size": "tiny"}, "device": "cpu", "dtype": None}
    smaller |= {"measured_runs": 2, "warmup_runs": 1}
    outcome = climb(parse_workload(workload.model_dump() | smaller), runs_dir=tmp_path, until="stages")
    assert (outcome.status, outcome.exit_code) == ("done", 0)
