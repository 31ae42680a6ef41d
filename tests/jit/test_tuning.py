"""Modules of a running program: found, recorded, tuned inside a call, served; and all that leaves them as they are."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder import jit
from perfladder.backend import Backend
from perfladder.errors import InputError
from perfladder.jit import jit_config
from perfladder.jit.finder import finder


class Broken(Backend):
    name = "jit_broken"
    is_isolated = False

    def compile(self, request):
        raise RuntimeError("it does not build")


class Zeros(toys.Faster):
    name = "jit_zeros"

    def result(self, right, x):
        return torch.zeros_like(right)


class BreaksGraph(toys.Faster):
    """Cannot compile a module with others in it as one graph, and tells so."""

    name = "jit_breaks"

    def compile(self, request):
        built = super().compile(request)
        return type(built)(built.call, {"num_graph_breaks": 2 if list(request.module.children()) else 0})


class OnlyLeaves(toys.Faster):
    """Builds modules that hold no others."""

    name = "jit_only_leaves"

    def compile(self, request):
        if list(request.module.children()):
            raise RuntimeError("it holds other modules")
        return super().compile(request)


class Outer(toys.Toy):
    """A toy with two toys in it, one of them in a container."""

    def __init__(self):
        super().__init__()
        self.first = toys.Toy()
        self.rest = nn.Sequential(toys.Toy())
        self.eval()

    def compute(self, x, scale=1.0):
        return self.rest(self.first(x)) * scale


def use(backend):
    jit_config.strategy = pl.OneBackendStrategy(backend).enable_performance_validation(False)


@pytest.fixture(autouse=True)
def _without_gradients():
    """What a module gets from one that ran eager would want gradients, as weights do."""
    with torch.no_grad():
        yield


@pytest.fixture
def x():
    return torch.arange(8.0).reshape(2, 4)


@pytest.mark.usefixtures("faster")
class TestServing:
    def test_the_first_call_is_eager_and_later_ones_are_served(self, x, states):
        toy = toys.Toy()
        right = toy(x)
        jit.enable()
        assert torch.equal(toy(x), right)
        assert states() == {"Toy": "tuned"}
        assert toys.calls["faster"] > 0, "it was tried"
        toys.calls.clear()
        assert torch.equal(toy(x), right)
        assert toys.calls["faster"] == 1

    def test_as_many_calls_are_recorded_as_asked_for(self, x, states):
        jit_config.min_samples = 3
        toy = toys.Toy()
        jit.enable()
        toy(x), toy(x)
        assert states() == {"Toy": "recording"}
        toy(x)
        assert states() == {"Toy": "tuned"}

    def test_a_required_axis_is_waited_for(self, x, states):
        jit_config.min_samples, jit_config.batch_axis_required = 2, True
        toy = toys.Toy()
        jit.enable()
        toy(x), toy(x), toy(x)
        assert states() == {"Toy": "recording"}
        toy(x[:1])
        assert states() == {"Toy": "tuned"}

    def test_each_form_of_call_is_tuned(self, x):
        toy = toys.Toy()
        jit.enable()
        for scale in (1.0, 2.0, 2.0):
            assert torch.equal(toy(x, scale=scale), x * toy.weight * scale)
        (report,) = finder.report().modules
        assert [graph.name for graph in report.graphs] == ["0", "1"]

    def test_forms_beyond_the_limit_run_eager(self, x):
        jit_config.max_num_graphs = 1
        toy = toys.Toy()
        jit.enable()
        toy(x)
        toys.calls.clear()
        for scale in (2.0, 3.0):
            assert torch.equal(toy(x, scale=scale), x * toy.weight * scale)
        assert not toys.calls

    def test_a_new_size_is_tuned_again_up_to_a_limit(self, x):
        toy = toys.Toy()
        jit.enable()
        for size in range(1, 9):
            inputs = torch.ones(size, 4)
            assert torch.equal(toy(inputs), inputs * toy.weight)
        (report,) = finder.report().modules
        assert [graph.name for graph in report.graphs] == ["0", "0#2", "0#3"]

    def test_four_threads_tune_once_and_are_all_right(self, x):
        toy = toys.Toy()
        right = toy(x)
        jit.enable()
        barrier, wrong = threading.Barrier(4), []

        def call():
            barrier.wait()
            for _ in range(50):
                if not torch.equal(toy(x), right):
                    wrong.append(threading.current_thread())

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert toys.builds == {"faster": 1}

    def test_other_threads_run_eager_while_one_tunes(self, x):
        toy, inside, go_on = toys.Toy(), threading.Event(), threading.Event()

        class Waiting(toys.Faster):
            name = "jit_waiting"

            def compile(self, request):
                inside.set()
                assert go_on.wait(20)
                return super().compile(request)

        use(Waiting())
        jit.enable()
        thread = threading.Thread(target=lambda: toy(x))
        thread.start()
        assert inside.wait(20)
        assert torch.equal(toy(x), x * toy.weight)
        go_on.set()
        thread.join()
        assert toys.builds == {"faster": 1}

    def test_hooks_of_the_program_fire_once_a_call(self, x):
        toy, seen = toys.Toy(), []
        toy.register_forward_hook(lambda module, args, output: seen.append(module))
        jit.enable()
        toy(x), toy(x)
        assert [one is toy for one in seen] == [True, True]

    def test_random_numbers_go_on_as_without_tuning(self, x):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        jit.enable()
        toys.Toy()(x)
        assert torch.equal(torch.rand(3), expected)

    def test_buffers_count_calls_of_the_program_alone(self, x):
        class Counting(toys.Toy):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.count += 1
                return x * self.weight

        toy = Counting()
        jit.enable()
        toy(x)
        assert toy.count == 1


@pytest.mark.usefixtures("faster")
class TestIdentity:
    def test_the_object_stays_and_looks_like_its_class(self, x):
        toy = toys.Toy()
        names = set(vars(toy))
        jit.enable()
        toy(x)
        assert isinstance(toy, toys.Toy)
        assert type(toy).__qualname__ == "Toy"
        assert set(vars(toy)) == names
        assert not hasattr(toy, "module"), "a program may ask so whether a module is a wrapper"

    def test_it_tells_that_it_is_managed(self, x):
        from perfladder.managed import managed_state

        toy = toys.Toy()
        jit.enable()
        toy(x)
        assert managed_state(toy) == ("jit", "Toy", "tuned", "toys.Toy")

    def test_copies_and_pickles_are_plain_modules(self, x):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        for other in (copy.copy(toy), copy.deepcopy(toy), pickle.loads(pickle.dumps(toy))):
            assert type(other) is toys.Toy
            assert torch.equal(other.weight, toy.weight)

    def test_disable_puts_all_back_and_enable_takes_it_up_again(self, x):
        plain_call, toy = nn.Module.__call__, toys.Toy()
        jit.enable()
        toy(x)
        jit.disable()
        assert type(toy) is toys.Toy
        assert nn.Module.__call__ is plain_call
        toys.calls.clear()
        toy(x)
        assert not toys.calls
        jit.enable()
        toy(x)
        assert toys.calls == {"faster": 1}

    def test_modules_that_are_no_more_are_let_go(self, x):
        import gc
        import weakref

        toy = toys.Toy()
        weight = weakref.ref(toy.weight)
        jit.enable()
        toy(x), toy(x)
        del toy
        gc.collect()
        assert weight() is None
        assert [module.state for module in finder.report().modules] == ["tuned"]

    def test_wrap_refuses_a_module_that_is_tuned_as_it_runs(self, x):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        with pytest.raises(InputError, match="wrapped already"):
            pl.Module(toy)


class TestHierarchy:
    @pytest.mark.usefixtures("faster")
    def test_modules_in_one_that_is_tuned_are_detached(self, x, states):
        outer = Outer()
        jit.enable()
        outer(x)
        assert states() == {"Outer": "tuned", "Outer.first": "detached", "Outer.rest.0": "detached"}

    def test_where_the_topmost_fails_those_in_it_are_tuned(self, x, states):
        use(OnlyLeaves())
        outer = Outer()
        right = outer(x)
        jit.enable()
        assert torch.equal(outer(x), right)
        assert states() == {"Outer": "eager"}
        assert torch.equal(outer(x), right)
        assert states() == {"Outer": "eager", "Outer.first": "tuned", "Outer.rest.0": "tuned"}
        toys.calls.clear()
        assert torch.equal(outer(x), right)
        assert toys.calls == {"faster": 2}
        assert type(outer) is Outer

    def test_levels_below_the_limit_are_left_alone(self, x, states):
        jit_config.max_depth_level = 0
        use(Broken())
        outer = Outer()
        jit.enable()
        outer(x), outer(x)
        assert states() == {"Outer": "eager", "Outer.first": "skipped", "Outer.rest.0": "skipped"}

    @pytest.mark.parametrize(("detects", "state"), [(True, "eager"), (False, "tuned")])
    def test_graph_breaks_count_where_they_are_asked_for(self, x, states, detects, state):
        jit_config.detect_graph_breaks = detects
        use(BreaksGraph())
        outer = Outer()
        jit.enable()
        outer(x), outer(x)
        assert states()["Outer"] == state
        assert states()["Outer.first"] == ("tuned" if detects else "detached")

    @pytest.mark.usefixtures("faster")
    def test_equal_classes_at_the_top_get_numbers(self, x, states):
        first, second = toys.Toy(), toys.Toy()
        jit.enable()
        first(x), second(x)
        assert states() == {"Toy": "tuned", "Toy#2": "tuned"}

    @pytest.mark.usefixtures("faster")
    def test_the_hierarchy_is_printed(self, x, capsys):
        jit.enable()
        Outer()(x)
        jit.print_hierarchy()
        printed = capsys.readouterr().out
        assert "  Outer.first" in printed
        assert "Faster()" in printed


class TestFailures:
    @pytest.mark.parametrize("backend", [Broken(), Zeros()])
    def test_a_module_that_cannot_be_tuned_stays_as_it_is(self, x, states, backend):
        use(backend)
        toy = toys.Toy()
        jit.enable()
        for _ in range(3):
            assert torch.equal(toy(x), x * toy.weight)
        assert states() == {"Toy": "eager"}
        assert type(toy) is toys.Toy

    def test_default_candidates_that_all_fail_are_a_failure(self, x, states):
        jit_config.strategy = pl.MaxThroughputStrategy([Broken(), pl.backend.TorchEagerBackend()])
        toy = toys.Toy()
        jit.enable()
        toy(x)
        assert states() == {"Toy": "eager"}

    def test_the_programs_own_errors_pass_through(self, states, faster):
        class Raising(toys.Toy):
            def forward(self, x):
                if x is None:
                    raise KeyError("no input")
                return x * self.weight

        toy = Raising()
        jit.enable()
        for _ in range(2):
            with pytest.raises(KeyError, match="no input"):
                toy(None)
        assert states() == {"Raising": "recording"}
        toy(torch.ones(1, 4))
        assert states() == {"Raising": "tuned"}
        with pytest.raises(KeyError, match="no input"):
            toy(None)

    def test_a_lazy_module_is_looked_at_once_it_has_weights(self, x, states, faster):
        module = nn.LazyLinear(4).eval()
        jit.enable()
        module(x)
        assert states() == {}
        module(x)
        assert states() == {"Linear": "eager"}, "a toy's backend knows no linear layers"

    def test_a_cache_folder_that_is_lost_leaves_the_module_as_it_is(self, x, states, faster, tmp_path):
        toy = toys.Toy()
        jit.enable()
        (tmp_path / "file").write_text("")
        jit_config.cache_dir = tmp_path / "file"
        assert torch.equal(toy(x), x * toy.weight)
        assert states() == {"Toy": "eager"}


@pytest.mark.usefixtures("faster")
class TestLeftAlone:
    def test_training_until_eval(self, x, states):
        toy = toys.Toy().train()
        jit.enable()
        toy(x)
        assert states() == {"Toy": "init"}
        toy.eval()
        toy(x)
        assert states() == {"Toy": "tuned"}
        toys.calls.clear()
        toy.train()
        toy(x)
        assert not toys.calls

    @torch.enable_grad()
    def test_inputs_that_want_gradients(self, x):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        toys.calls.clear()
        inputs = x.clone().requires_grad_()
        toy(inputs).sum().backward()
        assert torch.equal(inputs.grad, toy.weight.expand(2, 4))
        toy(x)
        assert toys.calls == {"faster": 1}

    @torch.enable_grad()
    def test_gradients_first_and_none_later(self, x):
        toy = toys.Toy()
        jit.enable()
        toy(x.clone().requires_grad_()).sum().backward()
        toy(x), toy(x)
        assert toys.builds == {"faster": 1}

    @pytest.mark.parametrize("skipped", [toys.Toy, "Toy", "toys.Toy", "Outer.first"])
    def test_classes_and_names_to_skip(self, x, states, skipped):
        jit_config.skip_modules = [Outer, skipped] if skipped != "Outer.first" else [skipped]
        use(OnlyLeaves())
        outer = Outer()
        jit.enable()
        outer(x), outer(x)
        assert not toys.builds if skipped != "Outer.first" else states()["Outer.first"] == "skipped"

    def test_python_modules_to_skip(self, x, states):
        jit_config.patch_exclude = ("toys",)
        jit.enable()
        toys.Toy()(x)
        assert states() == {"Toy": "skipped"}

    def test_few_parameters(self, x, states):
        jit_config.min_parameters = 5
        jit.enable()
        toys.Toy()(x), nn.ReLU().eval()(x)
        assert states() == {"Toy": "skipped", "ReLU": "skipped"}

    def test_another_device(self, x, states):
        jit_config.device = "cuda"
        jit.enable()
        toys.Toy()(x)
        assert states() == {"Toy": "eager"}

    def test_wrapped_and_scripted_modules(self, x, states):
        wrapped = pl.Module(toys.Toy())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is going away
            scripted = torch.jit.script(nn.Linear(4, 4).eval())
        jit.enable()
        wrapped(x), scripted(x)
        assert set(states().values()) == {"skipped"}

    def test_a_dry_run_builds_nothing(self, x, states):
        jit_config.dry_run = True
        toy = toys.Toy()
        jit.enable()
        toy(x), toy(x)
        assert not toys.builds
        assert states() == {"Toy": "recording"}
        assert finder.report().modules[0].choice == "dry run: would try Faster()"


class TestCompilers:
    def test_the_programs_own_compilation_sees_the_plain_module(self, x, faster):
        toy, graphs = toys.Toy(), []
        right = toy(x)
        jit.enable()
        toy(x)

        def backend(graph, inputs):
            graphs.append(graph)
            return graph

        torch.compiler.reset()
        compiled = torch.compile(lambda x: toy(x) + 1, backend=backend, fullgraph=True)
        toys.calls.clear()
        assert torch.equal(compiled(x), right + 1)
        assert len(graphs) == 1
        assert not toys.calls

    def test_tracing_sees_the_plain_module(self, x, faster):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        toys.calls.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that TorchScript is going away
            traced = torch.jit.trace(toy, x, check_trace=False)
        assert not toys.calls
        assert torch.equal(traced(x), x * toy.weight)


@pytest.mark.usefixtures("faster")
class TestReuse:
    def test_the_next_process_serves_its_first_call(self, x, next_process):
        toy = toys.Toy()
        jit.enable()
        right = toy(x)
        next_process()
        assert torch.equal(toy(x), right)
        (graph,) = finder.report().modules[0].graphs
        assert (graph.num_tried, graph.num_reused, graph.num_builds) == (0, 1, 1)
        assert toys.calls["faster"] == 2, "one check, and the call itself"

    def test_sizes_of_several_calls_are_known_at_the_first(self, x, next_process):
        jit_config.min_samples = 2
        toy = toys.Toy()
        jit.enable()
        toy(x), toy(x[:1])
        next_process()
        toy(x)
        toys.calls.clear()
        toy(x[:1])
        assert toys.calls == {"faster": 1}
        assert toys.builds == {"faster": 1}

    def test_other_weights_are_tuned_anew(self, x, next_process):
        toy = toys.Toy()
        jit.enable()
        toy(x)
        next_process()
        with torch.no_grad():
            toy.weight += 1
        toy(x)
        assert finder.report().modules[0].graphs[0].num_tried == 1
