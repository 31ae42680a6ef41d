import json

import kernel_toys as toys
import pytest
import torch
from torch import nn
from torch.nn import functional

import perfladder as pl
from perfladder.capturing.context import ProcessSettings
from perfladder.errors import CaptureError, InputError, NotPossibleHereError
from perfladder.kernels import KernelOptimizationPlan, KernelOptimizer, register_provider

X = torch.linspace(-1, 1, 12).view(3, 4)


def found(plan, provider):
    return [(record.status, record.reason or "") for record in plan.records if record.provider == provider.name]


def test_a_right_and_faster_provider_serves_both_forms_of_call(plan_of):
    plan = plan_of(toys.Faster())
    assert found(plan, toys.Faster) == [("kept", "")] * 2
    assert [swap.provider for swap in plan.swaps] == ["toy_faster"] * 2
    assert plan.whole.comparison.verdict == "faster"
    assert plan.whole.comparison.speedup == pytest.approx(10 / 6)
    record = plan.records[0]
    assert (record.num_calls, record.reference_dtype) == (1, "float64")
    assert record.correctness.max_rel_error < 1e-6
    assert record.speedup == pytest.approx(10 / 8)


@pytest.mark.parametrize(
    ("provider", "status", "says"),
    [
        (toys.Slower(), "rejected", "not faster"),
        (toys.Equal(), "rejected", "not faster"),
        (toys.Wrong(), "rejected", "largest error"),
        (toys.OtherDtype(), "rejected", "became float64"),
        (toys.ChangesInput(), "rejected", "it changes its input args.0"),
        (toys.Raises(), "failed", "RuntimeError: misaligned address"),
        (toys.NeverPrepared(), "failed", "OSError: no such library"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_provider_that_is_no_good_is_told_and_left_out(plan_of, provider, status, says):
    plan = plan_of(provider)
    assert [one for one, _ in found(plan, provider)] == [status] * 2
    assert all(says in reason for _, reason in found(plan, provider))
    assert plan.swaps == []
    assert plan.reason == "no provider is right and faster for any form of call"
    net = toys.Net()
    toys.calls.clear()
    with plan.apply(net):
        net(X)
    assert not toys.calls


class _Remembers(toys.Faster):
    """Computes once, for the numbers that it was prepared with."""

    name = "toy_remembers"

    def prepare(self, samples):
        self.known = self.original(*samples[0][0], **samples[0][1])

    def result(self, right, *args):
        return self.known.clone()


class _Reuses(toys.Faster):
    """Right, in memory that the next call fills again."""

    name = "toy_reuses"

    def prepare(self, samples):
        self.memory = self.original(*samples[0][0])

    def result(self, right, *args):
        return self.memory.copy_(right)


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        (_Remembers(), "other numbers: output: largest error"),
        (_Reuses(), "the sample: it puts its output into the memory of the one before"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_answer_that_is_right_once_is_not_enough(plan_of, provider, says):
    plan = plan_of(provider)
    assert [status for status, _ in found(plan, provider)] == ["rejected"] * 2
    assert all(reason.startswith(says) for _, reason in found(plan, provider))


def test_a_provider_that_writes_to_weights_does_not_reach_the_module():
    class Writes(toys.Faster):
        name, functions = "toy_writes", ("linear",)

        def result(self, right, *args):
            args[1].add_(1)
            return right

    net = nn.Linear(4, 3)
    before = net.weight.detach().clone()
    plan = KernelOptimizer([Writes()], clock=toys.clock, min_time_share=0).make_plan(net, [((X,), {})])
    ((status, reason),) = found(plan, Writes)
    assert (status, reason) == (
        "rejected",
        "other numbers: it changes its input args.1, which the plain module leaves as it is",
    )
    assert torch.equal(net.weight, before)


def _open_a_mode():
    torch.overrides.BaseTorchFunctionMode().__enter__()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "default_dtype"),
        (lambda: torch.set_float32_matmul_precision("medium"), "float32_matmul_precision"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "num_threads"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic_algorithms"),
        (_open_a_mode, "function modes"),
    ],
    ids=["dtype", "precision", "threads", "deterministic", "mode"],
)
def test_a_provider_that_changes_settings_is_rejected_and_they_are_put_back(plan_of, change, says):
    class Changes(toys.Faster):
        name = "toy_changes"

        def result(self, right, *args):
            change()
            return right

    before = ProcessSettings()
    plan = plan_of(Changes())
    assert found(plan, Changes) == [("rejected", f"it leaves settings of torch changed: {says}")] * 2
    assert before.put_back() == []


def test_a_provider_that_ends_the_process_has_failed(plan_of):
    class Exits(toys.Faster):
        name = "toy_exits"

        def result(self, right, *args):
            raise SystemExit(3)

    assert found(plan_of(Exits()), Exits) == [("failed", "SystemExit: 3")] * 2


def test_a_provider_is_judged_for_each_form_of_call(plan_of):
    plan = plan_of(toys.NanForOneShape())
    (first, _), (second, reason) = found(plan, toys.NanForOneShape)
    assert (first, second) == ("kept", "rejected")
    assert "9 of 9 values are NaN or infinite on one side only" in reason
    assert [swap.signature.args[0].shape for swap in plan.swaps] == [(3, 2)]
    net, plain = toys.Net(), toys.Net()(X)
    toys.calls.clear()
    with plan.apply(net), torch.no_grad():
        assert torch.equal(net(X), plain)
    assert toys.calls == {"toy_nan": 1}


def test_each_form_of_call_gets_the_fastest(plan_of):
    plan = plan_of(toys.Faster(), toys.ForTwoColumns(), toys.Slower())
    assert [swap.provider for swap in plan.swaps] == ["toy_two_columns", "toy_faster"]
    beaten = ("rejected", "ForTwoColumns() is faster still")
    assert found(plan, toys.Faster) == [beaten, ("kept", "")]
    assert found(plan, toys.ForTwoColumns)[1] == ("not_applicable", "it takes two columns")


def test_swaps_that_do_not_make_the_whole_faster_are_given_up(plan_of):
    class Watching(toys.Net):
        """Takes back what a provider saves."""

        def forward(self, x):
            before = sum(toys.calls.values())
            result = super().forward(x)
            toys.clock.pass_ms(2.0 * (sum(toys.calls.values()) - before))
            return result

    plan = plan_of(toys.Faster(), net=Watching())
    assert found(plan, toys.Faster) == [("kept", "")] * 2
    assert plan.swaps == []
    assert plan.reason.startswith("the whole is not faster")
    assert plan.whole.comparison.verdict != "faster"


def test_swaps_that_make_the_whole_wrong_are_given_up(plan_of):
    class Differing(toys.Faster):
        """Right when it is tried, with few calls before."""

        name = "toy_differing"

        def result(self, right, *args):
            return right * (1 if toys.calls[self.name] <= 2 * (1 + 11) else 2)

    plan = plan_of(Differing())
    assert plan.swaps == []
    assert plan.reason.startswith("the whole output is wrong: call 0: output: largest error")


def test_what_was_not_called_or_takes_no_time_says_so(plan_of):
    class Slow(toys.Net):
        def forward(self, x):
            toys.clock.pass_ms(90)
            return super().forward(x)

    optimizer = KernelOptimizer([toys.Tagged(), toys.Faster()], clock=toys.clock, min_time_share=0.2)
    plan = optimizer.make_plan(Slow(), [((X,), {})])
    told = {(record.function, record.status, record.reason) for record in plan.records}
    assert ("relu", "not_applicable", "the module makes no call of relu") in told
    assert ("gelu", "not_applicable", "these calls take 10.0% of the time; `min_time_share` is 20.0%") in told


def test_what_is_not_possible_on_the_device_is_told_once(plan_of):
    class OnGpu(toys.Faster):
        name, device_types = "toy_gpu", ("cuda",)

    assert found(plan_of(OnGpu()), OnGpu) == [("not_applicable", "it runs on cuda, not on cpu")]


def test_a_library_that_is_only_half_there_costs_its_own_provider(plan_of):
    class Broken(toys.Faster):
        name = "toy_broken"

        def why_not(self, device):
            raise OSError("libtoy.so: undefined symbol")

    plan = plan_of(Broken(), toys.Faster())
    ((status, reason),) = found(plan, Broken)
    assert (status, reason.endswith("OSError: libtoy.so: undefined symbol")) == ("not_applicable", True)
    assert len(plan.swaps) == 2


class _NeverRun(nn.Module):
    def forward(self, x):
        raise AssertionError("it was run")


def test_a_capture_that_is_none_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(CaptureError, match="is no capture"):
        KernelOptimizer([toys.Faster()]).make_plan(_NeverRun(), [((X,), {})], capture=tmp_path, factory="a:b")


@pytest.mark.parametrize("provider", [toys.Faster(), toys.Slower()], ids=lambda value: value.name)
def test_the_module_keeps_what_it_had_before(plan_of, provider):
    class Counting(toys.Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))
            self.num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            self.total += 1
            return super().forward(x)

    net = Counting()
    plan_of(provider, net=net)
    assert (net.num_calls, float(net.total)) == (0, 0.0)


def test_the_function_need_not_be_the_module():
    net = toys.Net()
    other = functional.gelu

    def pipeline(x, *, scale):
        return {"result": net(x) * scale, "outside": other(x[:, :2])}

    optimizer = KernelOptimizer([toys.Faster()], clock=toys.clock, min_time_share=0)
    plan = optimizer.make_plan(pipeline, [((X,), {"scale": 2.0})], module=net)
    assert [record.num_calls for record in plan.records] == [1, 1], "the call outside does not count"
    toys.calls.clear()
    with torch.no_grad(), plan.apply(net):
        pipeline(X, scale=2.0)
    assert toys.calls == {"toy_faster": 2}


def test_a_plan_survives_json(plan_of):
    register_provider(toys.Faster)
    plan = plan_of(toys.Faster())
    again = KernelOptimizationPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.to_dict() == plan.to_dict()
    net, plain = toys.Net(), toys.Net()(X)
    toys.calls.clear()
    with torch.no_grad(), again.apply(net):
        assert torch.equal(net(X), plain)
    assert toys.calls == {"toy_faster": 2}


def test_a_plan_whose_provider_is_not_known_or_not_possible_is_refused(plan_of):
    data = plan_of(toys.Faster()).to_dict()
    with pytest.raises(InputError, match=r"There is no kernel provider 'toy_faster'.*register_provider"):
        KernelOptimizationPlan.from_dict(data).apply(toys.Net())
    register_provider(toys.NeverPrepared)
    for swap in data["swaps"]:
        swap["provider"] = toys.NeverPrepared.name
    with pytest.raises(NotPossibleHereError, match=r"NeverPrepared\(\) for gelu, which is not possible here: OSError"):
        KernelOptimizationPlan.from_dict(data).apply(toys.Net())


@pytest.mark.parametrize(
    "data", [None, [], {"schema_version": 99}, {"schema_version": 1}, {"swaps": 3, "device_type": ""}]
)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(InputError, match="plan"):
        KernelOptimizationPlan.from_dict(data)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"shape": [-3, 2]}, "a tensor has a shape and as many strides"),
        ({"strides": [1]}, "a tensor has a shape and as many strides"),
        ({"dtype": "nn"}, "'nn' is no dtype of torch"),
        ({"kind": "value", "type": "int", "value": "x"}, "'x' is no value of the class 'int'"),
        ({"kind": "value", "type": "object", "value": 1}, "1 is no value of the class 'object'"),
        ({"kind": "list"}, "a list has items"),
    ],
)
def test_a_form_that_is_none_is_refused(plan_of, form, says):
    data = plan_of(toys.Faster()).to_dict()
    data["swaps"][0]["signature"]["args"][0].update(form)
    with pytest.raises(InputError, match=rf"swaps.0.signature.args.0: {says}"):
        KernelOptimizationPlan.from_dict(data)


def test_a_plan_edited_to_another_function_or_device_is_refused(plan_of):
    register_provider(toys.Faster)
    data = plan_of(toys.Faster()).to_dict()
    data["swaps"][0]["function"] = "relu"
    with pytest.raises(InputError, match="'toy_faster' stands for gelu, and not for 'relu'"):
        KernelOptimizationPlan.from_dict(data).apply(toys.Net())
    data["swaps"][0]["signature"]["device_type"] = "gpu"
    with pytest.raises(InputError, match="'gpu' is no kind of device"):
        KernelOptimizationPlan.from_dict(data)


def test_a_provider_survives_json():
    provider = pl.kernels.TorchSDPAKernelProvider(backend="math").of("scaled_dot_product_attention")
    again = pl.kernels.KernelProvider.from_dict(json.loads(json.dumps(provider.to_dict())))
    assert (type(again), again.config, again.function) == (type(provider), provider.config, provider.function)
    with pytest.raises(InputError, match="expected what to_dict"):
        pl.kernels.KernelProvider.from_dict({"provider": "torch_sdpa"})
    with pytest.raises(InputError, match="flash"):
        pl.kernels.KernelProvider.from_dict({**provider.to_dict(), "config": {"backend": "fast"}})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"providers": [toys.Faster]}, "expected instances of pl.kernels.KernelProvider"),
        ({"min_time_share": 2}, "min_time_share: expected a number from 0 to 1"),
        ({"min_speedup_percent": "fast"}, "min_speedup_percent: expected a number"),
        ({"tolerances": {"float31": 1.0}}, "'float31' is no dtype"),
        ({"tolerances": {"float32": "small"}}, "tolerances: float32: expected a number from 0"),
        ({"tolerances": ["float32"]}, "tolerances: expected a mapping by dtype, not a list"),
        ({"measuring": 3}, "measuring: expected an instance of a strategy, got 3"),
        ({"sample_budget_bytes": -1}, "sample_budget_bytes: expected a number from 0 or None"),
        ({"providers": toys.Faster()}, "providers: expected a list of providers, not a Faster"),
        ({"providers": [type("Nameless", (pl.kernels.KernelProvider,), {"__call__": id})()]}, "Nameless has no name"),
        ({"providers": [type("Text", (toys.Faster,), {"functions": "gelu"})()]}, "`functions` of Text is a text"),
        ({"providers": [type("Unknown", (toys.Faster,), {"functions": ("gelo",)})()]}, "There is no function 'gelo'"),
        ({"providers": [type("Unseen", (toys.Faster,), {"functions": ("Tensor.silu",)})()]}, "There is no function"),
    ],
)
def test_wrong_options_are_told(options, says):
    with pytest.raises(InputError, match=says):
        KernelOptimizer(**options)


def test_other_tolerances_may_be_given(plan_of):
    plan = plan_of(toys.Wrong(), tolerances={"float32": 0.1})
    assert found(plan, toys.Wrong) == [("kept", "")] * 2
    assert len(plan.swaps) == 2


def test_a_function_that_writes_to_its_input_is_compared_by_that():
    class InPlace(nn.Module):
        def forward(self, x):
            return functional.relu(x * 2, inplace=True)

    class Relu(toys.Faster):
        name, functions = "toy_relu", ("relu",)

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class Leaves(Relu):
        name = "toy_leaves"

        def __call__(self, x, inplace=False):
            return super().__call__(x)

    optimizer = KernelOptimizer([Relu(), Leaves()], clock=toys.clock, min_time_share=0)
    plan = optimizer.make_plan(InPlace(), [((X,), {})])
    assert found(plan, Relu) == [("kept", "")]
    ((status, reason),) = found(plan, Leaves)
    assert status == "rejected"
    assert "leaves its input args.0 otherwise" in reason


def test_a_description_has_a_line_for_each_trial(plan_of):
    plan = plan_of(toys.Faster(), toys.Wrong())
    lines = plan.describe().splitlines()
    assert len(lines) == len(plan.records) + 2
    assert lines[0].startswith("gelu(float32 [3, 2] strides [4, 1]): Faster(): kept, 10 -> 8 ms, speedup 1.25 (")
    assert lines[-1] == "2 forms of call kept"


def test_results_in_a_wider_type_are_held_against_what_the_module_computes_in():
    from torch import nn

    from perfladder.kernels.whole import as_computed

    given = {"float64": 1e-7, "float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
    assert as_computed(given, nn.Linear(2, 2)) == {**given, "float64": 1e-4}
    assert as_computed(given, nn.Linear(2, 2).half())["float32"] == 1e-2
    assert as_computed(given, nn.Identity()) == given
