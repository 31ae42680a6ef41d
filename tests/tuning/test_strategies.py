"""Who wins and why: with backends whose speed a test sets, on a clock that they move."""

import pytest
import torch
import toys
from torch import nn

import perfladder as pl
from perfladder.errors import InputError
from perfladder.tuning.max_batch import find_max_batch_size
from perfladder.tuning.strategies import default_backends

EAGER = pl.backend.TorchEagerBackend()


def backend(label, ms, **options):
    return toys.Faster(label=label, ms=ms, **options)


@pytest.fixture
def tuned(clock):
    """Tune a toy of 10 ms with a strategy; returns the report of its graph and the error."""

    def run(strategy, toy=None, dataset=None, batch_sizes=(1, 2)):
        wrapper = pl.Module(toy or toys.Toy(clock), strategy=strategy)
        report = pl.tune(wrapper, dataset or toys.samples(4), batch_sizes=list(batch_sizes), clock=clock)
        return report.modules[0].graphs[0], report.modules[0].error

    return run


@pytest.fixture
def decided(tuned):
    def run(*args, **options):
        graph, error = tuned(*args, **options)
        assert error is None, error
        return graph.decision

    return run


@pytest.fixture
def failed(tuned):
    def run(*args, **options):
        graph, error = tuned(*args, **options)
        assert error is not None
        return error, graph.candidates

    return run


def verdicts(decision):
    return {candidate.config.get("label", "eager"): candidate.status for candidate in decision.candidates}


class Zeros(toys.Faster):
    """The fastest of all."""

    name = "toy_zeros"

    def result(self, right, x):
        return torch.zeros_like(right)


class Missing(toys.Faster):
    name = "toy_missing"

    def why_not(self, device):
        return "a library is not installed"


class TestOneBackend:
    def test_it_is_taken_if_it_is_faster(self, decided):
        decision = decided(pl.OneBackendStrategy(backend("a", 5)))
        assert decision.selected == "Faster(label='a')"
        assert decision.reason.startswith("Faster(label='a') is right; The speedup is 2.000")

    def test_the_plain_module_stays_if_it_is_slower(self, decided):
        decision = decided(pl.OneBackendStrategy(backend("a", 20)))
        assert decision.selected == "eager"
        assert "no faster at batch size 2: The speedup is 0.500" in decision.reason
        assert decision.candidates[0].status == "rejected"
        assert len(decision.candidates[0].measurements) == 1

    def test_a_wrong_result_is_an_error(self, failed):
        error, candidates = failed(pl.OneBackendStrategy(Zeros(ms=0.1)))
        assert error.type == "TuningError"
        assert "Zeros(ms=0.1) rejected: sample 0: output" in error.message
        assert candidates[0].measurements == [], "a wrong one is not timed"

    def test_one_that_is_not_applicable_is_an_error(self, failed):
        error, _ = failed(pl.OneBackendStrategy(Missing()))
        assert error.message == "Missing() not applicable: a library is not installed"

    def test_eager_itself_is_no_error(self, decided):
        assert decided(pl.OneBackendStrategy(EAGER)).selected == "eager"


class TestFirstWins:
    def test_the_first_that_is_right_and_faster_is_taken(self, decided):
        order = [Missing(), Zeros(), backend("slow", 11), backend("good", 8), backend("best", 2)]
        decision = decided(pl.FirstWinsStrategy(order))
        assert decision.selected == "Faster(label='good', ms=8.0)"
        assert [c.status for c in decision.candidates] == ["not_applicable", "rejected", "rejected", "kept"]
        for part in ("a library is not installed", "sample 0: output", "no faster at batch size 2"):
            assert part in decision.reason
        assert toys.builds["best"] == 0, "what comes after it is not built"

    def test_the_plain_module_is_taken_where_it_is_next(self, decided):
        decision = decided(pl.FirstWinsStrategy([backend("slow", 11), EAGER, backend("best", 2)]))
        assert decision.selected == "eager"
        assert decision.reason.startswith("The plain module is next in order; before it Faster(label='slow'")

    def test_none_is_an_error(self, failed):
        error, candidates = failed(pl.FirstWinsStrategy([backend("slow", 11), Zeros()]))
        assert "no backend can be taken: Faster(label='slow', ms=11.0) (rejected: no faster" in error.message
        assert [candidate.status for candidate in candidates] == ["rejected", "rejected"]

    def test_defaults_end_with_the_plain_module(self):
        plain = default_backends(nn.Linear(2, 2), "cpu")
        assert [repr(one) for one in plain] == ["TorchInductorJitBackend()", "TorchEagerBackend()"]
        with_images = default_backends(nn.Sequential(nn.Conv2d(1, 1, 1)), "cpu")
        assert [one.config.memory_format for one in with_images] == ["channels_last", None, "channels_last", None]

    def test_defaults_on_cuda_begin_with_tensorrt(self):
        found = default_backends(nn.Linear(2, 2), "cuda")
        assert [repr(one) for one in found[:2]] == ["TensorRTBackend()", "TensorRTBackend(use_dynamo=False)"]

    def test_strategies_that_time_all_take_more(self):
        names = [one.name for one in pl.MinLatencyStrategy().backends_for(nn.Linear(2, 2), "cpu")]
        assert names == ["inductor_jit", "inductor_aot", "onnxruntime", "eager"]
        on_cuda = [one.name for one in pl.MaxThroughputStrategy().backends_for(nn.Linear(2, 2), "cuda")]
        assert set(on_cuda) >= {"tensorrt", "torch_tensorrt_aot", "torch_tensorrt_jit", "onnxruntime", "inductor_aot"}
        assert [one.name for one in pl.MaxThroughputStrategy([EAGER]).backends_for(nn.Linear(2, 2), "cpu")] == ["eager"]


@pytest.mark.parametrize(
    ("ms", "is_taken"),
    [(10.0, False), (9.95, False), (9.8, True)],
    ids=["a tie", "below the threshold", "above it"],
)
@pytest.mark.parametrize("kind", [pl.FirstWinsStrategy, pl.MaxThroughputStrategy, pl.MinLatencyStrategy])
def test_a_gain_has_to_be_above_the_threshold(decided, kind, ms, is_taken):
    decision = decided(kind([backend("a", ms), EAGER]))
    assert decision.selected == ("eager" if not is_taken else f"Faster(label='a', ms={ms})")


def test_the_threshold_can_be_set(decided):
    assert decided(pl.MaxThroughputStrategy([backend("a", 9.95)], min_speedup_threshold_percent=0)).speedup > 1
    strict = pl.MaxThroughputStrategy([backend("a", 8)], min_speedup_threshold_percent=30)
    assert decided(strict).selected == "eager"


def test_noise_that_hides_a_gain_decides_for_the_plain_module(decided):
    noisy = decided(pl.MaxThroughputStrategy([backend("noisy", 9.8, noise=0.5)]))
    assert noisy.selected == "eager"
    interval = noisy.candidates[0].measurements[-1].comparison.interval
    assert interval.low < 1.01 < interval.high
    assert decided(pl.MaxThroughputStrategy([backend("clear", 5, noise=0.3)])).selected.startswith("Faster")


class TestValidation:
    def test_without_it_a_slower_one_is_taken_unmeasured(self, decided):
        decision = decided(pl.OneBackendStrategy(backend("a", 20)).enable_performance_validation(False))
        assert decision.selected == "Faster(label='a', ms=20.0)"
        assert decision.reason == "Faster(label='a', ms=20.0) is right; its speed was not asked for"
        assert decision.candidates[0].measurements == []

    def test_diagnostic_measures_but_does_not_demand(self, decided):
        decision = decided(pl.FirstWinsStrategy([backend("a", 20)]).enable_performance_validation("diagnostic"))
        assert decision.selected == "Faster(label='a', ms=20.0)"
        assert decision.speedup == pytest.approx(0.5)

    @pytest.mark.parametrize("mode", [False, "diagnostic"])
    def test_profiling_strategies_take_the_best_anyway(self, decided, mode):
        strategy = pl.MaxThroughputStrategy([backend("a", 30), backend("b", 20)]).enable_performance_validation(mode)
        assert decided(strategy).selected == "Faster(label='b', ms=20.0)"

    def test_correctness_is_checked_all_the_same(self, failed):
        strategy = pl.OneBackendStrategy(Zeros()).enable_performance_validation(False)
        assert "rejected" in failed(strategy)[0].message

    def test_correctness_can_be_left_out(self, decided):
        decision = decided(pl.OneBackendStrategy(Zeros()).enable_correctness_check(False))
        assert decision.selected == "Zeros()"
        assert decision.candidates[0].correctness is None

    def test_another_mode_is_an_error(self):
        with pytest.raises(InputError, match="expected True, False or 'diagnostic', got 'maybe'"):
            pl.FirstWinsStrategy().enable_performance_validation("maybe")


class TestMaxThroughput:
    def test_the_highest_throughput_at_any_size_is_taken(self, decided, clock):
        # At one sample 'flat' takes 8 ms and 'steep' 4; at four 8 and 10: 500 samples a second against 400.
        flat, steep = backend("flat", 8), backend("steep", 2, sample_ms=2)
        toy = toys.Toy(clock, ms=10, sample_ms=2)
        decision = decided(pl.MaxThroughputStrategy([steep, flat]), toy, batch_sizes=[1, 2, 4])
        assert (decision.selected, decision.batch_size) == ("Faster(label='flat', ms=8.0)", 4)
        assert "500 samples a second at batch size 4, 2.25 times the plain module" in decision.reason
        assert verdicts(decision) == {"steep": "kept", "flat": "kept"}
        assert [m.batch_size for m in decision.candidates[0].measurements] == [1, 2, 4]

    def test_what_is_faster_at_another_size_than_its_best_does_not_count(self, decided, clock):
        # 5 ms against 10 for one sample, and no gain for two, where its throughput is highest.
        decision = decided(
            pl.MaxThroughputStrategy([backend("a", 0.1, sample_ms=6)]), toys.Toy(clock, ms=8, sample_ms=2)
        )
        assert decision.selected == "eager"
        assert "no faster at batch size" in decision.reason

    def test_nothing_faster_leaves_the_plain_module(self, decided):
        decision = decided(pl.MaxThroughputStrategy([backend("a", 10), EAGER, Missing()]))
        assert decision.selected == "eager"
        assert decision.reason.startswith("nothing is faster than the plain module: Faster(label='a', ms=10.0)")
        assert "a library is not installed" in decision.reason

    def test_batch_sizes_can_be_given(self, decided):
        config = pl.ProfilingConfig(batch_sizes=[2, 1, 64])
        decision = decided(pl.MaxThroughputStrategy([backend("a", 5)], config))
        sizes = [measurement.batch_size for measurement in decision.candidates[0].measurements]
        assert sizes == [1, 2], "those that the graph has, in order"


class TestMinLatency:
    def test_the_lowest_latency_at_the_least_size_is_taken(self, decided, clock):
        flat, steep = backend("flat", 8), backend("steep", 2, sample_ms=2)
        toy = toys.Toy(clock, ms=10, sample_ms=2)
        decision = decided(pl.MinLatencyStrategy([flat, steep]), toy, batch_sizes=[1, 2, 4])
        assert (decision.selected, decision.batch_size) == ("Faster(label='steep', ms=2.0, sample_ms=2.0)", 1)
        assert decision.reason.endswith("is best: 4 ms a call, 3 times as fast as before")
        assert len(decision.candidates[0].measurements) == 1


class TestLatencyBudget:
    @pytest.fixture
    def toy(self, clock):
        return toys.Toy(clock, ms=10, sample_ms=5)

    def test_the_highest_throughput_within_the_budget_is_taken(self, decided, toy):
        # Within 10 ms 'steep' has two samples in 6 ms (333 a second), 'flat' four in 10 (400).
        flat, steep = backend("flat", 10), backend("steep", 2, sample_ms=2)
        decision = decided(pl.LatencyBudgetStrategy(10, [steep, flat]), toy, batch_sizes=[1, 2, 4])
        assert (decision.selected, decision.batch_size) == ("Faster(label='steep', ms=2.0, sample_ms=2.0)", 4)
        decision = decided(pl.LatencyBudgetStrategy(9, [steep, flat]), toy, batch_sizes=[1, 2, 4])
        assert (decision.selected, decision.batch_size) == ("Faster(label='steep', ms=2.0, sample_ms=2.0)", 2)
        assert "at best 10 ms, above the budget of 9 ms" in decision.candidates[1].reason
        assert decision.strategy_description.endswith("within the latency budget of 9 ms")

    def test_sizes_beyond_the_budget_are_not_tried(self, decided, toy):
        decision = decided(pl.LatencyBudgetStrategy(5, [backend("a", 2, sample_ms=2)]), toy, batch_sizes=[1, 2, 4])
        assert [m.batch_size for m in decision.candidates[0].measurements] == [1, 2]

    def test_the_plain_module_stays_where_only_it_keeps_to_the_budget(self, decided, toy):
        decision = decided(pl.LatencyBudgetStrategy(16, [backend("a", 20)]), toy)
        assert decision.selected == "eager"
        assert "above the budget of 16 ms" in decision.reason

    def test_nothing_that_keeps_to_it_is_an_error(self, failed, toy):
        error, candidates = failed(pl.LatencyBudgetStrategy(1, [backend("a", 5), Zeros()]), toy)
        assert "nothing keeps to 1 ms, the plain module neither (15 ms at best)" in error.message
        assert [candidate.status for candidate in candidates] == ["rejected", "rejected"]

    @pytest.mark.parametrize("budget", [0, -1, True, "10", float("nan")])
    def test_a_budget_is_above_zero(self, budget):
        with pytest.raises(InputError, match="latency_budget_ms: expected milliseconds above 0"):
            pl.LatencyBudgetStrategy(budget)


class Erratic:
    """Makes every call take another time."""

    def __init__(self, clock):
        self.clock, self.count = clock, 0

    def pass_ms(self, ms):
        self.count += 1
        self.clock.pass_ms(ms / self.count**2)


class TestMaxBatch:
    @pytest.fixture
    def searched(self, clock, decided):
        """Tune with a search; returns the sizes the graph has then."""

        def run(toy, **options):
            wrapper = pl.Module(toy, strategy=pl.FirstWinsStrategy([backend("a", 0.5)]).enable_find_max_batch_size())
            report = pl.tune(wrapper, toys.samples(4), clock=clock, **options)
            assert wrapper.state == "tuned"
            return wrapper, report.modules[0].graphs[0]

        return run

    def test_it_stops_where_throughput_saturates(self, searched, clock):
        # 8 ms and 1 ms a sample: n / (8 + n) gains more than 5 % up to 128, and is tried at three sizes more.
        wrapper, graph = searched(toys.Toy(clock, ms=8, sample_ms=1))
        most = wrapper.graph_specs[0].get_max_batch_size()
        assert most == 1024
        assert graph.inputs[0].max_shape == (most, 4)
        assert graph.decision.batch_size == most
        toys.calls.clear()
        wrapper(torch.ones(most, 4))
        assert toys.calls["a"] == 1

    def test_a_size_that_is_no_power_of_two_is_rounded_up_for_the_search(self, searched, clock):
        class Limited(toys.Toy):
            def forward(self, x):
                assert len(x) in (1, 3) or len(x) <= 8
                return super().forward(x)

        wrapper, _ = searched(Limited(clock), batch_sizes=[1, 3])
        assert wrapper.graph_specs[0].get_max_batch_size() == 8

    def test_it_stops_where_memory_runs_out(self, searched, clock):
        class Limited(toys.Toy):
            def forward(self, x):
                if len(x) > 16:
                    raise RuntimeError("[enforce fail] not enough memory")
                return super().forward(x)

        wrapper, _ = searched(Limited(clock))
        assert wrapper.graph_specs[0].get_max_batch_size() == 16

    def test_no_larger_size_at_all_keeps_that_of_the_recording(self, searched, clock):
        class Limited(toys.Toy):
            def forward(self, x):
                if len(x) > 3:
                    raise RuntimeError("too many")
                return super().forward(x)

        wrapper, _ = searched(Limited(clock), batch_sizes=[1, 3])
        assert wrapper.graph_specs[0].get_max_batch_size() == 3

    def test_a_module_without_a_batch_axis_is_not_searched(self, clock):
        toy, sizes = toys.Toy(clock), []

        def function(x):
            sizes.append(wrapper(x[:1]).shape)

        wrapper = pl.Module(toy, strategy=pl.OneBackendStrategy(backend("a", 5)).enable_find_max_batch_size())
        before = clock.now_ns
        report = pl.tune(function, toys.samples(), clock=clock)
        assert report.modules[0].state == "tuned"
        assert wrapper.graph_specs[0].get_max_batch_size() == 1
        num_runs = (clock.now_ns - before) / 1e7
        assert num_runs < 60, "some for recording, checking and timing, none for a search"

    def test_a_stated_size_ends_the_search(self, clock):
        toy, sizes = toys.Toy(clock, ms=8, sample_ms=1), set()
        toy.register_forward_pre_hook(lambda _, args: sizes.add(len(args[0])))

        class Pair(torch.nn.Module):
            """One input has stated sizes, the other one those that were seen."""

            def __init__(self):
                super().__init__()
                self.toy = toy

            def forward(self, x, y):
                return self.toy(x) + y

        strategy = pl.OneBackendStrategy(pl.backend.TorchEagerBackend()).enable_find_max_batch_size()
        shapes = {"x": (pl.BatchDim("batch", 1, 11), 4)}
        wrapper = pl.Module(Pair().eval(), strategy=strategy, dynamic_shapes=shapes)
        pl.tune(lambda x: wrapper(x, x), toys.samples(4), clock=clock)
        assert max(sizes) == 11
        assert wrapper.graph_specs[0].get_max_batch_size() == 11
        assert wrapper.graph_specs[0].effective_input_shapes()["y"][2] == (11, 4)

    def test_it_is_off_by_default(self, decided, clock):
        wrapper = pl.Module(toys.Toy(clock), strategy=pl.MaxThroughputStrategy([backend("a", 5)]))
        pl.tune(wrapper, toys.samples(), clock=clock)
        assert wrapper.graph_specs[0].get_max_batch_size() == 2

    def test_what_was_found_without_a_search_is_not_used_for_larger_sizes(self, clock):
        toy = toys.Toy(clock, ms=1, sample_ms=2)
        plain = pl.OneBackendStrategy(backend("a", 5)).enable_performance_validation(False)
        pl.tune(pl.Module(toy, strategy=plain), toys.samples(), clock=clock)
        searching = plain.clone().enable_find_max_batch_size()
        report = pl.tune(pl.Module(toy, strategy=searching), toys.samples(), clock=clock)
        assert not report.modules[0].graphs[0].decision.candidates[0].is_reused

    def test_a_search_is_not_made_twice(self, clock):
        strategy = pl.OneBackendStrategy(backend("a", 5)).enable_performance_validation(False)
        wrapper = pl.Module(toys.Toy(clock, ms=1, sample_ms=2), strategy=strategy.enable_find_max_batch_size())
        first = pl.tune(wrapper, toys.samples(), clock=clock).modules[0].graphs[0]
        wrapper.module.clock = Erratic(clock)
        report = pl.tune(wrapper, toys.samples(), clock=clock)
        assert report.modules[0].graphs[0].inputs == first.inputs
        assert report.num_builds == 0

    def test_nothing_is_searched_where_nothing_varies(self):
        class Fixed:
            class graph:
                has_batch_axis = False

        assert find_max_batch_size(Fixed, pl.AllSamplesProfilingStopStrategy()) is None


def test_throughput_that_is_saturated_ends_the_sizes(decided, clock):
    toy = toys.Toy(clock, ms=1, sample_ms=10)
    strategy = pl.MaxThroughputStrategy([backend("a", 0.1, sample_ms=5)])
    decision = decided(strategy, toy, batch_sizes=[1, 2, 3, 4, 5, 6, 7, 8], dataset=toys.samples(8))
    assert [m.batch_size for m in decision.candidates[0].measurements] == [1, 2, 3, 4]
    config = pl.ProfilingConfig(profiling_stop_strategy=pl.AllSamplesProfilingStopStrategy())
    strategy = strategy.clone().set_profiling_config(config)
    decision = decided(strategy, toy, batch_sizes=[1, 2, 3, 4, 5, 6, 7, 8], dataset=toys.samples(8))
    assert len(decision.candidates[0].measurements) == 8


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: pl.FirstWinsStrategy([]), "backends: give at least one, or None for the defaults"),
        (lambda: pl.FirstWinsStrategy([toys.Faster]), r"backends: .* is no backend; give objects such as"),
        (lambda: pl.OneBackendStrategy("inductor"), "backends: 'inductor' is no backend"),
        (
            lambda: pl.MaxThroughputStrategy(min_speedup_threshold_percent=-1),
            "min_speedup_threshold_percent: expected a percentage from 0 up, got -1",
        ),
        (
            lambda: pl.MaxThroughputStrategy(min_speedup_threshold_percent="1"),
            "min_speedup_threshold_percent: expected a percentage from 0 up, got '1'",
        ),
    ],
)
def test_wrong_options_are_named(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_a_clone_can_be_changed_alone():
    strategy = pl.FirstWinsStrategy([EAGER])
    changed = strategy.clone().enable_correctness_check(False)
    assert type(changed) is pl.FirstWinsStrategy
    assert (strategy._checks_correctness, changed._checks_correctness) == (True, False)


def test_a_machine_that_slows_down_between_candidates_decides_nothing():
    from types import SimpleNamespace

    from perfladder.stats import Samples, compare_samples
    from perfladder.tuning.records import Measurement
    from perfladder.tuning.strategies import _typical_ms

    def measured(baseline_ms, candidate_ms):
        sides = [[ms + place * 0.001 for place in range(20)] for ms in (baseline_ms, candidate_ms)]
        comparison = compare_samples(*(Samples(launches=[side]) for side in sides), interleaved=True)
        measurement = Measurement(
            batch_size=1,
            baseline_ms=sides[0],
            candidate_ms=sides[1],
            baseline_p50_ms=baseline_ms,
            candidate_p50_ms=candidate_ms,
            throughput_items_per_s=1000 / candidate_ms,
            baseline_throughput_items_per_s=1000 / baseline_ms,
            comparison=comparison,
        )
        return SimpleNamespace(record=SimpleNamespace(measurements=[measurement])), measurement

    # The second one is twice as fast as the plain module, timed while the machine was half as fast.
    (first, one), (second, other) = measured(10, 6), measured(20, 10)
    typical_ms = _typical_ms([first, second])
    for strategy in (pl.MaxThroughputStrategy(), pl.MinLatencyStrategy(), pl.LatencyBudgetStrategy(50)):
        assert strategy._score(other, typical_ms) > strategy._score(one, typical_ms)
    assert typical_ms(one) == pytest.approx(15 * 0.6, rel=0.01)
    assert typical_ms(other) == pytest.approx(7.5, rel=0.01)
