"""A wrapped module is the plain one to everybody, in every state, besides what serves its calls."""

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import types
import warnings
import weakref

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.backend import Built
from perfladder.errors import InputError, TuningError, UnseenGraphWarning
from perfladder.sites import stage_sites
from perfladder.tuning.module import control_of

STATES = ("init", "recording", "passthrough", "tuned")


class Block(nn.Module):
    def __init__(self, clock=None):
        super().__init__()
        self.clock = toys.NoClock()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(4))
        self.eval()

    def compute(self, x, scale=1.0):
        return self.second(self.first(x)) * scale + self.offset

    def forward(self, x, scale=1.0):
        """What the block does."""
        return self.compute(x, scale)


@pytest.fixture
def in_state(tuned_toy):
    """A wrapper of the module in that state."""

    def make(module, state):
        if state == "tuned":
            return tuned_toy(module)
        wrapper = pl.Module(module)
        if state != "init":
            control_of(wrapper).enable_recording()
        if state == "passthrough":
            control_of(wrapper).enable_passthrough()
        assert control_of(wrapper).state == state
        return wrapper

    return make


def with_hooks(module, seen):
    """Hooks of each kind on the module and on a child."""

    def note(name):
        return lambda *_args: seen.append(name)

    module.register_forward_pre_hook(note("before"))
    module.register_forward_hook(note("after"))
    module.register_forward_hook(lambda _m, _a, kwargs, _o: seen.append(sorted(kwargs)), with_kwargs=True)
    module.first.register_forward_pre_hook(note("before first"))
    module.first.register_forward_hook(note("after first"))


@pytest.mark.parametrize("state", STATES)
def test_a_tuned_one_is_timed_as_one_stage(in_state, state):
    paths = [site.path for site in stage_sites(in_state(Block(), state))]
    assert paths == ([""] if state == "tuned" else ["first", "second"])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
def test_hooks_fire_as_on_the_plain_module(in_state, state, when):
    expected, seen, x = [], [], torch.ones(2, 4)
    plain = Block()
    with_hooks(plain, expected)
    module = Block()
    if when == "before wrapping":
        with_hooks(module, seen)
    wrapper = in_state(module, state)
    if when == "after wrapping":
        with_hooks(wrapper, seen)
    seen.clear()
    for _ in range(3):
        plain(x, scale=1.0)
        wrapper(x) if state == "tuned" else wrapper(x, scale=1.0)
    if state == "tuned":
        expected = [[] if entry == ["scale"] else entry for entry in expected]
    assert seen == expected
    assert len(seen) == 15


@pytest.mark.parametrize("state", STATES)
def test_hooks_may_change_arguments_and_results_and_be_removed(in_state, state):
    wrapper = in_state(Block(), state)
    plain = wrapper.module
    x = torch.ones(2, 4)
    right = plain(x)
    handles = [
        wrapper.register_forward_pre_hook(lambda _m, args: (args[0] * 0,)),
        wrapper.register_forward_hook(lambda _m, _a, output: output + 1),
    ]
    assert torch.equal(wrapper(x), plain.compute(x * 0) + 1)
    for handle in handles:
        handle.remove()
    assert torch.equal(wrapper(x), right)


@pytest.mark.parametrize("state", STATES)
def test_it_is_the_plain_module_to_others(in_state, state):
    plain = Block()
    wrapper = in_state(plain, state)
    assert isinstance(wrapper, Block)
    assert isinstance(wrapper, pl.Module)
    assert not isinstance(plain, pl.Module)
    assert (type(wrapper).__name__, type(wrapper).__module__) == ("Block", __name__)
    assert [id(p) for p in wrapper.parameters()] == [id(p) for p in plain.parameters()]
    assert list(wrapper.state_dict()) == ["offset", "first.weight", "first.bias", "second.weight", "second.bias"]
    assert dict(wrapper.named_modules()).keys() == dict(plain.named_modules()).keys()
    assert repr(wrapper) == repr(plain)
    assert inspect.signature(wrapper.forward) == inspect.signature(plain.forward)
    assert wrapper.forward.__doc__ == "What the block does."
    wrapper.note = 3
    assert plain.note == 3
    del wrapper.note
    assert not hasattr(plain, "note")
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = wrapper.nothing_such


@pytest.mark.parametrize("state", STATES)
def test_weights_are_shared_both_ways(in_state, state):
    plain = Block()
    wrapper = in_state(plain, state)
    x = torch.ones(2, 4)
    changed = {name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()}
    assert wrapper.load_state_dict(changed).missing_keys == []
    assert torch.equal(plain.first.weight, torch.full((4, 4), 0.5))
    assert torch.equal(wrapper(x), plain(x))
    wrapper.train()
    assert plain.training
    assert plain.first.training
    wrapper.eval()
    assert not plain.training
    assert wrapper.to("cpu", torch.float32) is wrapper
    assert control_of(wrapper).state == ("recording" if state == "init" else state), "nothing was moved"
    control_of(wrapper).enable_passthrough(force=True)
    assert wrapper.half() is wrapper
    assert plain.first.weight.dtype == wrapper.offset.dtype == torch.float16
    assert wrapper.to(torch.float64) is wrapper
    assert plain.first.weight.dtype == torch.float64
    plain.first.weight.data.zero_()
    assert not wrapper.first.weight.any()
    wrapper.requires_grad_(False)
    assert not plain.first.weight.requires_grad


@pytest.mark.parametrize("state", STATES)
def test_copies_are_plain_modules_of_their_own(in_state, state):
    wrapper = in_state(Block(), state)
    copied = copy.deepcopy(wrapper)
    assert type(copied) is Block
    assert copied.first.weight is not wrapper.first.weight
    assert torch.equal(copied(torch.ones(1, 4)), wrapper(torch.ones(1, 4)))
    parent = nn.Sequential(wrapper, wrapper)
    twice = copy.deepcopy(parent)
    assert type(twice[0]) is Block
    assert twice[0] is twice[1]
    assert type(copy.copy(wrapper)) is Block


def test_pickling_says_what_to_do():
    wrapper = pl.Module(Block(), name="unet")
    for dump in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match=r"unet is wrapped for tuning and cannot be pickled; use pl\.save"):
            dump(nn.Sequential(wrapper))
    buffer = io.BytesIO()
    torch.save(wrapper.state_dict(), buffer)
    buffer.seek(0)
    assert list(torch.load(buffer)) == list(Block().state_dict())


class Named(nn.Module):
    """Has attributes of all kinds by the names that a wrapper adds."""

    state = "a class attribute"

    def __init__(self):
        super().__init__()
        self.name = "an instance attribute"
        self.module = nn.Linear(4, 4)
        self.graph_specs = nn.Parameter(torch.ones(1))
        self.register_buffer("activate", torch.zeros(2))

    @property
    def device(self):
        return "a property"

    def forward(self, x):
        return self.module(x)


def test_the_modules_own_attributes_go_first():
    plain = Named().eval()
    inner, weight, buffer = plain.module, plain.graph_specs, plain.activate
    wrapper = pl.Module(plain, name="mine")
    assert wrapper.name == "an instance attribute"
    assert wrapper.state == "a class attribute"
    assert wrapper.device == "a property"
    assert wrapper.module is inner
    assert wrapper.graph_specs is weight
    assert wrapper.activate is buffer
    wrapper.name = "changed"
    assert plain.name == "changed"
    control = control_of(wrapper)
    assert (control.name, control.state, str(control.device), control.inner) == ("mine", "init", "cpu", plain)
    assert (wrapper.perfladder_name, wrapper.perfladder_state, wrapper.perfladder_managed) == ("mine", "init", "aot")


def test_submodules_that_come_later_go_first_too():
    wrapper = pl.Module(Block())
    assert wrapper.state == "init"
    wrapper.state = nn.Linear(2, 2)
    assert isinstance(wrapper.state, nn.Linear)
    assert control_of(wrapper).state == "init"


def test_what_a_wrapper_adds():
    wrapper = pl.Module(Block())
    assert (wrapper.name, wrapper.state, wrapper.device.type) == ("Block", "init", "cpu")
    with pytest.raises(InputError, match="Block: nothing was recorded yet; call the module"):
        _ = wrapper.graph_specs
    wrapper(torch.ones(2, 4))
    assert [list(graph.inputs[0].shape) for graph in wrapper.graph_specs] == [[2, 4]]
    assert wrapper.num_unseen_calls == {}


def hooked(module):
    """Put a function over `module.forward` in the module's attributes, as libraries that move weights do."""
    old = module.forward

    def hooked_forward(module, *args, **kwargs):
        module.num_hooked = getattr(module, "num_hooked", 0) + 1
        return module._old_forward(*args, **kwargs)

    module._old_forward = old
    module.forward = functools.update_wrapper(functools.partial(hooked_forward, module), old)


def unhooked(module):
    module.forward = module._old_forward
    del module._old_forward


@pytest.mark.parametrize("state", STATES)
def test_a_forward_in_the_attributes_from_before(in_state, state):
    plain = Block()
    hooked(plain)
    wrapper = in_state(plain, state)
    x = torch.ones(2, 4)
    plain.num_hooked = 0
    assert torch.equal(wrapper(x), plain.compute(x))
    assert plain.num_hooked == (state != "tuned"), "the forward is the module's own, which a backend replaces"
    assert inspect.signature(wrapper.forward) == inspect.signature(Block().forward)
    unhooked(wrapper)
    plain.num_hooked = 0
    toys.calls.clear()
    assert torch.equal(wrapper(x), plain.compute(x))
    assert plain.num_hooked == 0
    assert toys.calls["faster"] == (state == "tuned"), "the wrapper still serves"
    assert plain.forward.__func__ is Block.forward
    assert pl.unwrap(wrapper) is plain
    assert torch.equal(plain(x), plain.compute(x))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_forward_in_the_attributes_from_after(in_state, state, is_replaced):
    plain = Block()
    if is_replaced:
        plain.forward = plain.forward
    wrapper = in_state(plain, state)
    x = torch.ones(2, 4)
    hooked(wrapper)
    wrapper(x)
    assert plain.num_hooked == 1
    unhooked(wrapper)
    toys.calls.clear()
    wrapper(x)
    assert plain.num_hooked == 1
    assert toys.calls["faster"] == (state == "tuned")
    copied = copy.deepcopy(wrapper)
    copied.first.weight.data.zero_()
    assert torch.equal(copied(x), copied.compute(x)), "a copy does not go back to the wrapper"
    assert pl.unwrap(wrapper) is plain
    toys.calls.clear()
    plain(x)
    assert not toys.calls, "the plain module is the plain one again"


def test_a_forward_may_be_deleted_again():
    plain = Block()
    plain.forward = lambda x, scale=1.0: x
    wrapper = pl.Module(plain)
    x = torch.ones(1, 4)
    assert wrapper(x) is x
    del wrapper.forward
    assert torch.equal(wrapper(x), plain.compute(x))
    assert "forward" not in vars(plain)


def test_a_bare_module_with_a_forward_of_its_own():
    plain = nn.Module().eval()
    plain.forward = lambda x, *, shift: x + shift
    wrapper = pl.Module(plain)
    assert list(inspect.signature(wrapper.forward).parameters) == ["x", "shift"]
    assert wrapper(torch.ones(1), shift=2).item() == 3
    assert wrapper.graph_specs[0].inputs[0].access_path == "x"


def test_containers_and_graph_modules_can_be_wrapped():
    sequence = pl.Module(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    assert (len(sequence), type(sequence[1])) == (2, nn.ReLU)
    traced = torch.fx.symbolic_trace(Block())
    wrapper = pl.Module(traced)
    x = torch.ones(1, 4)
    assert torch.equal(wrapper(x), traced(x))
    assert len(wrapper.graph_specs) == 1


@pytest.mark.parametrize("state", STATES)
def test_unwrapping_gives_the_very_module_back(in_state, state):
    plain = Block()
    attributes = set(vars(plain))
    wrapper = in_state(plain, state)
    assert pl.unwrap(wrapper) is plain
    assert set(vars(plain)) == attributes
    assert type(plain) is Block
    toys.calls.clear()
    plain(torch.ones(2, 4))
    assert not toys.calls


def test_a_wrapper_that_nobody_holds_is_freed():
    wrapper = pl.Module(Block())
    wrapper(torch.ones(1, 4))
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("state", STATES)
def test_compilers_see_the_plain_module(in_state, state):
    torch.compiler.reset()
    wrapper = in_state(Block(), state)
    x = torch.ones(2, 4)
    right = wrapper.compute(x)
    compiled = torch.compile(wrapper, fullgraph=True, backend="eager")
    parent = torch.compile(nn.Sequential(wrapper, nn.ReLU()), fullgraph=True, backend="eager")
    recorded = len(control_of(wrapper).graphs) if state == "tuned" else 0
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), right)
        torch.testing.assert_close(parent(x), right.relu())
    if state != "tuned":
        assert control_of(wrapper).recording is None or not control_of(wrapper).recording.table.graphs
    else:
        assert len(control_of(wrapper).graphs) == recorded


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_parent_can_be_exported(strict, is_replaced):
    plain = Block()
    if is_replaced:
        plain.forward = plain.forward
    parent = nn.Sequential(pl.Module(plain), nn.ReLU()).eval()
    x = torch.ones(2, 4)
    exported = torch.export.export(parent, (x,), strict=strict)
    names = set(exported.state_dict)
    assert {"0.first.weight", "0.second.bias"} <= names
    torch.testing.assert_close(exported.module()(x), parent(x))


def test_recording_begins_at_the_first_call():
    wrapper = pl.Module(Block())
    assert wrapper.state == "init"
    wrapper(torch.ones(1, 4))
    assert wrapper.state == "recording"
    wrapper.enable_recording()
    wrapper(torch.ones(3, 4))
    assert wrapper.graph_specs[0].num_samples == 2, "enabling it again changes nothing"


def test_passthrough_keeps_the_recording_and_recording_goes_on():
    wrapper = pl.Module(Block())
    wrapper.enable_recording()
    wrapper(torch.ones(1, 4))
    wrapper.enable_passthrough()
    assert wrapper.state == "passthrough"
    wrapper(torch.ones(2, 4))
    assert wrapper.graph_specs[0].num_samples == 1
    wrapper.enable_recording()
    wrapper(torch.ones(2, 4))
    assert wrapper.graph_specs[0].num_samples == 2


def test_passthrough_from_the_start_records_nothing():
    wrapper = pl.Module(Block())
    wrapper.enable_passthrough()
    wrapper(torch.ones(1, 4))
    assert wrapper.state == "passthrough"
    with pytest.raises(InputError, match="nothing was recorded"):
        _ = wrapper.graph_specs


@pytest.mark.parametrize("name", ["enable_recording", "enable_passthrough"])
def test_a_tuned_module_is_given_up_only_by_force(tuned_toy, name):
    wrapper = tuned_toy()
    with pytest.raises(TuningError, match=rf"Toy is tuned; {name}\(force=True\) gives up what was chosen"):
        getattr(wrapper, name)()
    assert wrapper.state == "tuned"
    getattr(wrapper, name)(force=True)
    assert wrapper.state == {"enable_recording": "recording", "enable_passthrough": "passthrough"}[name]
    with pytest.raises(InputError, match="nothing was recorded"):
        _ = wrapper.graph_specs
    wrapper(torch.ones(1, 4))
    assert not toys.calls


def test_activate_and_deactivate(tuned_toy):
    untuned = pl.Module(Block())
    for _ in range(2):
        with pytest.raises(TuningError, match="only a tuned module is activated; tune it first"):
            untuned.activate()
        untuned.deactivate()
        assert untuned.state in ("init", "recording")
        untuned(torch.ones(1, 4))
    untuned.enable_passthrough()
    untuned.activate()
    assert untuned.state == "passthrough"
    wrapper, x = tuned_toy(), torch.ones(1, 4)
    wrapper.deactivate()
    assert torch.equal(wrapper(x), wrapper.compute(x))
    assert (wrapper.state, toys.calls["faster"]) == ("tuned", 0)
    wrapper.activate()
    assert torch.equal(wrapper(x), wrapper.compute(x))
    assert toys.calls["faster"] == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pl.Module(3), "expected a torch.nn.Module, got a int"),
        (lambda: pl.Module(pl.Module(Block(), "mine")), "mine is wrapped already"),
        (lambda: pl.Module(torch.compile(Block())), "compiled already"),
        (lambda: pl.Module(torch.jit.freeze(torch.jit.script(nn.ReLU().eval()))), "TorchScript"),
        (lambda: pl.Module(Block(), strategy="max"), "strategy: 'max' is no strategy; give objects such as"),
        (lambda: pl.Module(Block(), strategies=3), "strategies: expected a list or a mapping, got a int"),
        (lambda: pl.Module(Block(), strategies=[toys.Faster()]), r"strategies: Faster\(\) is no strategy"),
        (
            lambda: pl.Module(Block(), strategy=pl.MaxThroughputStrategy(), strategies=[]),
            "strategy and strategies: give one of them",
        ),
        (lambda: pl.Module(Block(), dynamic_shapes={"x": [1]}), "expected a tuple of all sizes"),
        (lambda: control_of(Block()), r"A Block is not wrapped; wrap it with pl\.wrap or pl\.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_cannot_be_wrapped_is_told(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_names_have_no_slashes():
    kind = type("a/b", (nn.Module,), {})
    assert pl.Module(kind()).name == "a_b"


def test_four_threads_all_take_the_tuned_path(tuned_toy):
    wrapper = tuned_toy()
    barrier, wrong = threading.Barrier(4), []

    def work(batch):
        x = torch.full((batch, 4), float(batch))
        barrier.wait()
        for _ in range(100):
            if not torch.equal(wrapper(x), x * wrapper.weight):
                wrong.append(batch)

    threads = [threading.Thread(target=work, args=(1 + number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert toys.calls["faster"] == 400
    assert not wrapper.num_unseen_calls


def test_four_threads_may_make_the_first_calls_and_record(tuned_toy):
    wrapper = pl.Module(Block())
    barrier = threading.Barrier(4)

    def work():
        barrier.wait()
        for _ in range(25):
            wrapper(torch.ones(2, 4))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [graph.num_samples for graph in wrapper.graph_specs] == [100]


def test_an_unseen_call_runs_eager_is_counted_and_warns_once(tuned_toy):
    wrapper = tuned_toy()
    x = torch.ones(1, 2, 4)
    with pytest.warns(UnseenGraphWarning, match=r"Toy runs eager\. The call differs from graph 0: `x` has rank 3"):
        assert torch.equal(wrapper(x), wrapper.compute(x))
    for _ in range(2):
        assert torch.equal(wrapper(x), wrapper.compute(x))
    with pytest.warns(UnseenGraphWarning, match=r"size 5 of `x` axis 0 is outside 1\.\.4"):
        wrapper(torch.ones(5, 4))
    with pytest.warns(UnseenGraphWarning, match="`scale` was not given when calls were recorded"):
        wrapper(torch.ones(1, 4), scale=2.0)
    assert sorted(wrapper.num_unseen_calls.values()) == [1, 1, 3]
    assert not toys.calls
    wrapper(torch.ones(1, 4))
    assert toys.calls["faster"] == 1


def test_an_unseen_call_is_an_error_where_that_is_asked_for(tuned_toy):
    pl.config.unseen_graph = "error"
    wrapper = tuned_toy()
    for _ in range(2):
        with pytest.raises(TuningError, match=r"Toy was tuned for other calls\. .*rank 3.* config\.unseen_graph"):
            wrapper(torch.ones(1, 2, 4))
    wrapper(torch.ones(3, 4))
    assert toys.calls["faster"] == 1


def test_in_training_mode_it_is_the_plain_module(tuned_toy):
    wrapper, x = tuned_toy(), torch.ones(1, 4)
    wrapper(x)
    wrapper.train()
    with pytest.warns(UnseenGraphWarning, match="The module is in training mode"):
        result = wrapper(x)
    assert result.requires_grad
    result.sum().backward()
    assert wrapper.weight.grad is not None
    wrapper.eval()
    wrapper(x)
    assert (toys.calls["faster"], list(wrapper.num_unseen_calls.values())) == (2, [1])


def test_under_autocast_it_is_the_plain_module(tuned_toy):
    wrapper, x = tuned_toy(Block()), torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UnseenGraphWarning, match="under autocast"):
            found = wrapper(x)
        assert torch.equal(found, wrapper.module(x))
    assert not toys.calls
    wrapper(x)
    assert toys.calls["faster"] == 1


def test_a_tuned_call_makes_no_gradients(tuned_toy):
    wrapper, x = tuned_toy(), torch.ones(1, 4, requires_grad=True)
    assert not wrapper(x).requires_grad
    assert torch.is_grad_enabled()
    with torch.inference_mode():
        assert wrapper(torch.ones(1, 4)).is_inference()
    assert toys.calls["faster"] == 2


def test_a_graph_that_stays_eager_keeps_its_gradients():
    wrapper = pl.Module(toys.Toy(), strategy=pl.OneBackendStrategy(pl.backend.TorchEagerBackend()))
    pl.tune(wrapper, toys.samples())
    assert wrapper.state == "tuned"
    assert wrapper(torch.ones(1, 4)).requires_grad


def test_an_error_of_the_backend_reaches_the_caller(tuned_toy):
    wrapper = tuned_toy()
    wrapper.compute = types.MethodType(lambda self, x: 1 / 0, wrapper)
    with pytest.raises(ZeroDivisionError):
        wrapper(torch.ones(1, 4))


class Copying(toys.Faster):
    """Has a copy of the weights."""

    name = "toy_copying"

    def compile(self, request):
        weight = request.module.weight.detach().clone()
        return Built(lambda x: x * weight, owns_weights=True)


@pytest.mark.parametrize("is_inside", [False, True])
def test_weights_that_are_moved_end_what_was_tuned_for_them(tuned_toy, is_inside):
    wrapper = tuned_toy()
    outer = nn.Sequential(wrapper) if is_inside else wrapper
    outer.float()
    assert wrapper.state == "tuned"
    assert control_of(wrapper).builds
    with pytest.warns(UserWarning, match="Toy is not tuned any more: its weights were moved to another device or dt"):
        outer.double()
    assert wrapper.state == "passthrough"
    assert not control_of(wrapper).builds
    x = torch.ones(1, 4, dtype=torch.float64)
    assert torch.equal(outer(x), wrapper.compute(x))


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_state_dict_that_is_loaded_is_not_hidden_by_a_copy_of_the_weights(is_inside):
    strategy = pl.OneBackendStrategy(Copying()).enable_performance_validation(False)
    wrapper = pl.Module(toys.Toy(), strategy=strategy)
    pl.tune(wrapper, toys.samples())
    outer = nn.Sequential(wrapper) if is_inside else wrapper
    changed = {name: value * 2 for name, value in outer.state_dict().items()}
    with pytest.warns(UserWarning, match="a state dict was loaded, and a backend has a copy of the weights"):
        outer.load_state_dict(changed)
    assert torch.equal(outer(torch.ones(1, 4)), torch.tensor([[2.0, 4, 6, 8]]))
    pl.tune(wrapper, toys.samples())
    assert wrapper.state == "tuned"
    assert torch.equal(outer(torch.ones(1, 4)), torch.tensor([[2.0, 4, 6, 8]]))


def test_tied_weights_stay_tied():
    plain = Block()
    plain.second.weight = plain.first.weight
    wrapper = pl.Module(plain)
    wrapper.to(torch.float64)
    assert wrapper.second.weight is wrapper.first.weight
    assert copy.deepcopy(wrapper).first.weight is not wrapper.first.weight
    copied = copy.deepcopy(wrapper)
    assert copied.second.weight is copied.first.weight


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.norm(self.conv(x)))


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.clock = toys.NoClock()
        self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 10)

    def compute(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))

    def forward(self, x):
        return self.compute(x)


def test_stated_shapes_let_other_sizes_take_the_tuned_path():
    batch = pl.BatchDim("batch", min=1, opt=2, max=8)
    height = pl.DynamicDim("spatial", min=56, opt=56, max=128)
    width = pl.DynamicDim("spatial", min=56, opt=56, max=128)
    strategy = pl.OneBackendStrategy(toys.Faster()).enable_performance_validation(False)
    model = pl.Module(SmallResNet().eval(), strategy=strategy, dynamic_shapes={"x": (batch, 3, height, width)})
    with pytest.warns(UserWarning, match="batch_sizes has one size"):
        report = pl.tune(model, [torch.randn(3, 56, 56)], batch_sizes=[1])
    graph = report.modules[0].graphs[0]
    assert graph.inputs[0].shape == ("batch", 3, "spatial", "spatial")
    assert graph.decision.candidates[0].correctness.num_cases == 4, "the sample, and the ends and middle of the ranges"
    toys.calls.clear()
    x = torch.randn(2, 3, 64, 64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        torch.testing.assert_close(model(x), model.compute(x))
        model(torch.randn(8, 3, 128, 128))
    assert toys.calls["faster"] == 2
    with pytest.warns(UnseenGraphWarning, match="both are 'spatial' and have to be equal"):
        model(torch.randn(1, 3, 56, 64))


def test_a_stated_shape_that_no_call_has_is_an_error_of_that_module():
    wrapper = pl.Module(toys.Toy(), dynamic_shapes={"y": (pl.BatchDim("batch", 1, 8), 4)})
    report = pl.tune(wrapper, toys.samples())
    assert "no recorded call has a tensor at 'y'" in report.modules[0].error.message
    assert wrapper.state == "passthrough"


def test_a_module_is_tuned_from_what_it_recorded():
    strategy = pl.OneBackendStrategy(toys.Faster()).enable_performance_validation(False)
    wrapper = pl.Module(toys.Toy(), strategy=pl.OneBackendStrategy(pl.backend.TorchEagerBackend()))
    with pytest.raises(TuningError, match="has no samples"):
        wrapper.tune()
    wrapper(torch.ones(2, 4))
    report = wrapper.tune(dry_run=True)
    assert (report.is_dry_run, report.num_builds, wrapper.state) == (True, 0, "recording")
    wrapper(torch.ones(2, 4))
    report = wrapper.tune(strategy=strategy)
    assert wrapper.state == "tuned"
    assert report.modules[0].graphs[0].num_samples == 2
    assert control_of(wrapper).chosen[0].backend.name == "toy_faster"
    with pytest.raises(TuningError, match="is tuned already"):
        wrapper.tune()
    wrapper.enable_passthrough(force=True)
    with pytest.raises(TuningError, match="has no samples"):
        wrapper.tune()


def test_a_module_that_cannot_be_tuned_goes_on_recording():
    wrapper = pl.Module(toys.Toy())
    wrapper(torch.ones(2, 4))
    with pytest.raises(InputError, match="strategy"):
        wrapper.tune(strategy="fast")
    wrapper.train()
    with pytest.raises(InputError, match="training mode"):
        wrapper.tune()
    wrapper.eval()
    assert wrapper.state == "recording"
    assert torch.equal(wrapper(torch.ones(1, 4)), wrapper.module(torch.ones(1, 4)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_that_meets_nested_tensors_runs_as_it_did():
    """As layers of an encoder do, which drops what is padding by them."""
    layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2).eval()
    x, mask = torch.ones(2, 4, 8), torch.tensor([[False, False, False, True]] * 2)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)

    def function(x, mask):
        return encoder(x, src_key_padding_mask=mask)

    eager = pl.OneBackendStrategy(pl.backend.TorchEagerBackend())
    pl.wrap(encoder, ["layers.0"], eager)
    report = pl.tune(function, [(torch.ones(4, 8), mask[0])])
    assert "rejected: sample 0: output is a nested tensor, which cannot be compared" in report.describe()
    with torch.no_grad():
        assert torch.equal(function(x, mask), expected)
        wrapper = encoder.layers[0]
        tuned = pl.Module(wrapper.module, strategy=eager)
        pl.tune(tuned, [torch.ones(4, 8)])
        encoder.layers[0] = tuned
        with pytest.warns(UnseenGraphWarning):
            assert torch.equal(function(x, mask), expected)
