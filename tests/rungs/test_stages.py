import asyncio
import os
import threading

import pytest
import torch
from torch import nn

from perfladder import instrument
from perfladder._torch_private import CompileCounters
from perfladder.environment import DeviceProcess, DeviceSnapshot, Snapshot
from perfladder.errors import InputError, NotPossibleHereError, WorkloadError
from perfladder.marks import stage
from perfladder.rungs import stages
from perfladder.rungs.stages import StagesRequest, StagesResult, measure
from perfladder.timing import machine, runs
from perfladder.timing.compilation import compilations_of, compile_warnings
from perfladder.timing.runs import number_of_pairs, overhead_of
from perfladder.timing.timer import Call, RunTiming, outside_ms


class Step(nn.Module):
    """Takes a set time on the injected clock."""

    def __init__(self, clock, ms, inner=None):
        super().__init__()
        self.clock, self.ms, self.inner = clock, ms, inner

    def forward(self):
        self.clock.pass_ms(self.ms)
        if self.inner is not None:
            self.inner()


class Pipe:
    def __init__(self, clock):
        self.clock = clock
        self.inner = Step(clock, 4)
        self.unet = Step(clock, 6, self.inner)
        self.vae = Step(clock, 2)

    def __call__(self, steps=2, **_):
        self.clock.pass_ms(3)
        for _ in range(steps):
            self.unet()
        self.vae()

    def chunks(self, gaps=(10, 20, 60)):
        for gap in gaps:
            self.clock.pass_ms(gap)
            yield torch.zeros(2)

    def whole(self):
        self.vae()


@pytest.fixture
def pipe(clock):
    return Pipe(clock)


@pytest.fixture(autouse=True)
def _own_marks(monkeypatch):
    """Marks that a test of this process met before are none of this test's."""
    monkeypatch.setattr(instrument._MARKS, "sites", {})


@pytest.fixture(autouse=True)
def _quiet_machine(monkeypatch):
    """Whether this machine is busy is no matter of these tests."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def measured(wrap, clock):
    def run(obj, **fields) -> StagesResult:
        return measure(wrap(obj, **{"measured_runs": 3, **fields}), StagesRequest(), clock=clock)

    return run


def by_name(result):
    return {stage.name: stage for stage in result.default.stages}


# Attribution


def test_self_time_is_without_the_stages_inside(measured, pipe):
    found = by_name(measured(pipe))
    assert found["unet"].total_ms.launches == [[20.0] * 3]
    assert found["unet"].self_ms.launches == [[12.0] * 3]
    assert found["inner"].self_ms.launches == [[8.0] * 3]
    assert found["vae"].self_ms.launches == [[2.0] * 3]
    assert found["unet"].calls_per_run == 2
    assert found["unet"].call_ms.p50 == 10.0


def test_shares_and_what_is_outside_add_up_to_one(measured, pipe):
    default = measured(pipe).default
    assert default.wall_ms.launches == [[25.0] * 3]
    assert default.outside_ms.launches == [[3.0] * 3]
    assert sum(stage.share for stage in default.stages) + default.outside_share == pytest.approx(1)
    assert [stage.name for stage in default.stages] == ["unet", "inner", "vae"], "the largest share comes first"
    assert default.stages[0].share_interval.low == pytest.approx(12 / 25)


def test_first_call_tells_which_stage_was_cold(measured, pipe, clock):
    pipe.inner.is_warm = False

    def first_is_slow(module, args):
        clock.pass_ms(0 if module.is_warm else 100)
        module.is_warm = True

    pipe.inner.register_forward_pre_hook(first_is_slow)
    result = measured(pipe)
    assert result.first_call_ms == 125
    assert result.first_call_stages_ms == {"unet": 120, "inner": 8, "vae": 2}
    assert by_name(result)["unet"].total_ms.launches == [[20.0] * 3]


def test_first_call_of_a_compiled_module_is_not_observed(measured, pipe):
    pipe.vae = torch.compile(pipe.vae, backend="eager")
    assert measured(pipe).first_call_stages_ms == {}


def test_the_largest_share_dominates(measured, pipe):
    assert measured(pipe).dominating == "unet"


def test_recursive_stage_counts_its_outermost_call_towards_the_total(measured, clock):
    class Tree(nn.Module):
        def forward(self, depth=2):
            clock.pass_ms(1)
            if depth:
                self(depth - 1)

    tree = Tree()
    (stage,) = measured(tree).default.stages
    assert stage.calls_per_run == 3
    assert stage.total_ms.launches == [[3.0] * 3]
    assert stage.self_ms.launches == [[3.0] * 3]


def test_stages_that_run_at_once_cover_their_time_once(measured, clock):
    class Parallel:
        def __init__(self):
            self.left, self.right = Step(clock, 0), Step(clock, 0)
            self.barrier = threading.Barrier(2, timeout=10)
            for step in (self.left, self.right):
                step.forward = self.work

        def work(self):
            # Both are inside at once; one lets time pass for both.
            if self.barrier.wait() == 0:
                clock.pass_ms(10)
            self.barrier.wait()

        def __call__(self):
            clock.pass_ms(5)
            threads = [threading.Thread(target=step) for step in (self.left, self.right)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    default = measured(Parallel()).default
    assert default.wall_ms.launches == [[15.0] * 3]
    assert default.outside_ms.launches == [[5.0] * 3]
    assert [stage.total_ms.launches for stage in default.stages] == [[[10.0] * 3]] * 2


def test_a_call_that_goes_on_after_the_run_covers_only_the_run():
    from perfladder.instrument import Site

    site = Site("late", object())
    call = Call(site, start_ns=2_000_000, is_item=False, parent=None, end_ns=50_000_000)
    timing = RunTiming(start_ns=0, end_ns=10_000_000, calls=[call])
    assert outside_ms(timing, on_device=False) == 2.0


def test_alias_is_listed_with_its_stage(measured, pipe):
    pipe.decoder = pipe.vae
    assert by_name(measured(pipe, stages=["vae", "decoder", "unet"]))["vae"].aliases == ["decoder"]


def test_the_workloads_own_call_is_no_stage_of_its_own(measured, pipe):
    result = measured(pipe, call="whole")
    assert set(by_name(result)) == {"vae"}


def test_the_workloads_own_call_is_timed_when_it_is_asked_for(measured, pipe):
    result = measured(pipe, call="whole", stages=["whole", "vae"])
    assert by_name(result)["whole"].calls_per_run == 1
    assert by_name(result)["whole"].total_ms.launches == [[2.0] * 3]


# Which stages


def test_named_stages_are_the_only_ones(measured, pipe):
    assert set(by_name(measured(pipe, stages=["vae"]))) == {"vae"}


def test_stage_that_is_never_called_is_a_warning(measured, pipe):
    pipe.safety = Step(pipe.clock, 1)
    result = measured(pipe, stages=["vae", "safety"])
    assert [(w.code, "'safety'" in w.message) for w in result.warnings] == [("STAGE_NEVER_CALLED", True)]
    assert set(by_name(result)) == {"vae"}


def test_stage_that_does_not_exist_is_wrong_input(measured, pipe):
    with pytest.raises(InputError, match=r"stages: the target .* has no 'unett'. Did you mean 'unet'"):
        measured(pipe, stages=["unett"])


def test_site_that_is_called_all_the_time_is_left_out(measured, pipe):
    result = measured(pipe, inputs={"steps": 501})
    assert "unet" not in by_name(result)
    assert {w.code for w in result.warnings} == {"STAGE_CALLED_TOO_OFTEN"}
    assert "vae" in by_name(result)


def test_method_that_cannot_be_observed_is_a_warning(measured, pipe):
    class Slotted:
        __slots__ = ()

        def step(self):
            return 1

    pipe.scheduler = Slotted()
    warnings = measured(pipe, stages=["vae", "scheduler.step"]).warnings
    assert {w.code for w in warnings} == {"SITE_NOT_OBSERVABLE", "STAGE_NEVER_CALLED"}


def test_hook_that_is_lost_in_any_run_is_a_warning(measured, pipe):
    runs = iter(range(100))

    class Remover(Step):
        def forward(self):
            super().forward()
            # The cold run and the one that chooses come first; then bare and measured runs take turns.
            if next(runs) == 3:
                pipe.unet._forward_hooks.clear()

    pipe.vae = Remover(pipe.clock, 2)
    assert [w.code for w in measured(pipe, stages=["unet"]).warnings] == ["HOOK_LOST"]


def test_a_target_without_stages_is_all_outside(measured, clock):
    result = measured(lambda: clock.pass_ms(1))
    assert result.default.stages == []
    assert result.dominating is None
    assert result.default.outside_share == 1.0


def test_error_of_the_workload_ends_the_rung_and_leaves_no_hook(measured, pipe):
    def fail():
        raise ValueError("no")

    pipe.vae.forward = fail
    with pytest.raises(WorkloadError, match="no"):
        measured(pipe)
    assert not pipe.unet._forward_hooks


# Marks in the user's own code


class Marked(Pipe):
    def __call__(self, steps=2, **_):
        with stage("loop"):
            self.clock.pass_ms(1)
            for _ in range(steps):
                self.unet()
        with stage("vae"):
            self.clock.pass_ms(5)
            self.vae()


def test_marks_are_stages_of_their_own(measured, clock):
    found = by_name(measured(Marked(clock)))
    assert set(found) == {"loop", "unet", "inner", "vae"}
    assert found["loop"].self_ms.launches == [[1.0] * 3]
    assert found["loop"].total_ms.launches == [[21.0] * 3]
    assert found["vae"].owner_type == "perfladder.stage", "the user's own word stands before a part of that name"
    assert found["vae"].self_ms.launches == [[7.0] * 3]


def test_marks_can_be_named_as_paths_can(measured, clock):
    assert set(by_name(measured(Marked(clock), stages=["loop", "unet"]))) == {"loop", "unet"}


def test_name_that_is_neither_path_nor_mark_is_wrong_input(measured, clock):
    with pytest.raises(InputError, match=r"has no 'lop'.*No mark of that name was met in a run either"):
        measured(Marked(clock), stages=["lop"])


def test_marks_of_tasks_that_take_turns_overlap(measured, clock):
    class Server:
        async def request(self, name):
            with stage(name):
                clock.pass_ms(1)
                await asyncio.sleep(0)
                clock.pass_ms(1)

        async def serve(self):
            await asyncio.gather(self.request("left"), self.request("right"))

    default = measured(Server(), call="serve", stages=["left", "right"]).default
    assert default.wall_ms.launches == [[4.0] * 3]
    assert {s.name: s.total_ms.launches for s in default.stages} == {"left": [[3.0] * 3], "right": [[3.0] * 3]}
    assert default.overlap_ms is not None
    assert default.overlap_ms.launches == [[2.0] * 3]
    assert default.outside_share == 0


# Scenarios, warm-up, overhead


def test_each_scenario_is_measured_and_reported_apart(measured, pipe):
    result = measured(pipe, scenarios={"long": {"steps": 4}, "short": {"steps": 1}})
    assert [s.name for s in result.scenarios] == ["default", "long", "short"]
    assert [s.wall_ms.values[0] for s in result.scenarios] == [25.0, 45.0, 15.0]


def test_cold_call_and_warmup_are_no_samples(measured, clock):
    durations = iter([100, 50, 40])

    def call():
        clock.pass_ms(next(durations, 10))

    result = measured(call, warmup_runs=2)
    assert result.first_call_ms == 100.0
    assert result.warmup_ms == [50.0, 40.0]
    assert result.default.wall_ms.values == [10.0] * 3


def test_observing_costs_nothing_on_a_clock_that_stands_still(measured, pipe):
    result = measured(pipe)
    assert result.overhead_ratio == 1.0
    assert result.overhead_ratio_interval is not None
    assert result.overhead_ratio_interval.low == 1.0


@pytest.mark.parametrize(("run_ms", "pairs"), [(0, 10), (10, 10), (4000, 5), (60_000, 3)])
def test_long_runs_have_fewer_bare_ones_between_them(run_ms, pairs):
    assert number_of_pairs(run_ms) == pairs


def test_bare_and_observed_runs_change_their_order(measured, clock):
    order = []

    def note(self):
        order.append("observed" if self._forward_hooks else "bare")
        clock.pass_ms(1)

    class Noting(nn.Module):
        forward = note

    class Only:
        def __init__(self):
            self.part = Noting()

        def __call__(self):
            self.part()

    measured(Only(), measured_runs=4)
    assert order == ["observed", "observed", *["bare", "observed", "observed", "bare"] * 2, "observed"]


def test_overhead_is_the_ratio_of_interleaved_pairs():
    ratio, interval = overhead_of([(11.0, 10.0), (11.0, 10.0), (11.1, 10.1)] * 4)
    assert ratio == pytest.approx(1.1, rel=1e-3)
    assert interval.low > 1.05
    assert overhead_of([(11.0, 10.0)] * 3)[0] == pytest.approx(1.1)
    assert overhead_of([]) == (None, None)
    assert overhead_of([(0.0, 0.0)]) == (None, None)


def test_measured_runs_that_were_warmup_are_measured_anew(measured, clock):
    durations = iter([90, 60, 1, *[30] * 4])

    def call():
        clock.pass_ms(next(durations, 10))

    result = measured(call, warmup_runs=1, measured_runs=12)
    # The first measured runs took 30, in turn with bare ones.
    assert result.warmup_ms == [60.0, 30.0, 30.0]
    assert result.default.wall_ms.values == [10.0] * 12
    assert result.default.steadiness is not None
    assert result.default.steadiness.warmup is not None
    assert result.default.steadiness.warmup.is_steady
    assert result.warnings == []


def test_drift_of_the_measured_runs_is_flagged(measured, clock):
    durations = iter([10.0 + 0.2 * n for n in range(100)])
    result = measured(lambda: clock.pass_ms(next(durations)), measured_runs=20, warmup_limit=0)
    assert "SAMPLES_DRIFT" in {w.code for w in result.warnings}
    assert result.default.steadiness is not None
    assert result.default.steadiness.drift.is_drifting


def test_what_was_compiled_is_counted_for_each_part():
    counters = [
        CompileCounters(*values)
        for values in ((0, 0, 0, 0, 0.0), (2, 1, 0, 0, 3.5), (2, 1, 0, 0, 3.5), (3, 1, 1, 1, 4.0))
    ]
    found = compilations_of(counters)
    assert (found["first_call"].graphs, found["first_call"].graph_breaks, found["first_call"].seconds) == (2, 1, 3.5)
    assert found["warmup"].graphs == 0
    assert (found["measured"].graphs, found["measured"].recompiles) == (1, 1)
    assert [w.code for w in compile_warnings(found)] == ["COMPILED_WHILE_MEASURED", "RECOMPILE_LIMIT"]
    assert compilations_of([counters[0]] * 4) == {}
    assert compile_warnings({}) == []


def test_compiled_module_is_counted_in_the_first_call(measured, clock):
    class Compiled:
        def __init__(self):
            self.part = torch.compile(nn.Linear(2, 2), backend="eager")

        def __call__(self):
            clock.pass_ms(1)
            return self.part(torch.ones(1, 2))

    torch._dynamo.reset()
    loaded = Compiled()
    result = measured(loaded)
    assert result.compilations["first_call"].graphs == 1
    assert result.compilations["measured"].graphs == 0


def test_busy_machine_is_refused_when_an_idle_one_is_demanded(measured, clock, monkeypatch):
    monkeypatch.setattr(stages, "take_snapshot", lambda: snapshot(load_average_1m=3.0))
    with pytest.raises(NotPossibleHereError, match="require_idle_device"):
        measured(lambda: clock.pass_ms(1), require_idle_device=True)


def test_memory_that_grows_from_run_to_run_is_a_warning(measured, clock, monkeypatch):
    in_use = iter(range(0, 1 << 30, 2 << 20))
    monkeypatch.setattr(runs, "resident_bytes", lambda: next(in_use))
    result = measured(lambda: clock.pass_ms(1), measured_runs=10)
    assert [w.code for w in result.warnings] == ["MEMORY_GROWS"]
    assert result.host_memory_growth is not None
    assert result.host_memory_growth.bytes_per_run == 2 << 20


# Streams and cadence


MEDIA = {"frames_per_chunk": 4, "fps": 100, "margin_ms": 5}


def test_chunks_are_timed_from_the_one_before(measured, pipe):
    cadence = measured(pipe, call="chunks", metric="cadence_p95", media=MEDIA).default.cadence
    assert cadence is not None
    assert cadence.chunks_per_run == 3
    assert cadence.first_chunk_ms.launches == [[10.0] * 3]
    assert (cadence.chunk_ms.n, cadence.chunk_ms.min, cadence.chunk_ms.p50, cadence.chunk_ms.max) == (9, 10, 20, 60)


def test_chunk_is_late_when_it_takes_longer_than_it_plays_less_the_margin(measured, pipe):
    result = measured(
        pipe, call="chunks", metric="cadence_p95", media=MEDIA, inputs={"gaps": [35, 36, 10]}, measured_runs=1
    )
    cadence = result.default.cadence
    assert cadence is not None
    assert cadence.media_ms_per_chunk == 40.0
    assert cadence.num_late_chunks == 1, "35 ms is just in time: 40 ms of media less 5 ms"
    assert cadence.headroom_ms == pytest.approx(35 - cadence.chunk_ms.p95)
    assert result.metric is not None
    assert (result.metric.value, result.metric.unit) == (cadence.chunk_ms.p95, "ms")
    assert result.warnings == []


def test_stream_without_media_has_arrivals_but_no_late_chunks(measured, pipe):
    cadence = measured(pipe, call="chunks").default.cadence
    assert cadence is not None
    assert (cadence.num_late_chunks, cadence.headroom_ms) == (None, None)


def test_call_that_does_not_stream_is_one_chunk_and_says_so(measured, pipe):
    result = measured(pipe, metric="cadence_p95", media=MEDIA)
    assert [w.code for w in result.warnings] == ["CADENCE_OF_CALLS"]
    assert result.metric is not None
    assert result.metric.value == 25.0
    assert result.default.cadence is not None
    assert result.default.cadence.num_late_chunks == 0


def test_streaming_stage_is_timed_by_item(measured, pipe):
    class Outer:
        def __init__(self):
            self.source = Source()

        def __call__(self):
            for _ in self.source.decode():
                pipe.clock.pass_ms(1)

    class Source:
        def decode(self):
            yield from pipe.chunks()

    (stage,) = measured(Outer()).default.stages
    assert stage.name == "source.decode"
    assert (stage.calls_per_run, stage.items_per_run) == (1, 4)
    assert stage.total_ms.launches == [[90.0] * 3]
    assert stage.call_ms.max == 60.0
    assert stage.call_ms.n == 12, "the call that only made the generator is not among them"


# The metric


@pytest.mark.parametrize(
    ("metric", "value", "unit"),
    [("latency_p50", 20.0, "ms"), ("latency_p95", 29.0, "ms"), ("throughput", 200.0, "items/s")],
)
def test_metric_of_each_kind(measured, clock, metric, value, unit):
    # The cold run, the one that chooses, then bare and measured runs as AB BA AB, and the one for memory.
    durations = iter([1, 1, 1, 10, 20, 1, 1, 30, 1])
    result = measured(lambda: clock.pass_ms(next(durations)), metric=metric, items_per_call=4)
    assert result.metric is not None
    assert result.metric.value == pytest.approx(value)
    assert result.metric.unit == unit
    assert result.metric.interval is not None
    assert result.metric.interval.low <= value <= result.metric.interval.high


def test_peak_memory_on_a_cpu_is_that_of_the_process(measured, clock):
    result = measured(lambda: clock.pass_ms(1), metric="peak_memory")
    assert result.metric is not None
    assert result.metric.unit == "bytes"
    assert result.metric.value == result.peak_host_rss_bytes
    assert result.peak_device_allocated_bytes is None


def test_observed_output_is_described(measured, clock):
    def call():
        clock.pass_ms(1)
        return {"images": [torch.zeros(1, 3, 4, 4)]}

    observed = measured(call).observed
    assert observed is not None
    assert observed.output_type == "dict"
    assert observed.output_shapes == {"output.images.0": [1, 3, 4, 4]}


def test_result_survives_its_file(measured, pipe):
    result = measured(pipe, call="chunks", metric="cadence_p95", media=MEDIA)
    assert StagesResult.model_validate_json(result.model_dump_json()) == result


# The machine before the first run


def snapshot(**fields):
    return Snapshot(**{"load_average_1m": 0.1, "num_cpus": 4, "available_memory_bytes": 1 << 30, **fields})


def test_snapshot_is_taken_before_the_first_run(measured, clock, monkeypatch):
    order = []

    def take():
        order.append("snapshot")
        return snapshot()

    def call():
        clock.pass_ms(1)
        order.append("run")

    monkeypatch.setattr(stages, "take_snapshot", take)
    result = measured(call)
    assert order[:2] == ["snapshot", "run"]
    assert order[-2:] == ["snapshot", "run"], "the last one is before the run for memory"
    assert order.count("snapshot") == 2
    assert (result.snapshot_before, result.snapshot_after) == (snapshot(), snapshot())
    assert result.warnings == []


@pytest.mark.parametrize(("load", "codes"), [(2.0, []), (2.1, ["MACHINE_BUSY"])])
def test_load_above_half_of_the_cpus_is_a_warning(measured, clock, monkeypatch, load, codes):
    monkeypatch.setattr(stages, "take_snapshot", lambda: snapshot(load_average_1m=load))
    assert [w.code for w in measured(lambda: clock.pass_ms(1)).warnings] == codes


def test_other_processes_and_little_free_memory_are_warnings_of_that_device(monkeypatch):
    state = DeviceSnapshot(
        index=0,
        total_memory_bytes=80 << 30,
        free_memory_bytes=2 << 30,
        other_processes=[DeviceProcess(pid=71, name="python"), DeviceProcess(pid=99, name="Xorg")],
    )
    monkeypatch.setattr(machine, "snapshot_of", lambda snapshot, device: state)
    warnings = machine.snapshot_warnings(snapshot(devices=[state]), torch.device("cuda", 0))
    assert [w.code for w in warnings] == ["DEVICE_SHARED", "DEVICE_MEMORY_LOW"]
    assert "python (pid 71), Xorg (pid 99)" in warnings[0].message
    assert "2.0 GiB" in warnings[1].message


def test_a_device_that_is_free_gives_no_warning(monkeypatch):
    state = DeviceSnapshot(index=0, total_memory_bytes=80 << 30, free_memory_bytes=70 << 30)
    monkeypatch.setattr(machine, "snapshot_of", lambda snapshot, device: state)
    assert machine.snapshot_warnings(snapshot(devices=[state]), torch.device("cuda", 0)) == []
