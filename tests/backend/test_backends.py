"""Backends: their options, what they build, where they are not applicable, and how one's own is made known."""

import copy
import importlib
import sys
import textwrap

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.backend import (
    Backend,
    BackendConfig,
    BuildRequest,
    find_backend,
    inductor_jit,
    register_backend,
    registry,
)
from perfladder.errors import InputError, TuningError
from perfladder.tuning.graphs import GraphTable
from perfladder.tuning.samples import Sample

CPU = torch.device("cpu")


@pytest.fixture
def request_of(tmp_path):
    """What a backend is asked to build: a module, called with inputs of these shapes."""

    def make(module, *inputs):
        module.eval()
        table = GraphTable(("x",), strict=True, limit=8)
        for x in inputs:
            graph = table.observe((x,), {}, len(x))
            with torch.no_grad():
                table.observe_output(graph, module(x), len(x))
        samples = [Sample.of((x,), {}, len(x)) for x in inputs]
        return BuildRequest(module, module.forward, graph, samples, CPU, tmp_path)

    return make


class Encoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.second(torch.nn.functional.gelu(self.first(x))))


def images():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))


def mlp(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))


class TestEager:
    def test_without_options_it_is_the_module_itself(self, request_of):
        backend = pl.backend.TorchEagerBackend()
        request = request_of(mlp(), torch.ones(1, 64))
        assert backend.is_baseline
        assert not backend.is_lossy
        assert backend.build(request).call == request.forward

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", None])
    def test_autocast_gives_outputs_their_dtype_back(self, request_of, dtype):
        backend = pl.backend.TorchEagerBackend(autocast_enabled=True, autocast_dtype=dtype)
        module, x = mlp(), torch.randn(2, 64)
        built = backend.build(request_of(module, x))
        with torch.no_grad():
            found, right = built.call(x), module(x)
        assert found.dtype == torch.float32
        assert not torch.equal(found, right), "it ran in another dtype"
        torch.testing.assert_close(found, right, atol=0.05, rtol=0.05)
        assert backend.is_lossy
        assert not backend.is_baseline

    def test_channels_last_is_a_copy_with_outputs_as_before(self, request_of):
        module, x = images(), torch.randn(2, 3, 8, 8)
        built = pl.backend.TorchEagerBackend(memory_format="channels_last").build(request_of(module, x))
        with torch.no_grad():
            found, right = built.call(x), module(x)
        torch.testing.assert_close(found, right)
        assert found.is_contiguous()
        assert built.owns_weights
        assert module[0].weight.is_contiguous(), "the plain module is not changed"

    def test_it_is_tuned_under_a_gate(self, clock):
        strategy = pl.OneBackendStrategy(
            pl.backend.TorchEagerBackend(autocast_enabled=True)
        ).enable_performance_validation(False)
        wrapper = pl.Module(mlp().eval(), strategy=strategy)
        report = pl.tune(wrapper, list(torch.randn(4, 64)), clock=clock)
        record = report.modules[0].graphs[0].decision.candidates[0]
        assert record.correctness.gate == "cosine >= 0.99"
        assert report.modules[0].graphs[0].decision.selected == "TorchEagerBackend(autocast_enabled=True)"


class TestOptions:
    def test_a_config_or_options_by_name(self):
        config = pl.backend.TorchEagerBackendConfig(autocast_enabled=True)
        assert pl.backend.TorchEagerBackend(config).config == pl.backend.TorchEagerBackend(autocast_enabled=True).config
        assert repr(pl.backend.TorchEagerBackend(config)) == "TorchEagerBackend(autocast_enabled=True)"

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (
                lambda: pl.backend.TorchEagerBackend(BackendConfig(), autocast_enabled=True),
                "give a config or options by name, not both",
            ),
            (
                lambda: pl.backend.TorchEagerBackend(BackendConfig()),
                "config is a BackendConfig, not a TorchEagerBackendConfig",
            ),
            (lambda: pl.backend.TorchEagerBackend(autocast=True), "autocast"),
            (lambda: pl.backend.TorchEagerBackend(autocast_dtype="float16"), "autocast_enabled is not True"),
            (lambda: pl.backend.TorchEagerBackend(memory_format="nhwc"), "memory_format"),
            (lambda: pl.backend.TorchInductorJitBackend(mode="fastest"), "mode"),
            (
                lambda: pl.backend.TorchInductorJitBackend(mode="default", options={"max_autotune": True}),
                "mode excludes options",
            ),
            (
                lambda: pl.backend.TorchInductorJitBackend(mode="reduce-overhead", cuda_graphs=True),
                "Inductor makes CUDA graphs of its own",
            ),
            (lambda: pl.backend.TorchAOBackend(quantization="int3"), "quantization"),
            (lambda: pl.backend.TorchAOBackend(min_features=-1), "min_features"),
        ],
    )
    def test_wrong_ones_are_named(self, make, says):
        with pytest.raises(InputError, match=says):
            make()


class TestTorchAO:
    @pytest.fixture(autouse=True)
    def _with_torchao(self):
        pytest.importorskip("torchao")

    def test_layers_are_changed_in_a_copy_and_counted(self, request_of):
        module, x = mlp(), torch.randn(2, 64)
        built = pl.backend.TorchAOBackend(compile=False).build(request_of(module, x))
        assert dict(built.details) == {"num_changed_layers": 2, "num_linear_layers": 2}
        assert built.owns_weights
        with torch.no_grad():
            found, right = built.call(x), module(x)
        assert not torch.equal(found, right)
        torch.testing.assert_close(found, right, atol=0.02, rtol=0.05)
        assert type(module[0].weight) is nn.Parameter
        assert type(module[0].weight.data) is torch.Tensor

    def test_small_layers_can_be_left_alone(self, request_of):
        backend = pl.backend.TorchAOBackend(compile=False, min_features=32)
        assert backend.build(request_of(mlp(), torch.ones(1, 64))).details["num_changed_layers"] == 1

    def test_changing_nothing_is_a_failure(self, request_of):
        backend = pl.backend.TorchAOBackend(compile=False, min_features=1000)
        with pytest.raises(TuningError, match="int8wo changed none of 2 linear layers"):
            backend.build(request_of(mlp(), torch.ones(1, 64)))

    def test_a_module_without_linear_layers_is_not_applicable(self):
        backend = pl.backend.TorchAOBackend(compile=False)
        assert backend.why_not_for(images()) == "the module has no linear layer"
        assert backend.why_not_for(mlp()) is None
        assert "int8wo takes weights of float32 or" in backend.why_not_for(mlp().to(torch.float64))

    @pytest.mark.parametrize(
        ("quantization", "says"),
        [
            ("fp8dq", "fp8dq needs an NVIDIA GPU of compute capability 8.9"),
            ("mxfp8dq", "mxfp8dq needs an NVIDIA GPU of compute capability 10.0"),
            ("nvfp4dq", "nvfp4dq needs an NVIDIA GPU of compute capability 10.0"),
            ("int4wo", "int4wo needs an NVIDIA GPU of compute capability 8.0"),
        ],
    )
    def test_schemes_of_gpus_are_not_applicable_on_a_cpu(self, quantization, says):
        assert pl.backend.TorchAOBackend(quantization=quantization, compile=False).why_not(CPU) == says

    def test_the_outcome_names_why_it_is_not_applicable(self, clock):
        backends = [
            pl.backend.TorchAOBackend(quantization="nvfp4dq"),
            pl.backend.TorchAOBackend(compile=False),
            pl.backend.TorchEagerBackend(),
        ]
        wrapper = pl.Module(images().eval(), strategy=pl.FirstWinsStrategy(backends))
        report = pl.tune(wrapper, list(torch.randn(4, 3, 8, 8)), clock=clock)
        candidates = report.modules[0].graphs[0].decision.candidates
        assert [(c.status, c.reason) for c in candidates[:2]] == [
            ("not_applicable", "nvfp4dq needs an NVIDIA GPU of compute capability 10.0"),
            ("not_applicable", "the module has no linear layer"),
        ]

    def test_without_torchao_it_is_not_applicable(self, monkeypatch):
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
        assert pl.backend.TorchAOBackend().why_not(CPU) == "torchao is not installed: pip install torchao"

    @pytest.mark.parametrize(("minimum", "status"), [(0.9999999, "rejected"), (0.9, "kept")])
    def test_a_gate_decides_whether_its_loss_is_accepted(self, clock, minimum, status):
        pl.config.isolate_builds = False
        backends = [pl.backend.TorchAOBackend(compile=False), pl.backend.TorchEagerBackend()]
        strategy = pl.FirstWinsStrategy(backends).enable_performance_validation(False)
        wrapper = pl.Module(mlp().eval(), strategy=strategy)
        report = pl.tune(wrapper, list(torch.randn(4, 64)), clock=clock, quality_gate=pl.QualityGate("cosine", minimum))
        record = report.modules[0].graphs[0].decision.candidates[0]
        assert (record.status, record.details["num_changed_layers"]) == (status, 2)
        if status == "rejected":
            assert "cosine of the whole output is 0.9999" in record.reason
            assert "below 0.9999999" in record.reason
        assert record.correctness.gate == f"cosine >= {minimum} of the whole output"
        assert 0.999 < record.correctness.quality < 1


@pytest.fixture
def compiled_anew():
    """Nothing that was compiled before counts for the test, or after it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of Inductor itself, at its first use
@pytest.mark.usefixtures("compiled_anew")
class TestInductor:
    def test_without_a_compiler_it_is_not_applicable(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CXX", raising=False)
        reason = pl.backend.TorchInductorJitBackend().why_not(CPU)
        assert reason == "Inductor needs a C++ compiler: install g++, or set CXX"
        assert "needs a C++ compiler" in pl.backend.TorchAOBackend().why_not(CPU)

    def test_a_recompile_limit_that_is_hit_is_a_failure(self, request_of):
        class Many(nn.Module):
            """Each shape is another graph to the compiler."""

            def forward(self, x):
                return x * len(str(list(x.shape))) * sum(range(x.shape[0]))

        many = [torch.ones(1 + index, 3) for index in range(12)]
        compiled = inductor_jit.compile_call(Many().forward, dynamic=False, backend="eager")
        with pytest.raises(TuningError, match=r"it was recompiled up to torch's limit \(\d+ times\)"):
            inductor_jit.warmed_up(compiled, request_of(Many(), *many))

    def test_modules_of_one_class_do_not_use_up_one_anothers_limit(self, request_of):
        for width in range(1, 13):
            module = nn.Linear(width, 2)
            compiled = inductor_jit.compile_call(module.forward, backend="eager")
            built = inductor_jit.warmed_up(compiled, request_of(module, torch.ones(2, width)))
            assert (built.details["num_compiled_graphs"], built.details["num_recompiles"]) == (1, 0)

    def test_what_is_not_compiled_at_all_is_a_failure(self, request_of):
        class Excluded(nn.Module):
            @torch.compiler.disable
            def forward(self, x):
                return x + 1

        module = Excluded()
        compiled = inductor_jit.compile_call(module.forward, backend="eager")
        with pytest.raises(TuningError, match="nothing was compiled"):
            inductor_jit.warmed_up(compiled, request_of(module, torch.ones(2, 3)))

    def test_no_call_waits_for_a_compiler_whatever_its_mode(self, request_of):
        num_compiled = []

        def backend(graph, inputs):
            num_compiled.append(graph)
            return graph

        module = nn.Linear(4, 2)
        compiled = inductor_jit.compile_call(module.forward, backend=backend, dynamic=True)
        built = inductor_jit.warmed_up(compiled, request_of(module, torch.ones(2, 4), torch.ones(3, 4)))
        assert built.details["num_recompiles"] == 0
        before = len(num_compiled)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                built.call(torch.ones(3, 4))
        assert len(num_compiled) == before

    def test_graph_breaks_are_counted_and_can_be_refused(self, request_of):
        class Breaking(nn.Module):
            def forward(self, x):
                x = x + 1
                print("a call that no graph can hold")
                return x * 2

        module = Breaking()
        request = request_of(module, torch.ones(2, 3))
        built = inductor_jit.warmed_up(inductor_jit.compile_call(module.forward, backend="eager"), request)
        assert built.details["num_compiled_graphs"] == 2
        assert built.details["num_graph_breaks"] >= 1
        whole = inductor_jit.compile_call(module.forward, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            inductor_jit.warmed_up(whole, request)

    @pytest.mark.slow
    def test_an_encoder_is_tuned_and_right(self):
        encoder = Encoder().eval()
        strategy = pl.OneBackendStrategy(pl.backend.TorchInductorJitBackend()).enable_performance_validation(
            "diagnostic"
        )
        wrapper = pl.Module(encoder, strategy=strategy)
        report = pl.tune(wrapper, list(torch.randn(4, 7, 32)), batch_sizes=[1, 2, 4])
        assert report.modules[0].error is None, report.modules[0].error
        decision = report.modules[0].graphs[0].decision
        (record,) = decision.candidates
        assert decision.selected == "TorchInductorJitBackend()"
        assert record.trial_s > 0
        assert record.peak_host_rss_bytes > 100 << 20
        assert record.details["num_compiled_graphs"] >= 1
        assert record.details["num_graph_breaks"] == 0
        assert record.correctness.max_rel_error < 1e-4
        assert record.correctness.num_cases > 3
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        x = torch.randn(3, 7, 32)
        torch.testing.assert_close(wrapper(x), encoder(x).detach(), atol=1e-5, rtol=1e-4)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, "no call waits for a compiler"
        assert not wrapper.num_unseen_calls

    @pytest.mark.slow
    def test_convolutions_are_built_channels_last_and_right(self, request_of):
        module, inputs = images(), [torch.randn(1, 3, 16, 16), torch.randn(2, 3, 16, 16)]
        plain = copy.deepcopy(module)
        backend = pl.backend.TorchInductorJitBackend(memory_format="channels_last", fullgraph=True)
        built = backend.build(request_of(module, *inputs))
        assert built.details["num_compiled_graphs"] >= 1
        with torch.no_grad():
            for x in (*inputs, torch.randn(2, 3, 16, 16)):
                found = built.call(x)
                torch.testing.assert_close(found, plain(x), atol=1e-5, rtol=1e-4)
                assert found.is_contiguous()


class Mine(Backend):
    name = "mine"
    is_isolated = False

    def compile(self, request):
        return request.forward


class TestRegistry:
    @pytest.fixture(autouse=True)
    def _as_before(self, monkeypatch):
        monkeypatch.setattr(registry._backends, "_registered", dict(registry._backends._registered))

    def test_names_of_perfladders_own(self):
        assert find_backend("eager") is pl.backend.TorchEagerBackend
        assert find_backend("inductor_jit") is pl.backend.TorchInductorJitBackend
        assert find_backend("torchao") is pl.backend.TorchAOBackend

    def test_ones_own_is_found_by_name(self):
        assert register_backend(Mine) is Mine
        assert find_backend("mine") is Mine
        register_backend(Mine)

    def test_a_class_that_is_defined_again_takes_the_place_of_the_first(self):
        def define():
            @register_backend
            class Again(toys.Faster):
                name = "again"

            return Again

        first, second = define(), define()
        assert first is not second
        assert find_backend("again") is second

    @pytest.mark.parametrize(
        ("kind", "says"),
        [
            (toys.Toy, "expected a subclass of pl.backend.Backend"),
            (Mine(), "expected a subclass"),
            (type("Nameless", (Backend,), {}), "Nameless has no name; set the class attribute `name`"),
            (type("Taken", (Mine,), {"name": "eager"}), "the name 'eager' belongs to another backend"),
            (type("Taken", (Mine,), {"name": "known"}), "the name 'known' belongs to another backend"),
        ],
    )
    def test_what_cannot_be_registered_is_told(self, kind, says):
        register_backend(type("Known", (Mine,), {"name": "known"}))
        with pytest.raises(InputError, match=says):
            register_backend(kind)

    def test_an_unknown_name_suggests_near_ones(self):
        with pytest.raises(InputError, match=r"There is no backend 'inductor_jt'\. Did you mean 'inductor_jit'"):
            find_backend("inductor_jt")

    def test_one_of_a_users_file_is_tuned(self, clock, tmp_path, monkeypatch):
        (tmp_path / "my_backend.py").write_text(
            textwrap.dedent(
                """
                from perfladder.backend import Backend, Built, register_backend


                @register_backend
                class Doubling(Backend):
                    name = "doubling"

                    def compile(self, request):
                        module = request.module

                        def call(x):
                            module.clock.pass_ms(2)
                            return module.compute(x)

                        (request.folder / "built.txt").write_text("a file of the build")
                        return Built(call, {"is_mine": True})
                """
            )
        )
        monkeypatch.syspath_prepend(tmp_path)
        my_backend = importlib.import_module("my_backend")
        pl.config.isolate_builds = False
        wrapper = pl.Module(toys.Toy(clock), strategy=pl.OneBackendStrategy(my_backend.Doubling()))
        report = pl.tune(wrapper, toys.samples(), clock=clock)
        assert report.modules[0].error is None
        record = report.modules[0].graphs[0].decision.candidates[0]
        assert (record.backend, record.status, record.details) == ("doubling", "kept", {"is_mine": True})
        assert len(list(pl.config.cache_dir.rglob("built.txt"))) == 1
        assert find_backend("doubling") is my_backend.Doubling

    def test_one_of_an_installed_package_is_found(self, tmp_path, monkeypatch):
        (tmp_path / "fast_things.py").write_text(
            "from perfladder.backend import Backend\n\n\nclass Fast(Backend):\n    name = 'fast'\n\n"
            "    def compile(self, request):\n        return request.forward\n"
        )
        folder = tmp_path / "fast_things-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-things\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[perfladder.backends]\nfast = fast_things:Fast\n")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(InputError, match=r"'fst'.*Did you mean 'fast'"):
            find_backend("fst")
        assert "fast_things" not in sys.modules, "others are not imported to be named"
        kind = find_backend("fast")
        assert (kind.__module__, kind.name) == ("fast_things", "fast")
        assert find_backend("fast") is kind
