"""Named calls are marked where they are made, on their own thread, and nothing stays behind."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from perfladder.functional.mode import FunctionObserver
from perfladder.functional.names import NO_CALL, describe_call
from perfladder.functional.sites import find_module_sites, same_path_as_without_mode
from perfladder.instrument import Observer, instrument


class Told(list):
    """Names of calls, in order."""

    def __call__(self, call, args, kwargs):
        self.append(call.name)


class Recorder(TorchFunctionMode):
    """Sees every call that reaches it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def observe():
    """Instrument a module and return what was told of its calls."""

    def start(module, opaque=()):
        told, sites = Told(), find_module_sites(module)
        observer = FunctionObserver(Observer(), opaque=opaque or sites.opaque, on_call=told)
        return told, instrument(sites.sites, observer)

    return start


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.linear, "linear"),
        (F.conv2d, "conv2d"),
        (F.max_pool2d, "max_pool2d"),
        (torch.softmax, "torch.softmax"),
        (torch.Tensor.matmul, "Tensor.matmul"),
        (torch.Tensor.__getitem__, "Tensor.__getitem__"),
        (torch.Tensor.T.__get__, "Tensor.T"),
        (torch.ops.aten.mm, "torch.ops.aten.mm"),
        (torch.ops.aten.mm.default, "torch.ops.aten.mm.default"),
        (torch._native_multi_head_attention, "torch._native_multi_head_attention"),
    ],
)
def test_calls_have_names(function, name):
    call = describe_call(function)
    assert call is not None
    assert (call.name, call.is_functional) == (name, "." not in name)
    assert call.name != NO_CALL


@pytest.mark.parametrize("getter", [torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.data.__set__])
def test_what_computes_nothing_is_no_call(getter):
    assert describe_call(getter) is None


def test_only_composites_are_copied():
    for function in (F.multi_head_attention_forward, F.interpolate, F.local_response_norm):
        assert describe_call(function).revealing is not None
    for function in (F.linear, F.relu, F.softmax, F.max_pool2d, F.adaptive_max_pool2d, torch.einsum):
        assert describe_call(function).revealing is None


def test_methods_operators_and_indexing_are_seen(block, observe):
    told, block_is_observed = observe(block)
    with torch.no_grad(), block_is_observed:
        block(torch.randn(1, 4, 8))
    assert told == [
        "layer_norm",
        "Tensor.transpose",
        "Tensor.matmul",
        "Tensor.softmax",
        "torch.matmul",
        "Tensor.__getitem__",
        "gelu",
    ]


def test_functionals_inside_a_functional_are_seen_and_compute_the_same(observe):
    attention = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(3, 1, 8)
    with torch.no_grad():
        plain = attention(x, x, x)
        told, is_observed = observe(attention)
        with is_observed:
            marked = attention(x, x, x)
    assert told == ["multi_head_attention_forward", "linear", "softmax", "linear"]
    assert all(torch.equal(*pair) for pair in zip(plain, marked, strict=True))


def test_fused_attention_stays_fused_under_the_mode(observe):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    for module, args, name in (
        (attention, (x, x, x), "torch._native_multi_head_attention"),
        (layer, (x,), "torch._transformer_encoder_layer_fwd"),
    ):
        told, is_observed = observe(module)
        with torch.no_grad(), same_path_as_without_mode(find_module_sites(module).modules.values()), is_observed:
            module(*args)
        assert name in told
        assert "linear" not in told
        assert "forward" not in vars(module)


def test_functions_that_dispatch_on_an_argument_do_not_recurse(observe):
    pool = nn.MaxPool2d(2, return_indices=True)
    told, is_observed = observe(pool)
    with is_observed:
        values, _ = pool(torch.arange(16.0).reshape(1, 4, 4))
    assert values.flatten().tolist() == [5, 7, 13, 15]
    assert told == ["max_pool2d_with_indices"] or told == ["max_pool2d"]


def test_tensor_class_with_its_own_override_sees_the_call_itself(observe):
    seen = []

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Net(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=2.0)

    net = Net()
    told, is_observed = observe(net)
    with is_observed:
        net(torch.randn(1, 1, 2).as_subclass(Own))
    assert told[0] == "interpolate"
    assert "interpolate" in seen


def test_other_threads_and_code_outside_see_no_mode(block, observe):
    inside, outside = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x):
            inside.set()
            assert outside.wait(10)
            return torch.neg(x)

    net, x = Waiting(), torch.ones(1)
    told, is_observed = observe(net)
    with is_observed:
        worker = threading.Thread(target=net, args=(x,))
        worker.start()
        assert inside.wait(10)
        torch.abs(x)  # on this thread, while the worker is inside the module
        outside.set()
        worker.join()
        torch.exp(x)
    assert told == ["torch.neg"]


def test_opaque_site_runs_without_the_mode_and_the_rest_with_it(observe):
    device = torch.device("cpu")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.graph = nn.ReLU()

        def forward(self, x):
            with device:  # a mode of the program's own, above ours
                y = self.graph(torch.neg(x))
                return torch.abs(y) + torch.zeros(1)

    recorder = Recorder()
    net = Net()
    told, is_observed = observe(net, opaque={"graph"})
    with is_observed, recorder:
        net(torch.ones(1))
    assert [name for name in told if name != "torch.device"] == ["torch.neg", "torch.abs", "torch.zeros", "Tensor.add"]
    assert "relu" in recorder.names


def test_interrupt_leaves_no_mode_behind(observe):
    class Net(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    net = Net()
    told, is_observed = observe(net)
    recorder = Recorder()
    with recorder:
        with pytest.raises(KeyboardInterrupt), is_observed:
            net(torch.ones(1))
        torch.abs(torch.ones(1))
    assert told == []
    assert "abs" in recorder.names
    torch.abs(torch.ones(1))
    assert told == []


def test_generator_of_a_module_is_marked_while_it_runs(observe):
    class Net(nn.Module):
        def forward(self, x):
            for _ in range(2):
                yield torch.neg(x)

    net = Net()
    told, is_observed = observe(net)
    with is_observed:
        for item in net(torch.ones(1)):
            torch.abs(item)
    assert told == ["torch.neg", "torch.neg"]
