import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.errors import InputError
from perfladder.functional.samples import copied_arguments
from perfladder.kernels import default_providers, find_provider, register_provider

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SDPA = "scaled_dot_product_attention"


def qkv(heads=4, kv_heads=4, length=6, kv_length=6, size=8, dtype=torch.float32):
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, kv_heads, kv_length, size, dtype=dtype)
    return torch.randn(2, heads, length, size, dtype=dtype), key, value


CALLS = {
    "plain": (qkv(), {}),
    "by_name": ((), dict(zip(("query", "key", "value"), qkv(), strict=True))),
    "causal": (qkv(), {"is_causal": True}),
    "scale": (qkv(), {"scale": 0.3, "dropout_p": 0.0}),
    "mask": (qkv(kv_length=5), {"attn_mask": torch.tensor([True, True, False, True, True]).expand(2, 4, 6, 5)}),
    "bias": ((*qkv(kv_length=5), torch.linspace(-1, 1, 30).view(6, 5)), {}),
    "shared_heads": (qkv(kv_heads=2), {"enable_gqa": True}),
    "transposed": (tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in qkv()), {}),
    "self": ((qkv()[0],) * 3, {}),
}
PROVIDERS = {
    "flash": pl.kernels.TorchSDPAKernelProvider(backend="flash"),
    "math": pl.kernels.TorchSDPAKernelProvider(backend="math"),
    "diffusers": pl.kernels.DiffusersAttentionKernelProvider(backend="native"),
}


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_attention_is_right_for_the_call_it_was_prepared_for(provider, call):
    args, kwargs = CALLS[call]
    live = PROVIDERS[provider].of(SDPA)
    assert live.why_not(CPU) is None
    assert live.why_not_for(*args, **kwargs) is None
    live.prepare([(args, kwargs)])
    other_args, other_kwargs = copied_arguments((args, kwargs))
    if call != "bias":
        for tensor in [*other_args, *other_kwargs.values()]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.mul_(-0.5)
    found = live(*other_args, **other_kwargs)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(*other_args, **other_kwargs))


def test_torchs_own_names_of_kernels_are_taken_too():
    from torch.nn.attention import SDPBackend

    for member, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")):
        assert pl.kernels.TorchSDPAKernelProvider(backend=member).config.backend == name
    with pytest.raises(InputError, match="backend: got"):
        pl.kernels.TorchSDPAKernelProvider(backend=SDPBackend.OVERRIDEABLE)


def test_one_tensor_in_the_sample_may_be_several_in_a_call():
    live = PROVIDERS["flash"].of(SDPA)
    live.prepare([CALLS["self"]])
    torch.testing.assert_close(live(*qkv()), functional.scaled_dot_product_attention(*qkv()))


def test_the_settings_of_the_process_are_left_alone():
    live = PROVIDERS["flash"].of(SDPA)
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    live.prepare([CALLS["plain"]])
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()))
            return func(*args, **(kwargs or {}))

    def run():
        with torch.no_grad(), Watching():
            live(*qkv())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert set(seen) <= {before}
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()) == before


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_kernels_of_a_gpu_are_not_applicable_on_a_cpu(backend):
    provider = pl.kernels.TorchSDPAKernelProvider(backend=backend)
    assert provider.why_not(CPU) == f"torch has its {backend} kernel on cuda, not on cpu"
    assert provider.why_not(CUDA) is None


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        (pl.kernels.FlashAttentionKernelProvider(), "FlashAttention 2 is not installed: pip install flash-attn"),
        (pl.kernels.FlashAttentionKernelProvider(version=3), "FlashAttention 3 is not installed"),
        (pl.kernels.FlashAttentionKernelProvider(version=4), "FlashAttention 4 is not installed"),
        (pl.kernels.SageAttentionKernelProvider(), "SageAttention is not installed: pip install sageattention"),
        (pl.kernels.DiffusersAttentionKernelProvider(backend="sage"), "Sage Attention backend 'sage' is not usable"),
        (pl.kernels.DiffusersAttentionKernelProvider(backend="fast"), "no attention backend 'fast'; it has flash"),
    ],
)
def test_a_library_that_is_missing_is_named(provider, says, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    libraries = ("flash_attn", "flash_attn_interface", "flash_attn.cute", "sageattention")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in libraries else find(name, *a))
    assert says in provider.why_not(CUDA)


@pytest.mark.parametrize("backend", ["flash_hub", "_flash_3_hub", "flash_4_hub", "sage_blackwell_hub"])
def test_backends_that_download_are_refused(backend):
    with pytest.raises(InputError, match="download kernels, which perfladder never does"):
        pl.kernels.DiffusersAttentionKernelProvider(backend=backend)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (qkv(), {}, "float16 and bfloat16, not float32"),
        (tuple(tensor[0] for tensor in qkv(dtype=torch.float16)), {}, "4 axes, not of 3"),
        (qkv(dtype=torch.float16), {"attn_mask": torch.ones(6, 6)}, "no mask"),
        (qkv(dtype=torch.float16), {"dropout_p": 0.1}, "no dropout"),
        (qkv(dtype=torch.float16, kv_length=5), {"is_causal": True}, "aligns the causal mask"),
        (qkv(dtype=torch.float16, size=264), {}, "heads of up to 256, not of 264"),
    ],
)
def test_calls_that_flash_attention_does_not_know_are_told(args, kwargs, says):
    assert says in pl.kernels.FlashAttentionKernelProvider().why_not_for(*args, **kwargs)
    assert pl.kernels.FlashAttentionKernelProvider().why_not_for(*qkv(dtype=torch.bfloat16)) is None


def test_convolutions_in_another_layout_give_the_usual_layout_back():
    provider = pl.kernels.ChannelsLastConvolutionKernelProvider()
    image, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert provider.why_not_for(image, weight) is None
    for function, w in (("conv2d", weight), ("conv_transpose2d", weight.transpose(0, 1))):
        live = provider.of(function)
        found = live(image, w, padding=1)
        torch.testing.assert_close(found, getattr(functional, function)(image, w, padding=1), atol=1e-4, rtol=1e-4)
        assert found.is_contiguous()
    last = image.contiguous(memory_format=torch.channels_last)
    assert provider.why_not_for(last, weight) == "the input is in channels-last layout already"
    assert provider.why_not_for(image[0], weight) == "it takes images of 4 axes"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of Inductor itself
def test_a_single_call_is_compiled():
    class Net(nn.Module):
        def forward(self, x):
            return functional.softmax(x, -1)

    net, x = Net(), torch.randn(64, 512)
    provider = pl.kernels.CompiledCallKernelProvider(functions=("softmax",))
    plan = pl.kernels.KernelOptimizer([provider]).make_plan(net, [((x,), {})])
    (record,) = plan.records
    assert record.correctness is not None, record.reason
    assert record.correctness.max_rel_error < 1e-5
    assert record.measurement is not None
    assert record.status in ("kept", "rejected"), record.reason


def test_a_compiled_call_needs_functions():
    with pytest.raises(InputError, match="functions: required"):
        pl.kernels.CompiledCallKernelProvider()
    with pytest.raises(InputError, match="one CompiledCallConfig, or options by name"):
        pl.kernels.CompiledCallKernelProvider(pl.kernels.KernelProviderConfig())


def test_all_that_are_tried_by_default_are_found_by_name():
    for provider in default_providers():
        assert find_provider(provider.name) is type(provider)
    assert find_provider("compiled") is pl.kernels.CompiledCallKernelProvider
    with pytest.raises(InputError, match=r"There is no kernel provider 'torch_spda'\. Did you mean 'torch_sdpa'"):
        find_provider("torch_spda")
    with pytest.raises(InputError, match="belongs to another kernel provider"):
        register_provider(type("Taken", (pl.kernels.KernelProvider,), {"name": "torch_sdpa"}))
