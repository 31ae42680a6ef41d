import contextlib
from types import SimpleNamespace

import pytest

from perfladder.errors import WorkloadCrashError, WorkloadTimeoutError
from perfladder.findings.load import load_findings
from perfladder.ladder import climb
from perfladder.report import build_report, render_markdown, render_summary
from perfladder.rungs.base import RungContext
from perfladder.rungs.stages import StagesResult, measure, run
from perfladder.session import LocalSession
from perfladder.timing.cold_start import measure_cold
from perfladder.timing.concurrency import ConcurrencyLevel, measure_concurrency
from perfladder.timing.launches import merge_launches
from perfladder.workload import WorkloadFile


class Fresh(LocalSession):
    """A new process, acted out in this one; `fail` maps a measuring function to the errors of its next calls."""

    def __init__(self, loaded, fail):
        super().__init__(loaded)
        self.fail = fail

    def load(self):
        return SimpleNamespace(load_s={"import": 1.0, "build": 0.5})

    def call(self, measure, request, *, timeout_s):
        errors = self.fail.get(measure, [])
        if errors and (error := errors.pop(0)):
            raise error
        return super().call(measure, request, timeout_s=timeout_s)


@pytest.fixture
def climb_stages(wrap, tmp_path):
    """Run rung 1 on an object, with sessions acted out in this process; notes how each was opened."""
    opened: list[dict[str, str]] = []

    def go(obj, *, fail=None, has_fresh=True, **fields) -> StagesResult:
        loaded = wrap(obj, **{"measured_runs": 3, **fields})

        def open_fresh(variables):
            opened.append(dict(variables))
            return contextlib.nullcontext(Fresh(loaded, fail or {}))

        session = LocalSession(loaded)
        file = WorkloadFile(loaded.workload, tmp_path)
        fresh = open_fresh if has_fresh else None
        return run(RungContext(file, None, session, session, {}, tmp_path, open_fresh=fresh))  # type: ignore[arg-type]

    go.opened = opened  # type: ignore[attr-defined]
    return go


def codes(result):
    return [w.code for w in result.warnings if w.code not in ("MACHINE_BUSY", "WARMUP_NOT_OVER", "DRIFT", "BIMODAL")]


# Launches


def test_each_launch_has_its_own_list_of_samples(climb_stages):
    result = climb_stages(lambda: None, launches=3)
    assert [len(launch) for launch in result.default.wall_ms.launches] == [3, 3, 3]
    assert [len(launch) for launch in result.default.outside_ms.launches] == [3, 3, 3]
    assert climb_stages.opened == [{}, {}], "the broad session is the first launch"
    assert result.metric is not None
    assert result.metric.interval_basis == "runs of 3 processes together"


def test_launch_that_fails_costs_its_samples_only(climb_stages):
    fail = {measure: [WorkloadCrashError("gone")]}
    result = climb_stages(lambda: None, launches=3, fail=fail)
    assert len(result.default.wall_ms.launches) == 2
    assert "LAUNCH_FAILED" in codes(result)


def test_one_launch_opens_no_other_process(climb_stages):
    climb_stages(lambda: None)
    assert climb_stages.opened == []


def measured(wrap, clock, ms, **fields):
    """A result of two stages, of which one takes `ms` and the other 4."""
    from torch import nn

    class Step(nn.Module):
        def __init__(self, ms):
            super().__init__()
            self.ms = ms

        def forward(self):
            clock.pass_ms(self.ms)

    class Pipe:
        def __init__(self):
            self.first, self.second = Step(ms), Step(4)

        def __call__(self):
            self.first()
            self.second()

    from perfladder.rungs.stages import StagesRequest

    return measure(wrap(Pipe(), measured_runs=2, **fields), StagesRequest(), clock=clock)


def test_shares_of_joined_launches_are_made_anew(wrap, clock):
    merged = merge_launches([measured(wrap, clock, 6), measured(wrap, clock, 2)])
    first, second = sorted(merged.default.stages, key=lambda stage: stage.name)
    assert first.self_ms.launches == [[6, 6], [2, 2]]
    assert first.share == pytest.approx(16 / 32)
    assert second.share == pytest.approx(16 / 32)
    assert first.call_ms.n == 4
    assert merged.default.wall_ms.launches == [[10, 10], [6, 6]]


def test_joined_result_survives_its_file(wrap, clock):
    merged = merge_launches([measured(wrap, clock, 6), measured(wrap, clock, 2)])
    assert StagesResult.model_validate_json(merged.model_dump_json()) == merged


# Throughput


def test_every_scenario_has_its_throughput(climb_stages):
    result = climb_stages(
        lambda batch=1: None,
        scenarios={"large": {"batch": 8, "$items_per_call": 8}},
        sweep={"input": "batch", "values": [1, 2], "items": "value"},
    )
    assert [(row.scenario, row.items_per_call) for row in result.throughput] == [
        ("default", 1),
        ("large", 8),
        ("batch 1", 1),
        ("batch 2", 2),
    ]
    assert result.saturation is not None
    assert result.saturation.scenarios == ["batch 1", "batch 2"]


# Requests at once


def test_levels_are_measured_in_a_process_of_their_own(climb_stages):
    result = climb_stages(lambda: None, concurrency=[1, 2])
    assert [(level.concurrency, level.failure) for level in result.concurrency] == [(1, None), (2, None)]
    assert climb_stages.opened == [{}]


def test_level_that_crashes_is_a_level_without_numbers(climb_stages):
    fail = {measure_concurrency: [None, WorkloadCrashError("killed by SIGSEGV\nmore"), None]}
    result = climb_stages(lambda: None, concurrency=[1, 2, 4], fail=fail)
    assert result.status == "done"
    assert [bool(level.failure) for level in result.concurrency] == [False, True, False]
    assert "CONCURRENCY_NOT_MEASURED" in codes(result)


def test_after_a_level_that_hangs_no_higher_one_is_tried(climb_stages):
    fail = {measure_concurrency: [None, WorkloadTimeoutError("hangs")]}
    result = climb_stages(lambda: None, concurrency=[1, 2, 4], fail=fail)
    assert [level.failure for level in result.concurrency] == [None, "hangs", "not tried"]


def test_without_further_processes_levels_run_where_the_target_is(climb_stages):
    result = climb_stages(lambda: None, concurrency=[2], has_fresh=False)
    assert result.concurrency[0].num_requests >= 6


# Cold start


def test_cold_start_is_the_metric(climb_stages):
    result = climb_stages(lambda: None, metric="cold_start")
    assert result.cold_start is not None
    assert len(result.cold_start.launches) == len(climb_stages.opened) == 3
    assert {set(variables) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"} for variables in climb_stages.opened} == {
        True
    }
    assert result.metric is not None
    assert (result.metric.name, result.metric.unit) == ("cold_start", "ms")
    assert result.metric.interval_basis == "3 process launches"
    assert result.metric.value > 1500, "1 s of import and half a second of build"
    assert len(result.default.wall_ms.launches) == 1


def test_cold_start_that_never_succeeds_costs_the_metric_only(climb_stages):
    fail = {measure_cold: [WorkloadCrashError("gone")] * 3}
    result = climb_stages(lambda: None, metric="cold_start", fail=fail)
    assert result.status == "done"
    assert (result.metric, result.cold_start) == (None, None)
    assert codes(result).count("LAUNCH_FAILED") == 3


# Findings


def level(concurrency, items_per_s, **fields):
    return ConcurrencyLevel(concurrency=concurrency, mode="threads", num_requests=50, items_per_s=items_per_s, **fields)


def found(*levels):
    return {f.kind: f for f in load_findings(StagesResult(concurrency=list(levels)))}


@pytest.mark.parametrize(("cores", "who"), [(0.2, "waits"), (1.0, "interpreter lock"), (1.9, "its operators use")])
def test_requests_that_wait_for_one_another_are_found(cores, who):
    kinds = found(level(1, 100.0, cpu_cores_used=cores), level(2, 104.0), level(4, 98.0))
    assert set(kinds) == {"concurrency_serialized"}
    assert who in kinds["concurrency_serialized"].claim
    assert "2 give 1.04 times that of 1" in kinds["concurrency_serialized"].claim


def test_requests_that_scale_are_no_finding():
    assert found(level(1, 100.0), level(2, 190.0)) == {}
    assert found(level(1, 100.0)) == {}


def test_errors_under_concurrency_are_found():
    kinds = found(level(1, 100.0), level(2, 80.0, num_errors=9, errors={"RuntimeError: busy": 9}))
    assert set(kinds) == {"concurrency_fails"}
    assert "9 of 50 raised. The commonest: RuntimeError: busy" in kinds["concurrency_fails"].claim


# The whole, with real processes


@pytest.mark.slow
def test_load_of_a_real_target(tmp_path, write_target):
    source = """
        import threading, time

        class Pipe:
            def __init__(self):
                self.lock = threading.Lock()

            def __call__(self, batch=1):
                with self.lock:
                    time.sleep(0.01 + 0.001 * batch)

        def build():
            return Pipe()
        """
    file = write_target(
        tmp_path,
        source,
        sweep={"input": "batch", "values": [1, 2], "items": "value"},
        concurrency=[1, 4],
        launches=2,
        measured_runs=3,
    )
    outcome = climb(file, runs_dir=tmp_path / "runs", until="stages")
    assert outcome.status == "done"
    assert {"throughput_grows", "concurrency_serialized"} <= {finding.kind for finding in outcome.findings}
    report = build_report(next((tmp_path / "runs").glob("*/*")))
    text = render_markdown(report)
    for heading in ("## Throughput", "## Requests at once"):
        assert heading in text
    assert "| 4 |" in render_summary(report)
    assert report.load is not None
    assert "launches log" in report.artifacts


@pytest.mark.slow
def test_cold_start_of_a_real_target(tmp_path, write_target):
    source = """
        import time

        class Pipe:
            is_first = True

            def __call__(self):
                if self.is_first:
                    time.sleep(0.2)
                self.is_first = False
                yield 1
                yield 2

        def build():
            time.sleep(0.1)
            return Pipe()
        """
    file = write_target(tmp_path, source, metric="cold_start", measured_runs=2)
    outcome = climb(file, runs_dir=tmp_path / "runs", until="stages")
    assert outcome.status == "done"
    report = build_report(next((tmp_path / "runs").glob("*/*")))
    assert report.load is not None
    cold = report.load.cold_start
    assert cold is not None
    assert len(cold.total_ms.launches) == 3
    assert cold.parts_ms["build"].summary.min >= 100
    assert cold.parts_ms["first_output"].summary.min >= 200
    assert cold.warm_call_ms.summary.max < cold.parts_ms["first_output"].summary.min
    assert "## Cold start" in render_markdown(report)
