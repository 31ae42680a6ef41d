"""ONNX Runtime: what is exported, which providers run it, and that calls and results keep their form."""

import dataclasses
import functools
import importlib.util
import logging
import warnings

import pytest
import torch
from flat_calls import CPU, Conv, Mlp, Nested, assert_right, call_of, make_request, nested_call
from torch import nn

import perfladder as pl
from perfladder.backend import ONNXRuntimeBackend
from perfladder.backend.exported import quiet
from perfladder.backend.ort_session import open_session
from perfladder.errors import InputError, TuningError
from perfladder.tuning.build_log import told_by
from perfladder.tuning.module import control_of

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def request_of(tmp_path):
    return functools.partial(make_request, tmp_path)


MLP_CALLS = [call_of(torch.randn(size, 8)) for size in (2, 5)]


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_a_batch_axis_takes_every_size_of_its_range(request_of, use_dynamo):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    request.graph.extend_max_batch_size(16)
    built = ONNXRuntimeBackend(use_dynamo=use_dynamo).build(request)
    assert_right(built, request)
    assert built.details["providers"] == ["CPUExecutionProvider"]
    assert list(built.details["dynamic_axes"].values()) == [[2, 16]]
    for size in (1, 3, 16):
        x = torch.randn(size, 8)
        torch.testing.assert_close(built.call(x), request.forward(x))


def test_the_exporters_report_is_kept(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    ONNXRuntimeBackend().build(request)
    assert "ONNX" in (request.folder / "build.log").read_text()
    assert {file.name for file in request.folder.iterdir()} == {"model.onnx", "build.log", "build.json"}


def test_what_the_exporter_tells_goes_into_the_log_of_the_build_and_nowhere_else(request_of, capfd):
    told = []
    with told_by(told.append), quiet():
        for _ in range(2):
            warnings.warn("of its own code", DeprecationWarning, stacklevel=1)
        logging.getLogger("torch.onnx.exporter").warning("skipping %s", "an operator")
        logging.getLogger("onnxscript.optimizer").warning("not folded")
    assert told[:2] == [
        "WARNING torch.onnx.exporter: skipping an operator",
        "WARNING onnxscript.optimizer: not folded",
    ]
    assert told[2].endswith("DeprecationWarning: of its own code (2 times)")
    assert len(told) == 3
    assert capfd.readouterr() == ("", "")


def test_results_of_known_sizes_are_written_into_memory_of_torch(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    run = ONNXRuntimeBackend().build(request).call._run
    assert [output.sizes for output in run._outputs] == [((0, 0), 4)]


def test_stated_ranges_are_those_of_the_model(request_of):
    height, width = pl.DynamicDim("height", 8, 64, 32), pl.DynamicDim("width", 16, 48)
    shapes = {"image": (1, 3, height, width)}
    request = request_of(Conv(), call_of(torch.randn(1, 3, 32, 32)), dynamic_shapes=shapes)
    built = ONNXRuntimeBackend().build(request)
    assert_right(built, request)
    assert built.details["dynamic_axes"] == {"height": [8, 64], "width": [16, 48]}
    (image,) = onnx.load(request.folder / "model.onnx").graph.input
    sizes = image.type.tensor_type.shape.dim
    assert [size.dim_value for size in sizes[:2]] == [1, 3]
    assert len({size.dim_param for size in sizes[2:]} - {""}) == 2
    odd = torch.randn(1, 3, 37, 41)
    torch.testing.assert_close(built.call(odd), request.forward(odd), rtol=1e-4, atol=1e-5)


def test_nested_arguments_and_results_keep_their_form(request_of):
    request = request_of(Nested(), nested_call(2), nested_call(4), batch_sizes=(2, 4))
    built = ONNXRuntimeBackend().build(request)
    assert_right(built, request)
    args, kwargs = nested_call(3)
    result, expected = built.call(*args, **kwargs), request.forward(*args, **kwargs)
    assert list(result) == list(expected)
    assert result["again"] is result["hidden"]
    assert result["parts"][1] is kwargs["options"]["mask"]
    assert result["scale"] == 2.0
    torch.testing.assert_close(result["parts"][0], expected["parts"][0])


def test_arguments_may_be_passed_by_position_or_name_in_any_order(request_of):
    request = request_of(Nested(), nested_call(2), nested_call(4), batch_sizes=(2, 4))
    call = ONNXRuntimeBackend().build(request).call
    (x,), kwargs = nested_call(3)
    options = kwargs["options"]
    turned = {"mask": options["mask"], "tokens": options["tokens"]}
    first = call(x, options, 2.0)["hidden"]
    assert torch.equal(call(scale=2.0, options=turned, x=x)["hidden"], first)


def test_another_value_of_a_built_in_argument_is_refused_without_strict_mode(request_of):
    request = request_of(Nested(), nested_call(2), nested_call(4), strict=False)
    call = ONNXRuntimeBackend().build(request).call
    args, kwargs = nested_call(2, scale=3.0)
    with pytest.raises(TuningError, match=r"`scale` is 3\.0 in this call, but what was built has 2\.0"):
        call(*args, **kwargs)


def test_arguments_that_changed_while_recording_are_not_applicable(request_of):
    request = request_of(Nested(), nested_call(2), nested_call(2, scale=3.0), strict=False)
    assert "`scale` is no tensor and changes between calls" in ONNXRuntimeBackend().why_not_for_graph(request.graph)
    with pytest.raises(TuningError, match="strict_mode"):
        ONNXRuntimeBackend().build(request)


class Switched(nn.Module):
    def forward(self, x, flags, count, unused):
        return torch.where(flags, x, -x) * count, flags & (x > 0), count + 1


def test_flags_and_whole_numbers_go_in_and_out(request_of):
    def call(batch):
        return call_of(torch.randn(batch, 4), torch.rand(batch, 4) > 0.5, torch.tensor(3), torch.ones(2))

    request = request_of(Switched(), call(2), call(3), batch_sizes=(2, 3))
    built = ONNXRuntimeBackend().build(request)
    assert_right(built, request)
    assert built.details["num_dropped_inputs"] in (0, 1)


def test_inputs_that_the_exporter_drops_are_not_bound(request_of):
    request = request_of(Switched(), call_of(torch.randn(2), torch.ones(2) > 0, torch.tensor(2), torch.ones(2)))
    built = ONNXRuntimeBackend(use_dynamo=False).build(request)
    assert_right(built, request)
    assert built.details["num_dropped_inputs"] == 1


class Passing(nn.Module):
    """Returns one of its inputs beside a result."""

    def forward(self, x, rest):
        return x * 2, rest


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_an_input_that_is_returned_is_that_very_tensor(request_of, use_dynamo):
    request = request_of(Passing(), call_of(torch.randn(2, 3), torch.randn(4)))
    call = ONNXRuntimeBackend(use_dynamo=use_dynamo).build(request).call
    x, rest = torch.randn(2, 3), torch.randn(4)
    doubled, passed = call(x, rest)
    assert torch.equal(doubled, x * 2)
    assert passed is rest


def test_tensors_of_any_layout_are_read_right(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    call = ONNXRuntimeBackend().build(request).call
    x = torch.randn(8, 3)
    torch.testing.assert_close(call(x.t()), request.forward(x.t()))
    unaligned = torch.randn(25)[1:].view(3, 8)
    torch.testing.assert_close(call(unaligned), request.forward(unaligned))


class Selecting(nn.Module):
    """The size of its result depends on values."""

    def forward(self, x):
        return x[x > 0]


def test_results_of_sizes_that_nobody_knows_are_allocated_by_the_session(request_of):
    request = request_of(Selecting(), call_of(torch.tensor([1.0, -1.0, 2.0])), call_of(torch.tensor([1.0, 1.0, -2.0])))
    call = ONNXRuntimeBackend().build(request).call
    assert call._run._outputs[0].sizes is None
    kept = call(torch.tensor([3.0, -1.0, -2.0]))
    call(torch.tensor([7.0, 8.0, 9.0]))
    assert kept.tolist() == [3.0]
    assert call(-torch.ones(3)).shape == (0,)


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    cache: list


class Answering(Mlp):
    def forward(self, x):
        logits = self.layers(x)
        return Answer(logits=logits, cache=[None, logits.argmax(-1)])


def test_results_of_users_classes_are_made_again(request_of):
    request = request_of(Answering(), *MLP_CALLS, batch_sizes=(2, 5))
    built = ONNXRuntimeBackend().build(request)
    assert_right(built, request)
    result = built.call(MLP_CALLS[0][0][0])
    assert type(result) is Answer
    assert result.cache[0] is None
    assert result.cache[1].dtype is torch.int64


def test_an_encoder_of_transformers(request_of):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    bert = transformers.BertModel(config)

    def call(batch, length):
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, length // 2 :] = 0
        return call_of(input_ids=torch.randint(0, 50, (batch, length)), attention_mask=mask)

    request = request_of(bert, call(2, 6), call(3, 9), batch_sizes=(2, 3))
    built = ONNXRuntimeBackend().build(request)
    assert_right(built, request)
    _, kwargs = call(3, 7)
    result = built.call(**kwargs)
    assert type(result) is type(request.forward(**kwargs))
    assert result[0] is result.last_hidden_state
    assert result.last_hidden_state.shape == (3, 7, 32)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_branch_on_values_fails_with_its_place(request_of):
    request = request_of(Branching(), call_of(torch.ones(3)))
    with pytest.raises(
        TuningError, match=r"data-dependent control flow.*x if x\.sum\(\) > 0 else -x.*test_onnxruntime"
    ):
        ONNXRuntimeBackend().build(request)


def test_a_size_that_the_code_fixes_fails_with_its_name(request_of):
    class Fixed(nn.Module):
        def forward(self, x):
            return x + torch.ones(4, 2)

    shapes = {"x": (pl.DynamicDim("rows", 2, 4), 2)}
    request = request_of(Fixed(), call_of(torch.randn(4, 2)), dynamic_shapes=shapes)
    with pytest.raises(TuningError, match="shape constraint: the code works with rows = 4 only"):
        ONNXRuntimeBackend().build(request)


def test_an_operator_that_onnx_has_not_is_named(request_of):
    class Eigen(nn.Module):
        def forward(self, x):
            return torch.linalg.eigh(x)[0]

    request = request_of(Eigen(), call_of(torch.eye(3)))
    with pytest.raises(TuningError, match=r"unsupported operator: aten\._linalg_eigh"):
        ONNXRuntimeBackend().build(request)
    assert "eigh" in (request.folder / "build.log").read_text()


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_a_change_of_an_argument_fails_with_its_name(request_of, use_dynamo):
    class Adding(nn.Module):
        def forward(self, x, total):
            total += x
            return total * 2

    request = request_of(Adding(), call_of(torch.ones(3), torch.ones(3)))
    with pytest.raises(TuningError, match="changes its argument `total` in place"):
        ONNXRuntimeBackend(use_dynamo=use_dynamo).build(request)


def test_unsupported_dtypes_are_not_applicable(request_of):
    assert "bfloat16" in ONNXRuntimeBackend().why_not_for(Mlp().bfloat16())
    request = request_of(Mlp().bfloat16(), call_of(torch.randn(2, 8, dtype=torch.bfloat16)))
    assert "calls have tensors of bfloat16" in ONNXRuntimeBackend().why_not_for_graph(request.graph)
    with pytest.raises(TuningError, match="bfloat16"):
        ONNXRuntimeBackend().build(request)
    assert ONNXRuntimeBackend().why_not_for(Mlp().half()) is None


def test_a_provider_that_this_build_lacks_is_not_applicable():
    assert "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    reason = ONNXRuntimeBackend().why_not(torch.device("cuda", 0))
    assert "no CUDAExecutionProvider; it has" in reason
    assert "CPUExecutionProvider" in reason
    assert "TensorrtExecutionProvider" in ONNXRuntimeBackend(execution_provider="tensorrt").why_not(
        torch.device("cuda")
    )
    assert ONNXRuntimeBackend().why_not(CPU) is None


def test_a_provider_of_another_device_is_not_applicable():
    assert "does not run on cpu" in ONNXRuntimeBackend(execution_provider="CUDAExecutionProvider").why_not(CPU)
    assert "does not run on cuda" in ONNXRuntimeBackend(execution_provider="cpu").why_not(torch.device("cuda"))


def test_a_session_never_falls_back_to_another_provider(request_of):
    request = request_of(Mlp(), *MLP_CALLS)
    ONNXRuntimeBackend().build(request)
    options = {"optimization": "enable_all", "num_threads": None, "provider_options": {}}
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(TuningError, match="instead of CUDA"):
        open_session(request.folder / "model.onnx", "cuda", CPU, **options)


def test_wrong_options_are_named():
    with pytest.raises(InputError, match="execution_provider: got 'gpu'; accepted: 'cpu', 'cuda' or 'tensorrt'"):
        ONNXRuntimeBackend(execution_provider="gpu")


def test_a_finished_build_in_the_folder_is_opened(request_of, monkeypatch):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    first = ONNXRuntimeBackend().build(request)
    written = (request.folder / "model.onnx").stat().st_mtime_ns
    again = ONNXRuntimeBackend().build(request)
    assert (request.folder / "model.onnx").stat().st_mtime_ns == written
    assert again.details == first.details
    assert_right(again, request)


def test_an_input_on_another_device_is_refused(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    call = ONNXRuntimeBackend().build(request).call
    with pytest.raises(InputError, match="`x` is on meta, but was on cpu"):
        call(torch.empty(2, 8, device="meta"))


def test_a_tuned_module_is_saved_and_loaded_with_the_runtime_alone(tmp_path, monkeypatch):
    def fresh():
        return Nested().eval()

    strategy = pl.OneBackendStrategy(ONNXRuntimeBackend()).enable_performance_validation(False)
    wrapper = pl.Module(fresh(), strategy=strategy)
    samples = [
        call_of(torch.randn(8), options={"tokens": {"ids": torch.tensor(n)}, "mask": torch.tensor(n > 1)}, scale=2.0)
        for n in range(3)
    ]
    report = pl.tune(wrapper, samples)
    assert report.modules[0].error is None, report.describe()
    pl.save(wrapper, tmp_path / "nested.ait")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in ("onnx", "onnxscript") else find(name, *rest)
    )
    assert "not installed: pip install onnx onnxscript" in ONNXRuntimeBackend().why_not(CPU)
    other = pl.load(fresh(), tmp_path / "nested.ait")
    args, kwargs = nested_call(2)
    expected, result = wrapper(*args, **kwargs), other(*args, **kwargs)
    assert torch.equal(result["hidden"], expected["hidden"])
    assert result["again"] is result["hidden"]
    assert control_of(other).chosen[0].backend.name == "onnxruntime"
    assert not other.num_unseen_calls
