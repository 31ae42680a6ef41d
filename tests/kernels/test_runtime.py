import copy
import threading

import kernel_toys
import pytest
import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.errors import InputError
from perfladder.kernels.runtime import Activation, KernelMode, LiveSwap, under_mode
from perfladder.kernels.signatures import CallSignature

X = torch.linspace(-1, 1, 4)


def mode_of(number=1.0, x=X, function="gelu"):
    provider = kernel_toys.Tagged(number).of(function)
    return KernelMode([LiveSwap(function, CallSignature.of(((x,), {})), provider)])


class Gelu(nn.Module):
    def forward(self, x):
        return functional.gelu(x)


@pytest.fixture
def net():
    return Gelu()


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def test_calls_inside_the_module_are_swapped_and_others_are_not(net):
    plain = functional.gelu(X)
    with Activation(net, mode_of()):
        assert torch.equal(net(X), plain + 1)
        assert torch.equal(functional.gelu(X), plain)
        assert torch.equal(Gelu()(X), plain)
    assert torch.equal(net(X), plain)
    assert "forward" not in vars(net)


def test_a_call_of_another_form_stays_as_it_is(net):
    with Activation(net, mode_of()):
        for x in (torch.ones(5), X.double(), X.repeat(2)[::2]):
            assert torch.equal(net(x), functional.gelu(x))


def test_with_gradients_or_autocast_nothing_is_swapped(net):
    with Activation(net, mode_of()):
        with torch.enable_grad():
            assert torch.equal(net(X), functional.gelu(X))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(net(X), functional.gelu(X))
        with torch.inference_mode():
            assert torch.equal(net(X), functional.gelu(X) + 1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_inside_leaves_nothing_behind(error):
    class Failing(nn.Module):
        def forward(self, x):
            raise error

    net = Failing()
    with pytest.raises(error), Activation(net, mode_of()):
        net(X)
    assert torch.equal(functional.gelu(X), Gelu()(X))


def test_two_modules_with_two_plans_run_in_two_threads_at_once(net):
    other, plain = Gelu(), functional.gelu(X)
    gate = threading.Barrier(3)
    results = {}

    def run(name, module, expected):
        gate.wait()
        with torch.no_grad():
            results[name] = all(torch.equal(module(X), expected) for _ in range(300))

    with Activation(net, mode_of(1.0)), Activation(other, mode_of(2.0)):
        jobs = [("first", net, plain + 1), ("second", other, plain + 2), ("third", Gelu(), plain)]
        threads = [threading.Thread(target=run, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {"first": True, "second": True, "third": True}


def test_one_module_may_be_called_by_many_threads_at_once(net):
    gate, results = threading.Barrier(4), []

    def run():
        gate.wait()
        with torch.no_grad():
            results.append(all(torch.equal(net(X), functional.gelu(X) + 1) for _ in range(100)))

    with Activation(net, mode_of()):
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 4


def test_a_module_that_calls_itself_is_swapped_once_a_call():
    class Twice(nn.Module):
        def forward(self, x, depth=1):
            return functional.gelu(x) + (self(x, depth - 1) if depth else 0)

    net = Twice()
    with Activation(net, mode_of()):
        assert torch.equal(net(X), 2 * (functional.gelu(X) + 1))


def test_a_plan_inside_another_one_goes_first_and_leaves_the_rest_to_it():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Gelu()

        def forward(self, x):
            return functional.relu(self.inner(x)), functional.gelu(x)

    net, plain = Both(), functional.gelu(X)
    with Activation(net, mode_of(1.0)), Activation(net.inner, mode_of(2.0)):
        inner, outer = net(X)
    assert torch.equal(outer, plain + 1)
    assert torch.equal(inner, functional.relu(plain + 2))


def test_handles_may_be_removed_in_any_order_and_twice(net):
    plain = functional.gelu(X)
    first, second = Activation(net, mode_of(1.0)), Activation(net, mode_of(2.0))
    first.remove()
    assert torch.equal(net(X), plain + 2)
    second.remove()
    second.remove()
    assert torch.equal(net(X), plain)
    assert "forward" not in vars(net)


def test_a_copy_of_a_module_runs_its_own_forward():
    net = nn.Sequential(nn.Linear(4, 4), Gelu())
    with Activation(net, mode_of()):
        other = copy.deepcopy(net)
        other[0].weight.zero_()
        other[0].bias.zero_()
        assert torch.equal(other(X), torch.ones(4))


def test_calls_inside_functions_of_torch_are_seen():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    forms = []

    class Seeing(kernel_toys.Tagged):
        def __call__(self, *args, **kwargs):
            forms.append(len(args))
            return self.original(*args, **kwargs)

    plain = attention(x, x, x, need_weights=False)[0]
    query = torch.empty(1, 2, 3, 4)
    provider = Seeing().of("linear")
    swaps = [LiveSwap("linear", CallSignature.of(((torch.empty(3, 8), torch.empty(24, 8)), {})), provider)]
    swaps += [LiveSwap("scaled_dot_product_attention", CallSignature.of(((query, query, query), {})), provider)]
    mode = KernelMode(swaps)
    with Activation(attention, mode):
        found = attention(x, x, x, need_weights=False)[0]
    assert torch.equal(found, plain), "it takes the same path as without"


def test_providers_of_a_composite_function_are_found():
    x = torch.randn(3, 1, 8)
    weights = [torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)]

    class Attention(nn.Module):
        def forward(self, x):
            w, b, out_w, out_b = weights
            return functional.multi_head_attention_forward(
                x, x, x, 8, 2, w, b, None, None, False, 0.0, out_w, out_b, training=False, need_weights=False
            )[0]

    net, seen = Attention(), []
    from perfladder.functional.mode import CallTable, FunctionMode
    from perfladder.functional.samples import SampleStore

    store = SampleStore(frozenset({"scaled_dot_product_attention"}))
    with Activation(net, FunctionMode(CallTable(), store.take)):
        plain = net(x)
    ((_, arguments),) = store.function_data()["scaled_dot_product_attention"]

    class Counting(kernel_toys.Tagged):
        def __call__(self, *args, **kwargs):
            seen.append(args)
            return self.original(*args, **kwargs)

    name = "scaled_dot_product_attention"
    with Activation(net, KernelMode([LiveSwap(name, CallSignature.of(arguments), Counting().of(name))])):
        assert torch.equal(net(x), plain)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: "unet", "expected a torch.nn.Module, not a str"),
        (lambda: torch.jit.trace(Gelu(), X, check_trace=False), "TorchScript"),
        (lambda: pl.Module(Gelu()), "wrapper that tuning put there"),
        (lambda: compiled_in_place(), "module.compile"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_plan_cannot_be_applied_to_is_told(make, says):
    with pytest.raises(InputError, match=says):
        Activation(make(), mode_of())


def compiled_in_place():
    net = Gelu()
    net.compile(backend="eager")
    return net


class Graphs:
    def __init__(self):
        self.made = []

    def __call__(self, graph, _):
        self.made.append(graph)
        return graph


class Various(nn.Module):
    """What Dynamo sees as calls of several kinds, between calls that are swapped."""

    def forward(self, x):
        x = functional.gelu(x)
        return functional.gelu((1 - x.unflatten(0, (2, 2)).flatten() / 2) * len(x))


@pytest.mark.parametrize("is_dynamic", [None, True])
def test_a_compiler_traces_the_swaps_without_a_break(is_dynamic):
    net, graphs = Various(), Graphs()
    torch.compiler.reset()
    swapped = under_mode(net.forward, mode_of(3.0))
    compiled = torch.compile(swapped, backend=graphs, fullgraph=True, dynamic=is_dynamic)
    for x in (X, torch.cat([X, X])):
        x = x.contiguous()
        torch.testing.assert_close(compiled(x[:4]), swapped(x[:4]))
    torch.testing.assert_close(compiled(X), swapped(X))
    assert len(graphs.made) == 1
    assert not torch.equal(swapped(X), net(X))


def test_a_compiler_traces_swaps_of_methods_of_computed_tensors():
    class Squares(nn.Module):
        def forward(self, x):
            return (x + 1).matmul(x)

    x = torch.randn(2, 2)
    provider = kernel_toys.Tagged().of("Tensor.matmul")
    mode = KernelMode([LiveSwap("Tensor.matmul", CallSignature.of(((x, x), {})), provider)])
    net = Squares()
    torch.compiler.reset()
    compiled = torch.compile(under_mode(net.forward, mode), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), net(x) + 1)


def test_a_compiled_call_of_another_size_is_not_swapped():
    net, graphs = Gelu(), Graphs()
    torch.compiler.reset()
    compiled = torch.compile(under_mode(net.forward, mode_of()), backend=graphs, dynamic=True)
    assert torch.equal(compiled(X), functional.gelu(X) + 1)
    other = torch.ones(7)
    assert torch.equal(compiled(other), functional.gelu(other))
    assert torch.equal(compiled(X), functional.gelu(X) + 1)


def test_a_provider_that_cannot_be_traced_leaves_a_compiled_call_as_it_is():
    provider = kernel_toys.NotTraceable().of("gelu")
    mode = KernelMode([LiveSwap("gelu", CallSignature.of(((X,), {})), provider)])
    kernel_toys.calls.clear()
    torch.compiler.reset()
    compiled = torch.compile(under_mode(Gelu().forward, mode), backend="eager")
    assert torch.equal(compiled(X), functional.gelu(X))
    assert not kernel_toys.calls
