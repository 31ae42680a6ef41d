"""TensorRT: what is built, with which ranges, and what is said where it cannot be. Builds are real ones of
TensorRT-RTX, which needs no GPU to build; how engines run is in test_trt_runner.py.
"""

import dataclasses
import functools
import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from flat_calls import CPU, Conv, Mlp, Nested, call_of, make_request, nested_call
from torch import nn

import perfladder as pl
from perfladder.backend import (
    ONNXAutoCastConfig,
    ONNXQuantizationConfig,
    TensorRTBackend,
    TensorRTProfile,
    TorchQuantizationConfig,
    build_engine,
    find_backend,
    load_engine,
    trt_library,
)
from perfladder.backend.shared_file import SharedFile
from perfladder.backend.trt_build import EngineRecord
from perfladder.backend.trt_profiles import check_read_back
from perfladder.errors import InputError, NotPossibleHereError, TuningError

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
try:
    RTX = trt_library.find_library("tensorrt_rtx")
except NotPossibleHereError as error:
    pytest.skip(f"{error} (extra tensorrt-rtx)", allow_module_level=True)

CUDA = torch.device("cuda", 0)
MLP_CALLS = [call_of(torch.randn(size, 8)) for size in (2, 5)]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks what the runtime says without a GPU")


def rtx(*, use_dynamo=False, **options):
    """The backend with the exporter that takes a second less, where a test is not about the other one."""
    return TensorRTBackend(library="tensorrt_rtx", use_dynamo=use_dynamo, **options)


@pytest.fixture
def request_of(tmp_path):
    return functools.partial(make_request, tmp_path / "build")


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    (tmp_path / "build").mkdir()


def ranges_of(build):
    return build.details["engine_profiles"]


@pytest.mark.parametrize("use_dynamo", [True, False])
def test_the_engine_has_the_ranges_that_calls_had(request_of, use_dynamo):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    request.graph.extend_max_batch_size(16)
    build = rtx(use_dynamo=use_dynamo).build_engine(request)
    assert ranges_of(build) == [{"input_0": [[2, 8], [16, 8], [16, 8]]}]
    assert build.details["profiles_read_from"] in ("engine", "description")
    assert build.details["library"] == f"TensorRT-RTX {RTX.version}"


def test_what_a_build_leaves_in_its_folder(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    build = rtx().build_engine(request)
    folder = request.folder
    names = {"model.plan", "profiles.json", "layers.txt", "build.log", "build.json"}
    assert {file.name for file in folder.iterdir()} == names
    assert (folder / "model.plan").stat().st_size == build.details["engine_bytes"]
    log = (folder / "build.log").read_text()
    assert "[INFO] Engine generation completed" in log
    assert "[ERROR]" not in log
    assert "LayerType: " in (folder / "layers.txt").read_text()
    record = EngineRecord.read(folder)
    assert record.outputs
    assert [one.access_path for one in record.profiles[0].inputs] == ["x"]


def test_a_finished_build_in_the_folder_is_not_made_again(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    first = rtx().build_engine(request)
    written = (request.folder / "model.plan").stat().st_mtime_ns
    assert rtx().build_engine(request) == first
    assert (request.folder / "model.plan").stat().st_mtime_ns == written


class SmallUNet(nn.Module):
    """Down, up and a skip connection, at any size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.inside = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, image, strength):
        first = torch.nn.functional.silu(self.norm(self.enter(image)))
        low = torch.relu(self.inside(self.down(first))) * strength
        high = torch.nn.functional.interpolate(low, size=first.shape[2:])
        return self.leave(torch.cat([first, high], 1))


def test_stated_ranges_of_batch_and_image_are_those_of_the_engine(request_of):
    batch = pl.BatchDim("batch", 1, 8, 2)
    height, width = pl.DynamicDim("height", 16, 64, 32), pl.DynamicDim("width", 24, 96, 32)
    request = request_of(
        SmallUNet(),
        call_of(torch.randn(2, 3, 32, 32), torch.tensor(0.5)),
        dynamic_shapes={"image": (batch, 3, height, width)},
    )
    build = rtx(use_dynamo=True).build_engine(request)
    image = [[1, 3, 16, 24], [2, 3, 32, 32], [8, 3, 64, 96]]
    assert ranges_of(build) == [{"input_0": image, "input_1": [[], [], []]}]
    assert build.details["dynamic_axes"] == {"batch": [1, 8], "height": [16, 64], "width": [24, 96]}


class Block(nn.Module):
    """Attention with a mask, positions and a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.places, self.norm = nn.Embedding(64, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, options):
        hidden = self.norm(x + self.places(options["positions"]))
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mask = options["mask"][:, None, None, :]
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return {"hidden": x + self.out(mixed.transpose(1, 2).flatten(2)), "count": options["count"] + 1}


def test_a_transformer_block_of_several_inputs(request_of):
    def call(batch, length):
        positions = torch.arange(length).expand(batch, length)
        mask = torch.ones(batch, length, dtype=torch.bool)
        options = {"positions": positions, "mask": mask, "count": torch.tensor(3)}
        return call_of(torch.randn(batch, length, 16), options)

    request = request_of(Block(), call(2, 6), call(3, 9), batch_sizes=(2, 3))
    build = rtx(use_dynamo=True).build_engine(request)
    tokens = [[2, 6], [3, 9], [3, 9]]
    assert ranges_of(build) == [
        {"input_0": [[*sizes, 16] for sizes in tokens], "input_1": tokens, "input_2": tokens, "input_3": [[], [], []]}
    ]
    assert len(EngineRecord.read(request.folder).outputs) == 2


@pytest.mark.slow
def test_the_tiny_unet_with_ranges_of_batch_and_image(request_of, tmp_path):
    pytest.importorskip("diffusers")
    from perfladder.workloads import diffusion

    unet = diffusion.build(size="tiny").unet
    batch, height, width = pl.BatchDim("batch", 1, 4, 2), pl.DynamicDim("h", 8, 32, 16), pl.DynamicDim("w", 8, 32, 16)
    shapes = {"sample": (batch, 4, height, width), "encoder_hidden_states": (batch, 8, 32)}
    states = torch.randn(2, 8, 32)
    sample = ((torch.randn(2, 4, 16, 16), torch.tensor(5)), {"encoder_hidden_states": states, "return_dict": False})
    # By a trace: torch.export demands sizes in multiples of 4, which a range cannot state.
    build = build_engine(unet, [sample], tmp_path / "unet", dynamic_shapes=shapes, backend=rtx())
    assert ranges_of(build) == [
        {
            "input_0": [[1, 4, 8, 8], [2, 4, 16, 16], [4, 4, 32, 32]],
            "input_1": [[], [], []],
            "input_2": [[1, 8, 32], [2, 8, 32], [4, 8, 32]],
        }
    ]
    assert build.details["engine_bytes"] == build.plan.stat().st_size
    assert (
        "Attention" in (build.folder / "layers.txt").read_text()
        or "mid_block" in (build.folder / "layers.txt").read_text()
    )


def test_a_profile_for_each_set_of_shapes_that_samples_have(request_of):
    calls = [call_of(torch.randn(size, 8)) for size in (2, 5, 2, 3)]
    request = request_of(Mlp(), *calls, batch_sizes=(2, 5, 2, 3))
    build = rtx(profiles="samples_used").build_engine(request)
    assert ranges_of(build) == [{"input_0": [[size, 8]] * 3} for size in (2, 5, 3)]


def test_profiles_of_the_users_are_those_of_the_engine(request_of):
    def ids_and_mask(profile, least, best, most):
        profile.add_input_shape(("options", "tokens", "ids"), [least], [best], [most])
        return profile.add_input_shape(("options", "mask"), [least], [best], [most])

    profiles = [
        ids_and_mask(TensorRTProfile().add_input_shape("x", (1, 8), (1, 8), (2, 8)), 1, 1, 2),
        ids_and_mask(TensorRTProfile().add_input_shape("x", (2, 8), (4, 8), (6, 8)), 2, 4, 6),
    ]
    request = request_of(Nested(), nested_call(2), nested_call(4), batch_sizes=(2, 4))
    build = rtx(profiles=profiles).build_engine(request)
    assert [profile["input_0"] for profile in ranges_of(build)] == [[[1, 8], [1, 8], [2, 8]], [[2, 8], [4, 8], [6, 8]]]
    assert ranges_of(build)[1]["input_2"] == [[2], [4], [6]]


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (TensorRTProfile().add_input_shape("y", (1, 8), (2, 8), (5, 8)), "no call has a tensor at 'y'.*tensors: x"),
        (TensorRTProfile(), r"`x` is missing, whose axes \[0\] change"),
        (TensorRTProfile().add_input_shape("x", (1,), (2,), (5,)), "`x` has 1 sizes, but the tensor has 2"),
        (TensorRTProfile().add_input_shape("x", (1, 4), (2, 8), (5, 8)), r"axis 1 has 4\.\.8, but all calls had 8"),
    ],
)
def test_profiles_that_do_not_fit_the_calls_are_named(request_of, profile, message):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    with pytest.raises(InputError, match=message):
        rtx(profiles=[profile]).build_engine(request)


def test_profiles_and_dynamic_shapes_exclude_each_other(request_of):
    request = request_of(Mlp(), MLP_CALLS[0], dynamic_shapes={"x": (pl.BatchDim("batch", 1, 4), 8)})
    profile = TensorRTProfile().add_input_shape("x", (1, 8), (2, 8), (4, 8))
    with pytest.raises(InputError, match="profiles: the module has `dynamic_shapes` too"):
        rtx(profiles=[profile]).build_engine(request)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 2), (2, 2), (1, 2)), r"axis 0 has \[1, 2, 1\]; expected min <= opt <= max"),
        (((1, 2), (2,), (2, 2)), "give equal ranks"),
        (((1.5,), (2,), (3,)), "min: expected all sizes as whole numbers"),
        ((3, (2,), (3,)), "min: expected all sizes as whole numbers"),
    ],
)
def test_wrong_shapes_of_a_profile_are_named(shapes, message):
    with pytest.raises(InputError, match=message):
        TensorRTProfile().add_input_shape("x", *shapes)


def test_an_input_is_added_to_a_profile_once():
    profile = TensorRTProfile().add_input_shape("x", (1,), (2,), (3,))
    with pytest.raises(InputError, match="'x' was added before"):
        profile.add_input_shape("x", (1,), (2,), (3,))


def test_a_config_has_profiles_of_its_own():
    profile = TensorRTProfile().add_input_shape("x", (1,), (2,), (3,))
    backend = rtx(profiles=[profile])
    profile.add_input_shape("y", (1,), (2,), (3,))
    assert [one.path for one in backend.config.profiles[0].shapes] == ["x"]


def test_ranges_that_differ_from_what_was_asked_are_told(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    rtx().build_engine(request)
    asked = EngineRecord.read(request.folder).profiles
    same = [{"input_0": ((2, 8), (5, 8), (5, 8))}]
    assert check_read_back(asked, same) is None
    assert "profile 0 has [[1, 8], [5, 8], [5, 8]] for `x`, and [[2, 8]" in check_read_back(
        asked, [{"input_0": ((1, 8), (5, 8), (5, 8))}]
    )
    assert "it has 2 profiles, and 1 were asked for" in check_read_back(asked, same * 2)


class Unsupported(nn.Module):
    def forward(self, x):
        return torch.unique(x), torch.fft.rfft(x).abs()


def test_all_operators_that_the_parser_has_not_are_named(request_of):
    request = request_of(Unsupported(), call_of(torch.tensor([1.0, 2.0, 1.0])))
    with pytest.raises(TuningError, match=r"unsupported operator: Unique .*DFT .*Next: tune the modules around it"):
        rtx(use_dynamo=True).build_engine(request)
    assert not (request.folder / "build.json").exists()
    assert (request.folder / "build.log").exists()


def test_values_that_decide_sizes_are_refused_with_the_input(request_of):
    class Ranging(nn.Module):
        def forward(self, x, count):
            return x[: torch.arange(count).shape[0]] if not torch.jit.is_tracing() else x * torch.arange(count).sum()

    request = request_of(Ranging(), call_of(torch.randn(3), torch.tensor(3)))
    with pytest.raises(TuningError, match="the values of `count` decide sizes inside the module"):
        rtx(use_dynamo=False).build_engine(request)


def test_dtypes_that_the_library_has_not_are_not_applicable(request_of):
    assert "its weights are float64" in rtx().why_not_for(Mlp().double())
    request = request_of(Mlp().double(), call_of(torch.randn(2, 8, dtype=torch.float64)))
    with pytest.raises(TuningError, match="float64; TensorRT is given float32"):
        rtx().build_engine(request)
    assert rtx().why_not_for(Mlp().bfloat16()) is None


def test_half_precision_stays_half(request_of):
    request = request_of(Mlp().half(), call_of(torch.randn(2, 8).half()), call_of(torch.randn(3, 8).half()))
    rtx().build_engine(request)
    layers = (request.folder / "layers.txt").read_text()
    assert "Name: input_0, IOMode: Input, DataType: Half" in layers
    assert "Float" not in layers


def test_a_change_of_an_argument_fails_with_its_name(request_of):
    class Adding(nn.Module):
        def forward(self, x, total):
            total += x
            return total * 2

    request = request_of(Adding(), call_of(torch.ones(3), torch.ones(3)))
    with pytest.raises(TuningError, match="changes its argument `total` in place"):
        rtx().build_engine(request)


def test_engines_for_named_gpus(request_of):
    request = request_of(Conv(), call_of(torch.randn(1, 3, 8, 8)))
    how = {"optimization_level": 1, "enable_tf32": False, "workspace_size_bytes": 1 << 26}
    with pytest.raises(TuningError, match=r"does not build for compute capability 9\.0; it does for 7\.5, 8\.0"):
        rtx(compute_capabilities=("9.0",), **how).build_engine(request)
    build = rtx(compute_capabilities=("8.9", "12.0"), **how).build_engine(request)
    assert build.details["engine_bytes"] > 0


def test_on_a_cpu_only_building_is_offered():
    reason = rtx().why_not(CPU)
    assert "TensorRT runs on a CUDA device, not on cpu; build_engine builds for another machine" in reason
    assert rtx().why_not_build() is None


@no_gpu
def test_a_gpu_that_the_runtime_refuses_is_not_applicable_with_its_reason():
    assert f"TensorRT-RTX {RTX.version} refuses the GPU: Cuda Runtime (cudaError " in rtx().why_not(CUDA)


def test_another_device_than_the_option_names_is_not_applicable():
    assert "device='cuda:1' is not cuda:0" in rtx(device="cuda:1").why_not(CUDA)


def test_options_of_the_other_library_are_not_applicable():
    assert "compatibility_level is an option of TensorRT;" in rtx(compatibility_level="ampere_plus").why_not_build()
    assert "version_compatible is an option of TensorRT;" in rtx(version_compatible=True).why_not_build()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Write a package of TensorRT's name that is found before any other."""
    folder = tmp_path / "packages"
    monkeypatch.syspath_prepend(str(folder))
    trt_library._imported.cache_clear()

    def write(code):
        (folder / "tensorrt").mkdir(parents=True)
        (folder / "tensorrt" / "__init__.py").write_text(code)
        importlib.invalidate_caches()

    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    yield write
    sys.modules.pop("tensorrt", None)
    trt_library._imported.cache_clear()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("__version__ = '0'", "the package tensorrt that is installed only holds the name of TensorRT"),
        ("raise RuntimeError('get the real one')", r"TensorRT cannot be imported \(RuntimeError: get the real one\)"),
    ],
)
def test_a_package_that_only_has_the_name_is_not_taken_for_the_library(packages, code, reason):
    packages(code)
    with pytest.raises(NotPossibleHereError, match=f"{reason}.*Next: pip install tensorrt"):
        trt_library.find_library("tensorrt")
    assert trt_library.find_library(None).name == "tensorrt_rtx"
    assert "TensorRT" in TensorRTBackend(library="tensorrt").why_not(CUDA)


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is not None, reason="nvidia-modelopt is installed")
@pytest.mark.parametrize("how", [ONNXAutoCastConfig(), ONNXQuantizationConfig(), TorchQuantizationConfig()])
def test_quantization_without_its_library_is_not_applicable(request_of, how):
    backend = rtx(quantization_config=how)
    assert backend.is_lossy
    assert 'nvidia-modelopt is not installed: pip install "nvidia-modelopt[onnx]"' in backend.why_not(CUDA)
    with pytest.raises(NotPossibleHereError, match="cannot be built here: nvidia-modelopt is not installed"):
        backend.build_engine(request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rtx(cuda_graph_cache_policy="fifo"), "cuda_graph_cache_policy: got 'fifo'; accepted: 'lfu' or 'lru'"),
        (lambda: rtx(max_cuda_graphs=0), "max_cuda_graphs: "),
        (lambda: rtx(optimization_level=9), "optimization_level: "),
        (lambda: rtx(device="cpu"), "device: "),
        (lambda: rtx(profiles="all"), "profiles: "),
        (lambda: rtx(compute_capabilities=("89",)), "compute_capabilities"),
        (lambda: ONNXAutoCastConfig(precision="int8"), "precision: got 'int8'; accepted: 'fp16' or 'bf16'"),
        (lambda: ONNXAutoCastConfig(keep_io_types=False), "keep_io_types: callers pass and expect"),
        (
            lambda: ONNXQuantizationConfig(precision="int4", calibration_method="max"),
            "calibration_method: int4 has awq",
        ),
        (lambda: ONNXQuantizationConfig(method="max"), "method: unknown field"),
        (lambda: TorchQuantizationConfig(quantization_config="INT8"), "quantization_config: got 'INT8'"),
        (
            lambda: rtx(use_dynamo=True, quantization_config=TorchQuantizationConfig()),
            "TorchQuantizationConfig works with use_dynamo=False",
        ),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "backend",
    [
        rtx(profiles=[TensorRTProfile().add_input_shape(("options", "mask"), (1,), (2,), (3,))], timing_cache=False),
        rtx(quantization_config=TorchQuantizationConfig(quantization_config="FP8_DEFAULT_CFG")),
        rtx(quantization_config=ONNXQuantizationConfig(precision="int4", calibration_method="rtn_dq")),
        rtx(compute_capabilities=("8.9",), timing_cache=Path("/somewhere/timings")),
    ],
)
def test_options_are_the_same_after_they_were_in_a_file(backend):
    kind = find_backend("tensorrt")
    text = backend.config.model_dump_json()
    assert kind(kind.config_class.model_validate_json(text)).config == backend.config
    assert kind(**json.loads(text)).config == backend.config


def test_a_tuning_says_why_it_is_not_applicable():
    module = pl.Module(Mlp().eval(), strategy=pl.OneBackendStrategy(rtx()))
    report = pl.tune(module, [torch.randn(8), torch.randn(8)])
    (graph,) = report.modules[0].graphs
    assert [one.status for one in graph.candidates if one.backend == "tensorrt"] == ["not_applicable"]
    assert "TensorRT runs on a CUDA device" in graph.candidates[0].reason


def test_an_engine_that_was_built_by_itself(tmp_path):
    samples = [{"image": torch.randn(1, 3, 8, 8)}, {"image": torch.randn(1, 3, 24, 24)}]
    build = build_engine(Conv().eval(), samples, tmp_path / "conv", backend=rtx())
    assert ranges_of(build) == [{"input_0": [[1, 3, 8, 8], [1, 3, 24, 24], [1, 3, 24, 24]]}]
    with pytest.raises(InputError, match="is not empty"):
        build_engine(Conv().eval(), samples, tmp_path / "conv", backend=rtx())


def test_what_engines_cannot_be_made_of_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"folder: .*file cannot be made or read"):
        build_engine(Mlp().eval(), [torch.ones(2, 8)], tmp_path / "file", backend=rtx())
    with pytest.raises(InputError, match=r"module: expected a torch.nn.Module, not a function"):
        build_engine(lambda x: x, [torch.ones(2, 8)], tmp_path / "new", backend=rtx())
    with pytest.raises(InputError, match=r"module: expected a torch.nn.Module, not a NoneType"):
        load_engine(None, tmp_path)
    with pytest.raises(InputError, match="device: expected one such as 'cuda'"):
        load_engine(Mlp(), tmp_path, device="gpu")
    (tmp_path / "graph.json").write_text("{}")
    with pytest.raises(TuningError, match=r"graph.json is damaged. Build the engine again"):
        load_engine(Mlp(), tmp_path)
    assert not (tmp_path / "new").exists()


def test_engines_are_built_of_samples_of_one_form(tmp_path):
    with pytest.raises(InputError, match="expected a list of calls"):
        build_engine(Mlp().eval(), [], tmp_path / "none", backend=rtx())
    with pytest.raises(InputError, match="call eval"):
        build_engine(Mlp().train(), [torch.randn(2, 8)], tmp_path / "training", backend=rtx())
    shapes = {"y": (pl.BatchDim("batch", 1, 4), 8)}
    with pytest.raises(InputError, match="dynamic_shapes: no recorded call has a tensor at 'y'"):
        build_engine(Mlp().eval(), [torch.randn(2, 8)], tmp_path / "y", dynamic_shapes=shapes, backend=rtx())


@no_gpu
def test_an_engine_is_not_loaded_where_the_runtime_refuses_the_gpu(tmp_path):
    build_engine(Mlp().eval(), [torch.randn(2, 8)], tmp_path / "mlp", backend=rtx())
    with pytest.raises(NotPossibleHereError, match="refuses the GPU: Cuda Runtime"):
        load_engine(Mlp().eval(), tmp_path / "mlp", backend=rtx())
    with pytest.raises(TuningError, match="holds no build of build_engine"):
        load_engine(Mlp().eval(), tmp_path, backend=rtx())


def test_an_engine_of_another_version_is_refused(request_of):
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    rtx().build_engine(request)
    record = EngineRecord.read(request.folder)
    (request.folder / "profiles.json").write_text(record.model_copy(update={"version": "0.1"}).model_dump_json())
    with pytest.raises(TuningError, match=r"built by version 0\.1 of tensorrt_rtx"):
        rtx().load(request)
    (request.folder / "profiles.json").write_text("{")
    with pytest.raises(TuningError, match=r"profiles\.json of the build cannot be read"):
        rtx().load(request)


@pytest.mark.gpu
@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_an_engine_gives_what_the_module_gives(request_of, tmp_path, use_cuda_graphs):
    backend = rtx(use_dynamo=True, enable_tf32=False, use_cuda_graphs=use_cuda_graphs)
    if reason := backend.why_not(CUDA):
        pytest.skip(reason)

    def call(batch, height, width):
        return call_of(torch.randn(batch, 3, height, width, device=CUDA), torch.tensor(0.5, device=CUDA))

    calls = [call(2, 32, 32), call(3, 48, 40)]
    request = request_of(SmallUNet().to(CUDA), *calls, batch_sizes=(2, 3))
    request = dataclasses.replace(request, device=CUDA, shared_folder=tmp_path / "shared")
    built = backend.build(request)
    assert built.details["profiles_read_from"] == "engine"
    for batch, height, width in ((2, 32, 32), (2, 33, 40), (3, 48, 40), (2, 32, 32), (2, 32, 32)):
        args, _ = call(batch, height, width)
        with torch.no_grad():
            torch.testing.assert_close(built.call(*args), request.forward(*args), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX:DeprecationWarning")
def test_timings_are_left_to_later_builds(request_of, tmp_path, monkeypatch):
    # TensorRT-RTX has the interface of TensorRT for timings, and keeps none.
    library, timings = (
        dataclasses.replace(RTX, name="tensorrt"),
        tmp_path / "shared" / f"tensorrt-{RTX.version}-timings",
    )
    monkeypatch.setattr(TensorRTBackend, "_library", lambda self, name=None: library)
    request = request_of(Mlp(), *MLP_CALLS, batch_sizes=(2, 5))
    request = dataclasses.replace(request, shared_folder=tmp_path / "shared")
    TensorRTBackend(use_dynamo=False, timing_cache=False).build_engine(request)
    assert not timings.exists()
    for number in range(2):
        again = dataclasses.replace(request, folder=tmp_path / str(number))
        again.folder.mkdir()
        TensorRTBackend(use_dynamo=False).build_engine(again)
        assert timings.read_bytes()
    own = tmp_path / "own"
    again = dataclasses.replace(request, folder=tmp_path / "last")
    again.folder.mkdir()
    TensorRTBackend(use_dynamo=False, timing_cache=own).build_engine(again)
    assert own.read_bytes() == timings.read_bytes()


def test_many_builds_add_to_one_cache_file_at_once(tmp_path):
    shared = tmp_path / "cache" / "timings"

    def add(number):
        for turn in range(10):
            entry = f"{number}.{turn} ".encode()
            SharedFile(shared).update(lambda there, entry=entry: there + entry)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(SharedFile(shared).read().split()) == sorted(
        f"{number}.{turn}".encode() for number in range(6) for turn in range(10)
    )


def test_a_cache_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    SharedFile(tmp_path / "file" / "timings").update(lambda there: b"x")
    assert "cannot be written, and later builds take longer" in caplog.text
    assert SharedFile(tmp_path / "file" / "timings").read() == b""
