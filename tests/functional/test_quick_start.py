"""The two ways to begin: profile a module itself, and profile a module that a pipeline uses."""

import pytest
import torch
from torch import nn

import perfladder as pl

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("device", DEVICES)
def test_module_itself(device):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64)).eval().to(device)
    samples = [((torch.randn(32, 128, device=device),), {})]
    profiler = pl.ModuleFunctionKernelProfiler(function_names={"linear", "relu"})
    profiling_df, function_data = profiler.profile(model, samples, warmup_iterations=3)
    assert set(profiling_df["module_name"]) == {"0", "1", "2"}
    assert set(profiling_df["function_name"]) == {"linear", "relu"}
    assert set(profiling_df["op"]) == {"aten::linear", "aten::relu"}
    assert profiler.coverage.is_host == (device == "cpu")
    summary_df = profiler.describe_results(profiling_df, function_data).set_index("function_name")
    assert summary_df.loc["linear", ["calls", "num_distinct_samples", "num_modules"]].tolist() == [2, 2, 2]
    assert summary_df.loc["relu", ["calls", "num_distinct_samples", "num_modules"]].tolist() == [1, 1, 1]
    # Two layers' inputs, weights and biases; the input of the activation.
    floats = 32 * 128 + 256 * 128 + 256 + 32 * 256 + 64 * 256 + 64
    assert summary_df.loc["linear", "tensor_size_MB"] == pytest.approx(4 * floats / 2**20)
    assert summary_df.loc["relu", "tensor_size_MB"] == pytest.approx(4 * 32 * 256 / 2**20)
    for _, (args, kwargs) in function_data["linear"]:
        assert all(tensor.device.type == device for tensor in args)
        nn.functional.linear(*args, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
def test_module_used_by_a_pipeline(device):
    pytest.importorskip("diffusers")
    from perfladder.workloads import diffusion

    pipe = diffusion.build(device=device)
    profiler = pl.ModuleFunctionKernelProfiler()

    def inference_fn():
        pipe("A futuristic cityscape", num_inference_steps=1, height=64, width=64)

    profiling_df, function_data = profiler.profile(inference_fn, module=pipe.unet, warmup_iterations=1)
    names = {name for name, _ in pipe.unet.named_modules()}
    assert set(profiling_df["module_name"]) <= names
    assert profiler.coverage.attributed_share > 0.98
    assert profiler.coverage.outside_us > 0
    summary_df = profiler.describe_results(profiling_df, function_data, top_k=100).set_index("function_name")
    assert {"conv2d", "linear", "group_norm", "silu", "scaled_dot_product_attention"} <= set(summary_df.index)
    num_convolutions = sum(isinstance(module, nn.Conv2d) for module in pipe.unet.modules())
    assert summary_df.loc["conv2d", "calls"] == summary_df.loc["conv2d", "num_modules"] == num_convolutions
    assert sum(count for count, _ in function_data["conv2d"]) == num_convolutions
    assert not any(module._forward_hooks for module in pipe.unet.modules())


@pytest.mark.gpu
def test_samples_on_the_cpu_leave_the_devices_memory_alone(tmp_path):
    layer, x = nn.Linear(1024, 1024).cuda(), torch.randn(64, 1024, device="cuda")
    for place in ("cpu", tmp_path):
        profiler = pl.ModuleFunctionKernelProfiler(samples_on=place)
        frame, samples = profiler.profile(layer, [((x,), {})])
        [(_, (args, _))] = samples["linear"]
        assert {tensor.device.type for tensor in args} == {"cpu"}
        assert torch.equal(args[0], x.cpu())
        assert not frame["kernel"].str.startswith("Memcpy").any()


@pytest.mark.gpu
def test_capture_of_a_graph_does_not_capture_the_copying():
    class Capturing(nn.Module):
        def forward(self, x):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = nn.functional.silu(x)
            graph.replay()
            return y

    profiler = pl.ModuleFunctionKernelProfiler()
    frame, samples = profiler.profile(Capturing(), [((torch.ones(8, device="cuda"),), {})], warmup_iterations=1)
    assert samples["silu"] == []
    assert "SAMPLES_LEFT_OUT" in [warning.code for warning in profiler.coverage.warnings]
    assert frame["kernel"].str.contains("silu").sum() == 1
    assert not frame["kernel"].str.startswith("Memcpy").any()


@pytest.mark.gpu
def test_copies_of_samples_are_in_no_row():
    net, x = nn.ReLU(inplace=True), torch.tensor([-1.0, 2.0], device="cuda")
    frame, samples = pl.ModuleFunctionKernelProfiler().profile(net, [((x,), {})], warmup_iterations=0)
    assert len(frame) == 1
    assert samples["relu"][0][1][0][0].tolist() == [-1, 2]


@pytest.mark.gpu
def test_kernels_of_two_streams_have_their_own_modules():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(512, 512), nn.Linear(512, 512)
            self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def forward(self, x):
            results = []
            for stream, module in zip(self.streams, (self.left, self.right), strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results.append(module(x).relu())
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)
            return results[0] + results[1]

    x = torch.randn(512, 512, device="cuda")
    profiler = pl.ModuleFunctionKernelProfiler(function_names=set())
    found, _ = profiler.profile(Beside().cuda().eval(), [((x,), {})], warmup_iterations=3)
    assert profiler.coverage.attributed_share > 0.99
    linear = found[found["function_name"] == "linear"]
    assert set(linear["module_name"]) == {"left", "right"}
