import kernel_toys as toys
import pytest
import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.errors import ArchiveError, InputError
from perfladder.kernels import register_provider

pytestmark = pytest.mark.filterwarnings("ignore:batch_sizes has one size")

EAGER = pl.backend.TorchEagerBackend()
X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(autouse=True)
def _by_the_toys_clock(monkeypatch):
    import functools

    from perfladder.kernels import optimizer

    monkeypatch.setattr(optimizer, "Meter", functools.partial(optimizer.Meter, clock=toys.clock))
    pl.config.isolate_builds = False


def tuned(backend, net=None):
    net = net or toys.Net()
    wrapper = pl.Module(net.eval(), strategy=pl.FirstWinsStrategy([backend, EAGER]))
    report = pl.tune(wrapper, [((X,), {})], batch_sizes=[1], clock=toys.clock)
    return wrapper, report.modules[0].graphs[0].decision


def selector(*providers, delegate=EAGER):
    return pl.backend.KernelSelectorBackend(delegate_backend=delegate, providers=providers, min_time_share=0)


def test_a_tuned_module_is_served_with_the_swaps():
    wrapper, decision = tuned(selector(toys.Faster(), toys.Wrong()))
    candidate = decision.candidates[0]
    assert candidate.status == "kept", candidate.reason
    assert candidate.details["swaps"] == ["gelu: toy_faster"] * 2
    assert candidate.details["plan_speedup"] == pytest.approx(10 / 6)
    toys.calls.clear()
    assert torch.equal(wrapper(X[None]), toys.Net()(X[None]))
    assert toys.calls == {"toy_faster": 2}


def test_without_a_winner_the_delegate_is_alone():
    _, decision = tuned(selector(toys.Slower()))
    candidate = decision.candidates[0]
    assert candidate.details["num_swaps"] == 0
    assert candidate.details["plan_reason"] == "no provider is right and faster for any form of call"
    assert (candidate.status, decision.selected) == ("rejected", "eager")


def test_a_saved_module_is_loaded_with_its_plan(tmp_path):
    register_provider(toys.Faster)
    wrapper, _ = tuned(selector(toys.Faster()))
    archive = pl.save(wrapper, tmp_path / "tuned.ait")
    loaded = pl.load(toys.Net().eval(), archive)
    toys.calls.clear()
    assert torch.equal(loaded(X[None]), toys.Net()(X[None]))
    assert toys.calls == {"toy_faster": 2}


def test_a_saved_module_whose_provider_is_not_known_is_refused(tmp_path):
    wrapper, _ = tuned(selector(toys.Faster()))
    archive = pl.save(wrapper, tmp_path / "tuned.ait")
    with pytest.raises(ArchiveError, match="There is no kernel provider 'toy_faster'"):
        pl.load(toys.Net().eval(), archive)


def test_a_second_tuning_takes_the_plan_of_the_first():
    tuned(selector(toys.Faster()))
    toys.calls.clear()
    wrapper, decision = tuned(selector(toys.Faster()))
    assert decision.candidates[0].is_reused
    assert wrapper.state == "tuned"
    assert toys.calls["toy_faster"] < 10, "nothing was timed again"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"delegate_backend": "eager"}, "delegate_backend: expected a backend, not a str"),
        (
            {"delegate_backend": pl.backend.TorchEagerBackend(memory_format="channels_last")},
            "give memory_format to Ker",
        ),
        ({"delegate": {"name": "eagr"}}, "There is no backend 'eagr'"),
        ({"delegate": {"name": "eager", "config": {"fast": True}}}, "fast: unknown field"),
        ({"providers": None, "min_time_share": 2}, "min_time_share"),
        (
            {"config": pl.backend.KernelSelectorBackendConfig(), "delegate_backend": EAGER},
            "give a config, or a delegate and providers",
        ),
    ],
)
def test_wrong_options_are_told(options, says):
    with pytest.raises(InputError, match=says):
        pl.backend.KernelSelectorBackend(**options)


def test_a_delegate_that_does_not_run_the_forward_is_not_applicable():
    backend = selector(delegate=pl.backend.TorchInductorAotBackend())
    assert backend.why_not(torch.device("cpu")).startswith("inductor_aot does not run the module's own forward")


def test_the_config_makes_the_same_backend_again():
    backend = pl.backend.KernelSelectorBackend(
        delegate_backend=pl.backend.TorchInductorJitBackend(dynamic=True),
        providers=[pl.kernels.TorchSDPAKernelProvider(backend="math")],
    )
    again = pl.backend.KernelSelectorBackend(
        type(backend.config).model_validate(backend.config.model_dump(mode="json"))
    )
    assert repr(again) == repr(backend)
    assert "dynamic=True" in repr(again)
    assert pl.backend.KernelSelectorBackend().delegate.name == "inductor_jit"


class Attention(nn.Module):
    """Attention, of which a plan may take another kernel, between calls that a compiler fuses."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        heads = self.linear(x).unflatten(-1, (2, 8)).transpose(1, 2)
        heads = functional.scaled_dot_product_attention(heads, heads, heads)
        return functional.gelu(heads.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of Inductor itself
def test_inside_a_compiled_module_the_swaps_are_part_of_its_graph():
    from perfladder.kernels.plan import KernelOptimizationPlan

    torch.manual_seed(0)
    net, x = Attention().eval(), torch.randn(2, 32, 16)
    backend = selector(
        pl.kernels.TorchSDPAKernelProvider(backend="math"),
        pl.kernels.CompiledCallKernelProvider(functions=("gelu",)),
        delegate=pl.backend.TorchInductorJitBackend(),
    )
    plans = []

    def proved(request, plan, alone, built):
        """As if it had won: which kernel is faster here is not what this is about."""
        plans.append(plan)
        return plan

    found = backend._find
    backend._find = lambda request: kept(found(request))
    backend._prove = proved

    def kept(plan: KernelOptimizationPlan) -> KernelOptimizationPlan:
        from perfladder.kernels.optimizer import _model_of
        from perfladder.kernels.runtime import LiveSwap

        record = next(record for record in plan.records if record.provider == "torch_sdpa")
        assert record.status in ("kept", "rejected"), record.reason
        provider = pl.kernels.TorchSDPAKernelProvider(backend="math").of(record.function)
        provider.prepare([record.signature.example(torch.device("cpu"))])
        swap = LiveSwap(record.function, record.signature, provider)
        made = plan.model_copy(update={"swaps": [_model_of(swap)]})
        return made.with_live([swap])

    wrapper = pl.Module(net, strategy=pl.OneBackendStrategy(backend).enable_performance_validation(False))
    report = pl.tune(wrapper, [((x[0],), {})], batch_sizes=[2])
    decision = report.modules[0].graphs[0].decision
    assert decision.candidates[0].status == "kept", decision.candidates[0].reason
    assert decision.candidates[0].details["num_graph_breaks"] == 0
    assert decision.candidates[0].details["swaps"] == ["scaled_dot_product_attention: torch_sdpa"]
    told = {record.provider: record.reason for record in plans[0].records if record.status == "not_applicable"}
    assert "torch.compile cannot trace it" in told["compiled"]
    torch.testing.assert_close(wrapper(x), net(x), atol=1e-5, rtol=1e-4)
