"""Torch-TensorRT: where it is not applicable, what it is asked for, and with a GPU what it builds.

Its compiler needs a GPU. Where there is none, a library with the same functions that compiles nothing stands in for it,
so that ranges, settings, the saved file and calls are those of a real build up to the engines.
"""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch
from flat_calls import CPU, Conv, Mlp, assert_right, call_of, make_request, nested_call
from flat_calls import Nested as NestedModule
from torch import nn

import perfladder as pl
from perfladder.backend import TorchTensorRTAotBackend, TorchTensorRTJitBackend, find_backend
from perfladder.backend import torch_tensorrt_library as library
from perfladder.backend.torch_tensorrt_aot import input_ranges
from perfladder.errors import InputError, TuningError
from perfladder.tuning.module import control_of

CUDA = torch.device("cuda", 0)
BOTH = pytest.mark.parametrize("kind", [TorchTensorRTAotBackend, TorchTensorRTJitBackend])


@pytest.fixture(autouse=True)
def _nothing_known():
    library._why_not_loaded.cache_clear()
    yield
    library._why_not_loaded.cache_clear()


@pytest.fixture
def request_of(tmp_path):
    return functools.partial(make_request, tmp_path)


class TestNotApplicable:
    @BOTH
    def test_on_a_cpu(self, kind):
        assert kind().why_not(CPU) == "it runs on cuda, not on cpu"
        assert find_backend(kind.name) is kind

    @BOTH
    @pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is not None, reason="it is installed")
    def test_without_the_package(self, kind):
        assert kind().why_not(CUDA) == "torch-tensorrt is not installed: pip install torch-tensorrt"

    @BOTH
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self, kind, stand_in):
        assert kind().why_not(CUDA) == "torch finds no NVIDIA GPU here"

    def test_a_library_that_does_not_load(self, tmp_path, monkeypatch):
        (tmp_path / "torch_tensorrt").mkdir()
        source = 'raise AssertionError("Torch not compiled with CUDA enabled")'
        (tmp_path / "torch_tensorrt" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torch_tensorrt", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        reason = TorchTensorRTJitBackend().why_not(CUDA)
        assert reason.startswith("torch_tensorrt is installed, but does not load (AssertionError: Torch not compiled")

    def test_it_is_tried_and_told_in_a_tuning(self, clock):
        strategy = pl.FirstWinsStrategy([TorchTensorRTAotBackend(), pl.backend.TorchEagerBackend()])
        report = pl.tune(pl.Module(Mlp().eval(), strategy=strategy), list(torch.randn(2, 8)), clock=clock)
        record = report.modules[0].graphs[0].decision.candidates[0]
        assert (record.status, record.reason) == ("not_applicable", "it runs on cuda, not on cpu")


class TestRanges:
    def test_stated_ranges_are_those_of_the_compiler(self, request_of):
        height, width = pl.DynamicDim("height", 8, 64, 32), pl.DynamicDim("width", 16, 48)
        shapes = {"image": (pl.BatchDim("batch", 1, 8, 4), 3, height, width)}
        request = request_of(Conv(), call_of(torch.randn(2, 3, 32, 32)), dynamic_shapes=shapes)
        assert input_ranges(request.graph, [torch.randn(2, 3, 32, 32)]) == [
            {
                "min_shape": (1, 3, 8, 16),
                "opt_shape": (4, 3, 32, 48),
                "max_shape": (8, 3, 64, 48),
                "dtype": torch.float32,
            }
        ]

    def test_inputs_doubled_for_guidance_have_doubled_ranges(self, request_of):
        class Guided(nn.Module):
            def forward(self, latents, prompt, scale):
                return latents.repeat(2, 1) * prompt * scale

        calls = [call_of(torch.randn(n, 4), torch.randn(2 * n, 4), torch.ones(1).half()) for n in (2, 3)]
        graph = request_of(Guided(), *calls, batch_sizes=(2, 3)).graph
        graph.extend_max_batch_size(8)
        latents, prompt, scale = input_ranges(graph, calls[0][0])
        assert (latents["min_shape"], latents["max_shape"]) == ((2, 4), (8, 4))
        assert (prompt["min_shape"], prompt["max_shape"]) == ((4, 4), (16, 4))
        assert scale == {"shape": (1,), "dtype": torch.float16}


class TestSettings:
    ACCEPTED = ("min_block_size", "optimization_level", "torch_executed_ops", "enabled_precisions")

    def settings(self, accepted=ACCEPTED, **compile_config):
        config = TorchTensorRTJitBackend(compile_config=compile_config).config
        return library.settings_for(config, CUDA, accepted)

    def test_without_a_word_an_engine_is_exact_and_never_replaced_by_torch(self):
        assert torch.get_float32_matmul_precision() == "highest"
        assert self.settings() == {"device": CUDA, "disable_tf32": True, "pass_through_build_failures": True}

    def test_tf32_is_taken_where_torch_has_it(self):
        torch.set_float32_matmul_precision("high")
        try:
            assert not self.settings()["disable_tf32"]
        finally:
            torch.set_float32_matmul_precision("highest")

    def test_values_of_files_become_those_of_the_library(self):
        found = self.settings(enabled_precisions=["float16", "torch.float32"], torch_executed_ops=["aten.add.Tensor"])
        assert found["enabled_precisions"] == {torch.float16, torch.float32}
        assert found["torch_executed_ops"] == {"aten.add.Tensor"}
        assert self.settings(optimization_level=5)["optimization_level"] == 5
        assert library.told_settings(found)["enabled_precisions"] == "torch.float16, torch.float32"

    @pytest.mark.parametrize(
        ("compile_config", "says"),
        [
            ({"min_block_sise": 1}, "no 'min_block_sise'. Did you mean 'min_block_size'"),
            ({"device": "cuda:1"}, "device is what the build gives itself"),
            ({"enabled_precisions": ["half"]}, "enabled_precisions has 'half'; expected a dtype such as float32"),
        ],
    )
    def test_a_wrong_setting_is_named(self, compile_config, says):
        with pytest.raises(InputError, match=says):
            self.settings(**compile_config)

    def test_a_version_without_precisions_tells_what_to_do(self):
        with pytest.raises(InputError, match="engines have the dtypes of the module"):
            self.settings(accepted=("min_block_size",), enabled_precisions=["float16"])

    @BOTH
    def test_lower_precision_needs_a_gate(self, kind):
        assert not kind().is_lossy
        assert not kind(compile_config={"enabled_precisions": ["float32"]}).is_lossy
        assert kind(compile_config={"enabled_precisions": ["float32", "float16"]}).is_lossy
        assert kind(compile_config={"enable_autocast": True}).is_lossy
        assert kind(autocast_enabled=True).is_lossy

    def test_files_need_trust_and_the_same_machine(self):
        assert TorchTensorRTAotBackend.writes_code
        assert not TorchTensorRTAotBackend().is_portable
        assert not TorchTensorRTJitBackend.writes_code
        assert TorchTensorRTJitBackend().is_portable
        with pytest.raises(InputError, match="pickle_protocol"):
            TorchTensorRTAotBackend(pickle_protocol=9)


@dataclasses.dataclass
class CompilationSettings:
    min_block_size: int = 5
    disable_tf32: bool = False
    pass_through_build_failures: bool = False
    device: object = None


class Compiled(nn.Module):
    """A program in parts, as the library returns it."""

    def __init__(self, program, engine="_run_on_acc_0"):
        super().__init__()
        self.add_module(engine, program.module())
        self.engine = engine

    def forward(self, *tensors):
        return getattr(self, self.engine)(*tensors)


@pytest.fixture
def stand_in(monkeypatch):
    """A library that makes no engines; it keeps what it is asked for."""
    asked = types.SimpleNamespace(inputs=None, settings=None, options=None, engine="_run_on_acc_0")

    def compile(exported_program, inputs=None, *, arg_inputs=None, min_block_size=5, **kwargs):
        asked.inputs, asked.settings = arg_inputs, {"min_block_size": min_block_size, **kwargs}
        return Compiled(exported_program, asked.engine)

    def save(module, file_path, *, output_format, arg_inputs, dynamic_shapes, pickle_protocol):
        shapes = None if dynamic_shapes is None else {"tensors": dynamic_shapes}
        program = torch.export.export(module, tuple(arg_inputs), dynamic_shapes=shapes, strict=False)
        torch.export.save(program, file_path, pickle_protocol=pickle_protocol)

    module, dynamo = types.ModuleType("torch_tensorrt"), types.ModuleType("torch_tensorrt.dynamo")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
    module.Input, module.save, module.dynamo = types.SimpleNamespace, save, dynamo
    dynamo.compile, dynamo.CompilationSettings = compile, CompilationSettings
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    monkeypatch.setitem(sys.modules, "torch_tensorrt.dynamo", dynamo)
    return asked


class TestAheadOfTime:
    def test_ranges_and_settings_reach_the_compiler_and_the_file_serves_calls(self, request_of, stand_in):
        shapes = {"x": (pl.BatchDim("batch", 1, 16, 4), 8)}
        request = request_of(Mlp(), call_of(torch.randn(2, 8)), dynamic_shapes=shapes)
        backend = TorchTensorRTAotBackend(compile_config={"min_block_size": 1})
        built = backend.build(request)
        assert_right(built, request)
        (asked,) = stand_in.inputs
        assert (asked.min_shape, asked.opt_shape, asked.max_shape) == ((1, 8), (4, 8), (16, 8))
        assert stand_in.settings["min_block_size"] == 1
        assert stand_in.settings["pass_through_build_failures"]
        assert (built.details["num_engines"], built.details["num_torch_parts"]) == (1, 0)
        assert built.details["file_bytes"] == (request.folder / "model.pt2").stat().st_size
        assert {file.name for file in request.folder.iterdir()} == {"model.pt2", "build.json"}
        x = torch.randn(16, 8)
        stand_in.inputs = None
        torch.testing.assert_close(backend.build(request).call(x), request.forward(x))
        torch.testing.assert_close(backend.build(request, is_saved=True).call(x), request.forward(x))
        assert stand_in.inputs is None, "the finished file was loaded"

    def test_nested_arguments_keep_their_form(self, request_of, stand_in):
        request = request_of(NestedModule(), nested_call(2), nested_call(4), batch_sizes=(2, 4))
        built = TorchTensorRTAotBackend().build(request)
        assert_right(built, request)
        args, kwargs = nested_call(3)
        assert built.call(*args, **kwargs)["parts"][1] is kwargs["options"]["mask"]

    def test_a_damaged_file_is_told(self, request_of, stand_in):
        request = request_of(Mlp(), call_of(torch.randn(2, 8)))
        TorchTensorRTAotBackend().build(request)
        (request.folder / "model.pt2").write_bytes(b"no program")
        with pytest.raises(TuningError, match=r"model\.pt2 cannot be loaded"):
            TorchTensorRTAotBackend().build(request)

    def test_without_an_engine_it_has_failed(self, request_of, stand_in):
        stand_in.engine = "_run_on_gpu_0"
        request = request_of(Mlp(), call_of(torch.randn(2, 8)))
        with pytest.raises(TuningError, match=r"no part of the module became an engine.*min_block_size"):
            TorchTensorRTAotBackend().build(request)
        assert not (request.folder / "model.pt2").exists()

    def test_a_change_of_an_argument_fails_with_its_name(self, request_of, stand_in):
        class Adding(nn.Module):
            def forward(self, x, total):
                total += x
                return total * 2

        request = request_of(Adding(), call_of(torch.ones(3), torch.ones(3)))
        with pytest.raises(TuningError, match="changes its argument `total` in place"):
            TorchTensorRTAotBackend().build(request)

    def test_a_setting_that_the_version_lacks_is_no_silent_default(self, request_of, stand_in):
        request = request_of(Mlp(), call_of(torch.randn(2, 8)))
        with pytest.raises(InputError, match="no 'sparse_weights'"):
            TorchTensorRTAotBackend(compile_config={"sparse_weights": True}).build(request)


class TestJustInTime:
    @pytest.fixture
    def compiler(self, stand_in):
        def compiler(graph, inputs, **kwargs):
            stand_in.options = kwargs["options"]
            return graph.forward

        registry = torch._dynamo.backends.registry
        torch._dynamo.register_backend(compiler, name="torch_tensorrt")
        yield stand_in
        for known in (registry._COMPILER_FNS, registry._BACKENDS):
            known.pop("torch_tensorrt", None)
        torch._dynamo.reset()

    def test_settings_reach_the_compiler(self, request_of, compiler):
        request = request_of(Mlp(), call_of(torch.randn(2, 8)), call_of(torch.randn(5, 8)), batch_sizes=(2, 5))
        built = TorchTensorRTJitBackend(fullgraph=True, compile_config={"min_block_size": 2}).build(request)
        assert_right(built, request)
        assert compiler.options["min_block_size"] == 2
        assert compiler.options["pass_through_build_failures"]
        assert compiler.options["device"] == CPU
        assert built.details["num_compiled_graphs"] >= 1
        assert built.details["settings"]["min_block_size"] == "2"

    def test_a_graph_break_fails_where_the_full_graph_is_asked(self, request_of, compiler):
        class Breaking(nn.Module):
            def forward(self, x):
                torch._dynamo.graph_break()
                return x * 2

        request = request_of(Breaking(), call_of(torch.ones(3)))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            TorchTensorRTJitBackend(fullgraph=True).build(request)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _usable(self):
        pytest.importorskip("torch_tensorrt")
        if (reason := library.why_not_here(CUDA)) is not None:
            pytest.skip(reason)

    @BOTH
    def test_it_serves_all_sizes_of_its_range(self, kind, tmp_path):
        strategy = pl.OneBackendStrategy(kind(compile_config={"min_block_size": 1}))
        strategy.enable_performance_validation(False)
        shapes = {"x": (pl.BatchDim("batch", 1, 16, 4), 8)}
        wrapper = pl.Module(Mlp().eval().cuda(), strategy=strategy, dynamic_shapes=shapes)
        report = pl.tune(wrapper, list(torch.randn(4, 8, device="cuda")))
        assert report.modules[0].error is None, report.describe()
        for size in (1, 7, 16):
            x = torch.randn(size, 8, device="cuda")
            torch.testing.assert_close(wrapper(x), control_of(wrapper).plain(x))
        assert not wrapper.num_unseen_calls

    def test_an_archive_serves_as_the_tuned_module_did(self, tmp_path):
        strategy = pl.OneBackendStrategy(TorchTensorRTAotBackend(compile_config={"min_block_size": 1}))
        wrapper = pl.Module(Mlp().eval().cuda(), strategy=strategy.enable_performance_validation(False))
        report = pl.tune(wrapper, list(torch.randn(4, 8, device="cuda")))
        assert report.modules[0].error is None, report.describe()
        pl.save(wrapper, tmp_path / "mlp.ait")
        other = pl.load(Mlp().cuda(), tmp_path / "mlp.ait", trust=True)
        x = torch.randn(2, 8, device="cuda")
        torch.testing.assert_close(other(x), wrapper(x))
