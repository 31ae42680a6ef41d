"""What `ModuleFunctionKernelProfiler` says of a run, on a CPU."""

import math
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import perfladder as pl
from perfladder.errors import RungError
from perfladder.functional.frames import PROFILE_COLUMNS, SUMMARY_COLUMNS


@torch.library.custom_op("perfladder_tests::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    """Sleeps."""
    time.sleep(0.05)
    return x.clone()


class Planted(nn.Module):
    """Calls the slow operator."""

    def forward(self, x):
        return slow(x)


def inputs(*shape):
    return [((torch.randn(*shape),), {})]


def test_frames_have_the_documented_columns(block, profile):
    frame, samples, profiler = profile(block, inputs(1, 4, 8), names=None)
    assert tuple(frame.columns) == PROFILE_COLUMNS
    assert (frame["kernel_us"] >= 0).all()
    assert frame["module"][0] is block.norm
    summary = profiler.describe_results(frame, samples)
    assert tuple(summary.columns) == SUMMARY_COLUMNS
    assert str(frame)
    assert list(summary["time_spent_us"]) == sorted(summary["time_spent_us"], reverse=True)
    assert math.fsum(summary["time_spent_us"]) == pytest.approx(frame["kernel_us"].sum())
    assert math.fsum(summary["time_spent_pct"]) == pytest.approx(100)


def test_each_call_is_named_in_its_module(block, profile, calls_of):
    frame, _, profiler = profile(block, inputs(1, 4, 8))
    assert calls_of(frame) == {
        ("norm", "layer_norm"),
        ("attention", "Tensor.transpose"),
        ("attention", "Tensor.matmul"),
        ("attention", "Tensor.softmax"),
        ("attention", "torch.matmul"),
        ("attention", "Tensor.__getitem__"),
        ("", "gelu"),
    }
    assert set(frame.loc[frame["function_name"] == "gelu", "op"]) == {"aten::gelu"}
    assert profiler.coverage.is_host
    assert profiler.coverage.attributed_share == 1
    assert profiler.coverage.total_us == pytest.approx(frame["kernel_us"].sum())


def test_planted_slow_kernel_is_found_in_its_nested_module(profile):
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.ReLU(), Planted()))
    frame, samples, profiler = profile(net, inputs(2, 4))
    worst = frame.loc[frame["kernel_us"].idxmax()]
    assert (worst["module_name"], worst["module"]) == ("2.1", net[2][1])
    assert worst["op"] == "perfladder_tests::slow"
    assert "perfladder_tests" in worst["function_name"]
    assert profiler.describe_results(frame, samples, top_k=1)["function_name"][0] == worst["function_name"]


def test_nested_functions_have_their_own_time(profile):
    attention, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(3, 1, 8)
    frame, samples, profiler = profile(attention, [((x, x, x), {})], names=None)
    summary = profiler.describe_results(frame, samples).set_index("function_name")
    assert set(summary.index) == {"multi_head_attention_forward", "linear", "softmax"}
    assert summary.loc["linear", "calls"] == 2
    own = frame[frame["function_name"] == "multi_head_attention_forward"]
    assert "aten::bmm" in set(own["kernel"])
    assert not {"aten::linear", "aten::_softmax"} & set(own["kernel"])


def test_names_steer_samples_only(block, profile, calls_of):
    data = inputs(1, 4, 8)
    everything, all_samples, _ = profile(block, data, names=None)
    some, some_samples, profiler = profile(block, data, names={"gelu"})
    none, no_samples, _ = profile(block, data, names=set())
    assert calls_of(everything) == calls_of(some) == calls_of(none)
    assert (set(all_samples), set(some_samples), no_samples) == ({"layer_norm", "gelu"}, {"gelu"}, {})
    summary = profiler.describe_results(some, some_samples).set_index("function_name")
    assert summary.loc["gelu", ["calls", "num_distinct_samples"]].tolist() == [1, 1]
    assert summary.loc["layer_norm", ["calls", "num_distinct_samples", "tensor_size_MB"]].isna().all()


def test_summary_counts_calls_samples_modules_and_sizes(profile):
    net = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Flatten(0), nn.ReLU(), nn.Dropout())
    frame, samples, profiler = profile(net.eval(), inputs(512, 512), names={"relu"})
    [row] = profiler.describe_results(frame, samples, top_k=1).to_dict("records")
    assert (row["function_name"], row["calls"], row["num_distinct_samples"], row["num_modules"]) == ("relu", 3, 2, 3)
    assert row["tensor_size_MB"] == 2.0


def test_share_is_of_all_functions_also_beyond_top_k(block, profile):
    frame, samples, profiler = profile(block, inputs(1, 4, 8))
    first, whole = (profiler.describe_results(frame, samples, top_k=k) for k in (1, 100))
    assert len(first) == 1
    assert first["time_spent_pct"][0] == whole["time_spent_pct"][0] < 100


def test_data_run_whole_in_each_iteration(profile):
    seen = []

    class Net(nn.Module):
        def forward(self, x, *, scale=1):
            seen.append((x.item(), scale, torch.is_grad_enabled()))
            return x * scale

    data = [((torch.tensor(1.0),), {}), ((torch.tensor(2.0),), {"scale": 3})]
    frame, _, _ = profile(Net(), data, warmup_iterations=2)
    assert seen == [(1.0, 1, False), (2.0, 3, False)] * 3
    assert list(frame.loc[frame["function_name"] == "Tensor.mul", "module_name"].unique()) == [""]


def test_without_data_the_function_is_called_without_arguments(block, profile):
    calls = []
    x = torch.randn(1, 4, 8)

    def inference():
        calls.append(1)
        return torch.abs(block(x)).sum()

    frame, _, profiler = profile(inference, module=block, warmup_iterations=1)
    assert len(calls) == 2
    assert "torch.abs" not in set(frame["function_name"])
    assert profiler.coverage.outside_us > 0


def test_samples_go_back_into_a_profile(block, profile):
    class Gelu(nn.Module):
        def forward(self, *args, **kwargs):
            return F.gelu(*args, **kwargs)

    _, samples, profiler = profile(block, inputs(1, 4, 8), names={"gelu"})
    data = [sample for _, sample in samples["gelu"]]
    again, resampled = profiler.profile(Gelu(), data, warmup_iterations=0)
    assert set(again["function_name"]) == {"gelu"}
    assert [args[0].shape for _, (args, _) in resampled["gelu"]] == [args[0].shape for args, _ in data]


def test_samples_are_released_by_the_next_profile(block, profile):
    _, samples, profiler = profile(block, inputs(1, 4, 8), names={"gelu"})
    alive = weakref.ref(samples["gelu"][0][1][0][0])
    profiler.profile(block, inputs(1, 4, 8), warmup_iterations=0)
    assert samples == {}
    assert alive() is None


def test_inplace_functions_do_not_spoil_their_samples(profile):
    x = torch.tensor([-1.0, 2.0])
    _, samples, _ = profile(nn.ReLU(inplace=True), [((x,), {})], names=None)
    assert x.tolist() == [0, 2]
    assert samples["relu"][0][1][0][0].tolist() == [-1, 2]


def test_copying_of_samples_is_in_no_row(profile):
    net = nn.ReLU()
    with_samples, without = (profile(net, inputs(4), names=names)[0] for names in (None, set()))
    assert list(with_samples["kernel"]) == list(without["kernel"])


def test_budget_is_kept_and_said(block, profile):
    frame, samples, profiler = profile(block, inputs(1, 4, 8), names=None, sample_budget_bytes=0)
    assert samples == {"layer_norm": [], "gelu": []}
    assert [warning.code for warning in profiler.coverage.warnings] == ["SAMPLES_LEFT_OUT"] * 2
    assert not profiler.describe_results(frame, samples)["function_name"].empty


def test_inputs_that_cannot_be_copied_do_not_stop_the_run(profile):
    class Net(nn.Module):
        def forward(self, x):
            return torch.vmap(F.gelu)(x)

    frame, samples, profiler = profile(Net(), inputs(3, 4), names=None)
    assert "gelu" in set(frame["function_name"])
    assert samples["gelu"] == []
    assert [warning.code for warning in profiler.coverage.warnings] == ["SAMPLES_LEFT_OUT"]


@pytest.mark.parametrize("error", [RuntimeError("halfway"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_everything_is_restored_after_an_exception(block, error):
    def failing(x):
        block(x)
        block.norm.register_forward_hook(raise_it)
        block(x)

    def raise_it(*_):
        raise error

    functions = dict(vars(F))
    before = {id(module): sorted(vars(module)) for module in block.modules()}
    profiler = pl.ModuleFunctionKernelProfiler()
    with pytest.raises(type(error)):
        profiler.profile(failing, inputs(1, 4, 8), module=block, warmup_iterations=0)
    assert dict(vars(F)) == functions
    assert {id(module): sorted(vars(module)) for module in block.modules()} == before
    assert not any(module._forward_pre_hooks for module in block.modules())
    assert sum(len(module._forward_hooks) for module in block.modules()) == 1
    block.norm._forward_hooks.clear()
    profiler.profile(block, inputs(1, 4, 8), warmup_iterations=0)


def test_methods_count_for_their_module(profile, calls_of):
    class Codec(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.ReLU()

        def decode(self, x):
            return torch.neg(self.layer(x))

    codec = Codec()
    for function in (codec.decode, lambda x: codec.decode(x)):
        frame, _, _ = profile(function, inputs(4), module=codec)
        assert calls_of(frame) == {("layer", "relu"), ("", "torch.neg")}
    assert calls_of(profile(codec.layer.forward, inputs(4))[0]) == {("", "relu")}


def test_shared_module_has_its_first_name(profile):
    layer = nn.ReLU()
    net = nn.Sequential(layer, nn.Identity(), layer)
    frame, _, _ = profile(net, inputs(4))
    assert set(frame["module_name"]) == {"0"}
    assert (frame["kernel"] == "aten::relu").sum() == 2


def test_wrappers_are_no_part_of_names(profile, calls_of):
    net = nn.DataParallel(nn.Sequential(nn.ReLU(), nn.DataParallel(nn.Sequential(nn.GELU()))))
    frame, _, _ = profile(net, inputs(2, 4))
    assert calls_of(frame) == {("0", "relu"), ("1.0", "gelu")}
    assert set(frame["module"]) == {net.module[0], net.module[1].module[0]}


def test_modules_called_on_another_thread_are_covered(block, profile, calls_of):
    def on_a_thread(x):
        worker = threading.Thread(target=block, args=(x,))
        worker.start()
        worker.join()

    frame, _, _ = profile(on_a_thread, inputs(1, 4, 8), module=block)
    assert {("norm", "layer_norm"), ("", "gelu")} <= calls_of(frame)


def test_kernels_outside_any_call_are_named_so(profile):
    class Net(nn.Module):
        def forward(self, x):
            with torch._C.DisableTorchFunction():  # as code that calls into torch from C++ does
                return torch.neg(x)

    frame, _, profiler = profile(Net(), inputs(4))
    assert set(frame["function_name"]) == {"(none)"}
    assert profiler.coverage.attributed_share == 0


def test_streamed_output_is_consumed(profile):
    class Net(nn.Module):
        def forward(self, x):
            for _ in range(3):
                yield torch.neg(x)

    frame, _, _ = profile(Net(), inputs(4))
    assert list(frame["function_name"]) == ["torch.neg"] * 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda: None,), {}, "Cannot tell which module"),
        ((F.linear,), {}, "Cannot tell which module"),
        ((3,), {}, "cannot be called"),
        ((print,), {"module": "unet"}, "expected a torch.nn.Module"),
        ((nn.ReLU(), torch.ones(1)), {}, "not a Tensor"),
        ((nn.ReLU(), {"x": 1}), {}, "not a dict"),
        ((nn.ReLU(), []), {}, "data is empty"),
        ((nn.ReLU(), [torch.ones(1)]), {}, r"data\[0\]"),
        ((nn.ReLU(), [((torch.ones(1),), {}), (torch.ones(1), {})]), {}, r"data\[1\]"),
        ((nn.ReLU(), [((torch.ones(1),), {1: 2})]), {}, "names that are texts"),
        ((nn.ReLU(), [((torch.ones(1),), {})]), {"warmup_iterations": -1}, "warmup_iterations must be 0 or more"),
        ((nn.ReLU(), [((torch.ones(1),), {})]), {"warmup_iterations": 1.5}, "warmup_iterations must be 0 or more"),
    ],
)
def test_wrong_arguments_are_one_clear_error(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        pl.ModuleFunctionKernelProfiler().profile(*arguments, **options)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(("linear",), {}), ((None,), {"samples_on": "/no/such/folder"}), ((None,), {"sample_budget_bytes": -1})],
)
def test_wrong_settings_are_one_clear_error(arguments, options):
    with pytest.raises(ValueError, match=r"expected|must be"):
        pl.ModuleFunctionKernelProfiler(*arguments, **options)


def test_wrong_frames_are_one_clear_error(block, profile):
    frame, samples, profiler = profile(block, inputs(1, 4, 8))
    for top_k in (0, -1, True):
        with pytest.raises(ValueError, match="top_k"):
            profiler.describe_results(frame, samples, top_k=top_k)
    with pytest.raises(ValueError, match="no column op"):
        profiler.describe_results(frame.drop(columns="op"), samples)
    with pytest.raises(ValueError, match="not list"):
        profiler.describe_results(frame, [])


def test_no_kernel_is_an_error(block, profile):
    with pytest.raises(RungError, match="No operator ran inside the module"):
        profile(lambda: torch.ones(1) + 1, module=block)


def test_active_profiler_is_an_error(block):
    called = []
    profiler = pl.ModuleFunctionKernelProfiler()
    with torch.profiler.profile(), pytest.raises(RungError, match="another torch profiler"):
        profiler.profile(lambda: called.append(1), module=block)
    assert called == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_inside_is_one_region():
    model = nn.Sequential(torch.jit.trace(nn.Linear(8, 8), torch.ones(2, 8)), nn.ReLU())
    frame, _ = pl.ModuleFunctionKernelProfiler(function_names=set()).profile(model, [((torch.ones(2, 8),), {})])
    assert set(frame.module_name) == {"0", "1"}
    assert set(frame.function_name[frame.module_name == "1"]) == {"relu"}


def test_function_names_are_texts():
    with pytest.raises(ValueError, match="function_names: expected texts"):
        pl.ModuleFunctionKernelProfiler(function_names={torch.nn.functional.linear})


def test_function_whose_samples_were_all_left_out_has_no_count():
    profiler = pl.ModuleFunctionKernelProfiler(function_names={"linear"}, samples_on="cpu", sample_budget_bytes=0)
    frame, data = profiler.profile(nn.Linear(4, 4), [((torch.ones(2, 4),), {})])
    row = profiler.describe_results(frame, data).set_index("function_name").loc["linear"]
    assert row[["calls", "num_distinct_samples", "tensor_size_MB"]].isna().all()
    assert row["time_spent_us"] > 0
