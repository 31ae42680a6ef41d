"""Tuning on a CUDA device."""

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.backend import TorchAOBackend, TorchEagerBackend, TorchInductorJitBackend
from perfladder.tuning.module import control_of

pytestmark = [
    pytest.mark.gpu,
    # What torch tells while it compiles and warms up.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


class Net(nn.Module):
    """Convolutions and linear layers, with a pointwise tail that a compiler fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.linear = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(x).mean((2, 3))
        return torch.tanh(torch.nn.functional.gelu(self.linear(hidden))) * 2 + 1


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(pl.config, "cache_dir", tmp_path / "cache")


def tuned(strategy: pl.TuneStrategy, dtype: torch.dtype = torch.float16):
    torch.manual_seed(0)
    wrapper = pl.Module(Net().to("cuda", dtype).eval(), strategy=strategy)
    samples = list(torch.randn(4, 3, 64, 64, device="cuda", dtype=dtype))
    report = pl.tune(wrapper, samples, [1, 4], device="cuda")
    assert report.modules[0].error is None, report.describe()
    return wrapper, torch.stack(samples), report


def right_only(backend):
    return pl.OneBackendStrategy(backend).enable_performance_validation("diagnostic")


def test_cuda_graphs_do_not_write_over_outputs_that_somebody_keeps():
    wrapper, batch, _ = tuned(right_only(TorchInductorJitBackend(mode="reduce-overhead")))
    with torch.no_grad():
        first = wrapper(batch)
        kept = first.clone()
        for factor in (0.5, -1.0, 3.0):
            wrapper(batch * factor)
        torch.cuda.synchronize()
    assert torch.equal(first, kept)
    assert not wrapper.num_unseen_calls


def test_a_candidate_is_tried_in_a_process_of_its_own_and_timed_by_events():
    _, _, report = tuned(pl.MaxThroughputStrategy([TorchInductorJitBackend(), TorchEagerBackend()]))
    decision = report.modules[0].graphs[0].decision
    inductor = decision.candidates[0]
    assert inductor.trial_s > 0
    assert inductor.correctness.max_rel_error <= inductor.correctness.tolerances["float16"]
    assert [measured.batch_size for measured in inductor.measurements] == [1, 4]
    assert all(ms > 0 for measured in inductor.measurements for ms in measured.candidate_ms)


def test_channels_last_keeps_the_layout_of_outputs():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 8, 3, padding=1))
    backend = TorchEagerBackend(memory_format="channels_last")
    wrapper = pl.Module(conv.to("cuda", torch.float16).eval(), strategy=right_only(backend))
    pl.tune(wrapper, list(torch.randn(2, 8, 32, 32, device="cuda", dtype=torch.float16)))
    assert wrapper.state == "tuned"
    with torch.no_grad():
        assert wrapper(torch.randn(2, 8, 32, 32, device="cuda", dtype=torch.float16)).is_contiguous()


def test_quantized_layers_are_counted():
    pytest.importorskip("torchao")
    wrapper, _, report = tuned(right_only(TorchAOBackend(quantization="int8wo", compile=False)), torch.bfloat16)
    record = report.modules[0].graphs[0].decision.candidates[0]
    assert record.details["num_changed_layers"] == 1
    assert record.correctness.quality is None or record.correctness.quality >= 0.99
    assert control_of(wrapper).chosen[0].backend.name == "torchao"


def test_a_scheme_that_the_device_cannot_do_is_not_applicable():
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this device can do all schemes")
    pytest.importorskip("torchao")
    strategy = pl.FirstWinsStrategy([TorchAOBackend(quantization="nvfp4dq"), TorchEagerBackend()])
    _, _, report = tuned(strategy)
    record = report.modules[0].graphs[0].decision.candidates[0]
    assert record.status == "not_applicable"
    assert "compute capability 10.0" in record.reason


def test_the_original_may_go_to_the_cpu_and_comes_back_for_other_calls(monkeypatch):
    monkeypatch.setattr(pl.config, "device_after_tuning", "cpu")
    wrapper, batch, _ = tuned(right_only(TorchEagerBackend(memory_format="channels_last")))
    assert wrapper.device.type == "cpu"
    with torch.no_grad():
        assert wrapper(batch).device.type == "cuda"
        with pytest.warns(Warning, match="runs eager"):
            other = wrapper(torch.randn(9, 3, 64, 64, device="cuda", dtype=torch.float16))
    assert other.device.type == "cuda"
    assert wrapper.device.type == "cuda"


def test_every_default_backend_is_decided_and_costs_only_itself():
    """Ahead of time torch 2.11 crashes where it loads what it compiled; that ends its own process alone."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).cuda().eval()
    report = pl.tune(pl.Module(layers, strategy=pl.MinLatencyStrategy()), list(torch.randn(4, 64, device="cuda")))
    decision = report.modules[0].graphs[0].decision
    statuses = {candidate.description: candidate.status for candidate in decision.candidates}
    assert set(statuses.values()) <= {"kept", "rejected", "not_applicable", "failed"}
    assert all(candidate.reason for candidate in decision.candidates if candidate.status != "kept")
    graphed = next(
        one for one in decision.candidates if "cuda_graphs" in one.description and "Inductor" in one.description
    )
    assert graphed.correctness is not None, graphed.reason
    assert decision.selected in statuses


class Hungry(nn.Module):
    """Takes 8 GiB for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.empty(len(x) << 33, dtype=torch.uint8, device=x.device)[: len(x), None]


class Greedy(pl.backend.Backend):
    """Wants more than there is, in the process that tunes."""

    name = "greedy"
    is_isolated = False

    def compile(self, request: pl.backend.BuildRequest):
        torch.empty(1 << 41, dtype=torch.uint8, device=request.device)
        return request.forward


def test_a_candidate_that_runs_out_of_memory_has_failed_and_gives_it_back():
    free = torch.cuda.mem_get_info()[0]
    strategy = pl.FirstWinsStrategy([Greedy(), TorchEagerBackend()])
    wrapper, batch, report = tuned(strategy)
    record = report.modules[0].graphs[0].decision.candidates[0]
    assert record.status == "failed"
    assert "out of memory" in record.reason
    with torch.no_grad():
        assert wrapper(batch).shape == (4, 128)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (1 << 30)


def test_the_largest_batch_is_found_before_memory_runs_out_and_it_is_free_again():
    wrapper = pl.Module(Hungry().cuda().eval(), strategy=right_only(TorchEagerBackend()).enable_find_max_batch_size())
    most = torch.cuda.get_device_properties(0).total_memory >> 33
    before = torch.cuda.memory_reserved()
    pl.tune(wrapper, list(torch.randn(4, 8, device="cuda")), [1, 2])
    assert wrapper.state == "tuned"
    (graph,) = control_of(wrapper).graphs
    assert 2 <= graph.get_max_batch_size() <= most
    assert torch.cuda.memory_reserved() <= before + (1 << 30)
