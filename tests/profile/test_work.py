"""Operations and bytes of operator calls, by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from perfladder.profiling.work import record_work
from perfladder.sites import module_sites

FLOAT = 4


def record(function, module=None, *, mode=torch.no_grad):
    with mode():
        return record_work(function, module_sites(module, "net") if module is not None else [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_linear(mode):
    net, x = nn.Linear(8, 16), torch.randn(4, 8)
    (call,) = record(lambda: net(x), net, mode=mode)
    assert call.operator == "aten::addmm"
    assert call.flops == 2 * 4 * 8 * 16
    assert call.num_bytes == FLOAT * (16 + 4 * 8 + 8 * 16 + 4 * 16)
    assert (call.region, call.dtype) == ("untuned_module:net", "float32")


def test_convolution():
    net, x = nn.Conv2d(3, 5, 3, bias=False), torch.randn(2, 3, 10, 10)
    (call,) = record(lambda: net(x), net)
    assert call.operator == "aten::convolution"
    assert call.flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert call.num_bytes == FLOAT * (2 * 3 * 100 + 5 * 3 * 9 + 2 * 5 * 64)


def test_attention_on_a_cpu():
    q = torch.randn(2, 3, 7, 8)
    (call,) = record(lambda: F.scaled_dot_product_attention(q, q, q))
    assert call.flops == 2 * (2 * 3 * 7 * 7 * 8) * 2
    assert call.region is None


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (lambda x: x + x, 2 * 40),  # the same tensor twice is read once
        (lambda x: x + x.clone().mul(1), 80 + 80 + 120),
        (lambda x: x.add_(1), 80),
        (lambda x: x.fill_(1), 40),
        (lambda x: torch.empty(10).copy_(x), 80),
        (lambda x: torch.mul(x, 2, out=torch.empty(10)), 80),
        (lambda x: torch.ones(1).expand(10) + x, 4 + 4 + 40 + 40),
        (lambda x: x.view(2, 5).t().unsqueeze(0), 0),
        (lambda x: F.embedding(torch.tensor([1, 2]), x.view(5, 2)), 16 + 16 + 16),
        (lambda x: x.to(torch.bfloat16), 60),
    ],
)
def test_bytes_are_inputs_and_outputs_once(make, num_bytes):
    x = torch.ones(10)
    assert sum(call.num_bytes for call in record(lambda: make(x))) == num_bytes


def test_calls_are_in_order_with_their_innermost_region():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(1, 4)
    calls = record(lambda: net(x) + 1, net)
    assert [(call.region, call.operator) for call in calls] == [
        ("untuned_module:net.0", "aten::addmm"),
        ("untuned_module:net.1", "aten::relu"),
        ("untuned_module:net.2", "aten::addmm"),
        (None, "aten::add"),
    ]
    assert not net._forward_hooks


def test_integers_have_no_precision():
    (call,) = record(lambda: torch.ones(3, dtype=torch.int64))
    assert (call.dtype, call.num_bytes, call.flops) == (None, 24, 0)


@pytest.fixture
def composite():
    """An operator that others make up, of which a device may have a kernel of its own, as with a fused norm."""
    library = torch.library.Library("perfladder_work", "FRAGMENT")
    library.define("twice_plus_one(Tensor x) -> Tensor")
    library.impl("twice_plus_one", lambda x: x * 2 + 1, "CompositeImplicitAutograd")
    yield library
    library._destroy()


@pytest.mark.parametrize(
    ("has_kernel", "operators"),
    [(False, ["aten::mul", "aten::add"]), (True, ["perfladder_work::twice_plus_one"])],
)
def test_a_kernel_of_the_device_is_not_taken_apart(composite, has_kernel, operators):
    if has_kernel:
        composite.impl("twice_plus_one", lambda x: x.clone(), "CPU")
    x = torch.ones(4)
    with torch.inference_mode():
        calls = record_work(lambda: torch.ops.perfladder_work.twice_plus_one(x), [])
    assert [call.operator for call in calls] == operators


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fused_norm_of_a_gpu_is_one_call(mode):
    norm = nn.RMSNorm(64, device="cuda")
    x = torch.ones(4, 64, device="cuda")
    with mode():
        calls = record_work(lambda: norm(x), module_sites(norm, "norm"))
    assert [call.operator for call in calls] == ["aten::_fused_rms_norm"]
    assert calls[0].num_bytes >= FLOAT * (2 * 4 * 64 + 64)
