"""On a GPU: the worked example of the documentation, and torch's own kernels. Run by hand: pytest -m gpu."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.kernels.runtime import KernelMode, LiveSwap, under_mode
from perfladder.kernels.signatures import CallSignature

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

PAGE = Path(__file__).parents[2] / "docs" / "kernel-providers.md"


@pytest.fixture
def example(tmp_path):
    """The page's Triton kernel, as a file: Triton reads its source."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    code = next(block for block in blocks if "@triton.jit" in block)
    path = tmp_path / "triton_example.py"
    path.write_text(code[: code.index("plan = ")])
    spec = importlib.util.spec_from_file_location("triton_example", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["triton_example"] = module
    spec.loader.exec_module(module)
    yield module.TritonRMSNorm
    del sys.modules["triton_example"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 1000, 4096])
def test_the_triton_kernel_of_the_documentation_is_right(example, dtype, size):
    net = nn.RMSNorm(size, eps=1e-6, device="cuda", dtype=dtype)
    x = torch.randn(33, 5, size, device="cuda", dtype=dtype)
    plan = pl.kernels.KernelOptimizer([example()], min_time_share=0).make_plan(net, [((x,), {})])
    (record,) = plan.records
    assert record.correctness is not None, record.reason
    assert record.status == "kept" or record.reason.startswith("not faster"), record.reason
    assert record.reference_dtype == "float64"


def test_the_triton_kernel_is_part_of_a_compiled_graph(example):
    net = nn.Sequential(nn.RMSNorm(512, eps=1e-6), nn.GELU()).cuda()
    x = torch.randn(64, 512, device="cuda")
    provider = example().of("rms_norm")
    signature = CallSignature.of(((x, (512,), net[0].weight, 1e-6), {}))
    with torch.no_grad():
        compiled = torch.compile(under_mode(net.forward, KernelMode([LiveSwap("rms_norm", signature, provider)])))
        torch.testing.assert_close(compiled(x), net(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_each_kernel_of_torch_for_attention_is_right(backend):
    def attention(x):
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Net(nn.Module):
        def forward(self, x):
            return attention(x)

    x = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.float16)
    provider = pl.kernels.TorchSDPAKernelProvider(backend=backend)
    plan = pl.kernels.KernelOptimizer([provider], min_time_share=0).make_plan(Net(), [((x,), {})])
    (record,) = plan.records
    assert record.correctness is not None, record.reason
    assert record.correctness.max_rel_error < 1e-2
