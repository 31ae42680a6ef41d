"""Quantization by nvidia-modelopt, with the real library; left out where it is not installed. It asks for older
versions of onnx than others do, so it goes into an environment of its own: `pip install "nvidia-modelopt[onnx]"`, then
`pytest tests/backend/test_quantization.py`.
"""

import functools

import pytest
import torch
from flat_calls import Mlp, call_of, make_request
from torch import nn

from perfladder.backend import (
    ONNXAutoCastConfig,
    ONNXQuantizationConfig,
    TensorRTBackend,
    TorchQuantizationConfig,
    trt_library,
)
from perfladder.errors import NotPossibleHereError, TuningError

onnx = pytest.importorskip("onnx")
pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
try:
    trt_library.find_library("tensorrt_rtx")
except NotPossibleHereError as error:
    pytest.skip(f"{error} (extra tensorrt-rtx)", allow_module_level=True)

# Of the library's own imports and of how it exports.
pytestmark = pytest.mark.filterwarnings("ignore")


class Small(nn.Module):
    """A convolution and linear layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.inside, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, image, scale):
        pooled = torch.relu(self.enter(image)).mean((2, 3))
        return self.leave(torch.relu(self.inside(pooled))) * scale


class Wide(nn.Module):
    """Linear layers with as many inputs as a block of 4-bit weights has; convolutions are refused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))

    def forward(self, x):
        return self.layers(x)


WIDE_CALLS = [call_of(torch.randn(size, 4, 128)) for size in (2, 3)]


@pytest.fixture
def request_of(tmp_path):
    return functools.partial(make_request, tmp_path)


@pytest.fixture
def exported(monkeypatch):
    """The models that engines are built of, which builds do not leave behind."""
    from perfladder.backend import trt_build

    seen, build_plan = [], trt_build.build_plan

    def kept(library, model, *rest):
        seen.append(onnx.load(str(model)))
        return build_plan(library, model, *rest)

    monkeypatch.setattr(trt_build, "build_plan", kept)
    return seen


def calls(*scales):
    return [
        call_of(torch.randn(2 + number, 3, 16, 16) * scale, torch.tensor(2.0)) for number, scale in enumerate(scales)
    ]


def built(request, how, **options):
    backend = TensorRTBackend(library="tensorrt_rtx", quantization_config=how, **options)
    assert backend.is_lossy
    return backend.build_engine(request)


def kinds(model):
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize(
    ("precision", "number"), [("fp16", onnx.TensorProto.FLOAT16), ("bf16", onnx.TensorProto.BFLOAT16)]
)
def test_autocast_keeps_the_dtypes_of_arguments_and_results(request_of, exported, precision, number):
    request = request_of(Small(), *calls(1.0, 2.0), batch_sizes=(2, 3))
    build = built(request, ONNXAutoCastConfig(precision=precision))
    (model,) = exported
    assert {one.type.tensor_type.elem_type for one in (*model.graph.input, *model.graph.output)} == {
        onnx.TensorProto.FLOAT
    }
    assert number in {weight.data_type for weight in model.graph.initializer}
    assert build.details["engine_profiles"] == [
        {"input_0": [[2, 3, 16, 16], [3, 3, 16, 16], [3, 3, 16, 16]], "input_1": [[], [], []]}
    ]


@pytest.mark.parametrize(
    ("precision", "method"),
    [("int8", "max"), ("int8", "entropy"), ("fp8", "max"), ("int4", "rtn_dq"), ("int4", None), ("int4", "awq_lite")],
)
def test_the_onnx_model_is_quantized(request_of, exported, precision, method):
    module, made = (Wide(), WIDE_CALLS) if precision == "int4" else (Small(), calls(1.0, 2.0))
    request = request_of(module, *made, batch_sizes=(2, 3))
    built(request, ONNXQuantizationConfig(precision=precision, calibration_method=method))
    assert "DequantizeLinear" in kinds(exported[0])


def scale_of_input(model):
    """The scale of the quantizer that the image goes through."""
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in model.graph.initializer}
    weights |= {
        node.output[0]: onnx.numpy_helper.to_array(node.attribute[0].t)
        for node in model.graph.node
        if node.op_type == "Constant"
    }
    (node,) = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "input_0"]
    return float(weights[node.input[1]])


@pytest.mark.parametrize("how", [ONNXQuantizationConfig(), TorchQuantizationConfig()])
@pytest.mark.parametrize("scales", [(1.0, 50.0), (50.0, 1.0)])
def test_every_recorded_call_calibrates(request_of, exported, how, scales):
    samples = calls(*scales)
    largest = max(float(args[0].abs().max()) for args, _ in samples)
    request = request_of(Small(), *samples, batch_sizes=(2, 3))
    built(request, how)
    assert scale_of_input(exported[0]) == pytest.approx(largest / 127, rel=0.02)


@pytest.mark.parametrize("scheme", ["INT8_DEFAULT_CFG", "INT8_SMOOTHQUANT_CFG", "FP8_DEFAULT_CFG"])
def test_the_module_is_quantized_in_a_copy(request_of, exported, scheme):
    module = Small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    request = request_of(module, *calls(1.0, 2.0), batch_sizes=(2, 3))
    build = built(request, TorchQuantizationConfig(quantization_config=scheme))
    assert "DequantizeLinear" in kinds(exported[0])
    assert list(module.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert build.details["num_profiles"] == 1


def test_what_the_library_calibrates_and_cannot_export_fails_with_its_reason(request_of):
    request = request_of(Small(), *calls(1.0, 2.0), batch_sizes=(2, 3))
    with pytest.raises(TuningError, match=r"nvidia-modelopt: .*Expected MatMul or Gemm"):
        built(request, TorchQuantizationConfig(quantization_config="INT4_AWQ_CFG"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what needs a GPU")
def test_a_scheme_that_needs_a_gpu_is_not_applicable_without_one():
    how = TorchQuantizationConfig(quantization_config="NVFP4_DEFAULT_CFG")
    assert (
        "NVFP4_DEFAULT_CFG is calibrated on an NVIDIA GPU" in TensorRTBackend(quantization_config=how).why_not_build()
    )


def test_a_module_that_has_nothing_to_quantize_fails_with_the_scheme(request_of):
    request = request_of(nn.Softmax(-1), call_of(torch.randn(2, 8)))
    with pytest.raises(TuningError, match=r"nothing would be quantized|quantized nothing"):
        built(request, TorchQuantizationConfig())


def test_half_precision_of_what_stays_in_floating_point(request_of, exported):
    request = request_of(Mlp(), call_of(torch.randn(2, 8)), call_of(torch.randn(3, 8)), batch_sizes=(2, 3))
    built(request, ONNXQuantizationConfig(use_model_opt_post_processing=True))
    assert onnx.TensorProto.FLOAT16 in {weight.data_type for weight in exported[0].graph.initializer}
