"""The arithmetic over the results of several ranks: who is slowest, how far apart they are, and the job's numbers."""

import pytest

from perfladder.models import ResultWarning
from perfladder.stats import Interval, Samples, summarize
from perfladder.timing.ranks import merge_ranks, merge_warnings
from perfladder.timing.results import ScenarioTiming, StagesResult, StageTiming

MS = 1_000_000
ANY = Interval(low=0.0, high=1.0)


def samples(*values):
    return Samples(launches=[list(map(float, values))])


def stage(name, self_ms, end_ms=None, device_ms=None):
    device = samples(*device_ms) if device_ms else None
    return StageTiming(
        name=name,
        owner_type="torch.nn.Module",
        calls_per_run=1,
        total_ms=samples(*self_ms),
        self_ms=samples(*self_ms),
        device_total_ms=device,
        device_self_ms=device,
        end_ms=samples(*end_ms) if end_ms else None,
        call_ms=summarize(self_ms),
        share=0.5,
        share_interval=ANY,
    )


def rank(starts_ms, wall_ms, stages, *, peak=0, warnings=()):
    inside = [sum(row) for row in zip(*(s.cost_ms.values for s in stages), strict=True)] or [0.0] * len(wall_ms)
    timing = ScenarioTiming(
        name="default",
        run_start_ns=[round(start * MS) for start in starts_ms],
        wall_ms=samples(*wall_ms),
        outside_ms=samples(*(wall - own for wall, own in zip(wall_ms, inside, strict=True))),
        outside_share=0.1,
        outside_share_interval=ANY,
        stages=stages,
    )
    return StagesResult(
        scenarios=[timing],
        first_call_ms=wall_ms[0] * 2,
        warmup_ms=[wall_ms[0]],
        peak_host_rss_bytes=peak,
        warnings=[ResultWarning(code=code, message="m") for code in warnings],
    )


@pytest.fixture
def waiting():
    """Rank 1 works longer, rank 0 waits for it in a collective: both runs take 10 ms, or 20."""
    return [
        rank([0, 100], [10, 20], [stage("work", [2, 3], [2, 3]), stage("reduce", [8, 16], [10, 19])], peak=5),
        rank([0, 100], [10, 20], [stage("work", [9, 12], [9, 12]), stage("reduce", [1, 7], [10, 19])], peak=3),
    ]


def test_slowest_is_the_rank_that_the_others_wait_for(waiting):
    table = merge_ranks(waiting).ranks
    assert table.slowest_rank == 1
    assert [own.num_runs_slowest for own in table.ranks] == [0, 2]
    assert [own.lag_ms for own in table.ranks] == [0.0, 8.0]
    assert table.world_size == 2


def test_skew_of_runs_and_of_stages(waiting):
    table = merge_ranks(waiting).ranks
    assert (table.start.p50_ms, table.end.p50_ms, table.wall.p50_ms) == (0, 0, 0)
    by_name = {skew.name: skew for skew in table.stages}
    assert by_name["work"].slowest_rank == 1
    assert by_name["work"].total_ms.p50_ms == 8.0
    assert by_name["work"].total_ms.p95_ms == pytest.approx(8.9)
    assert by_name["reduce"].slowest_rank == 0


def test_skew_of_starts_and_ends_is_taken_run_by_run():
    table = merge_ranks([rank([0, 100], [10, 10], []), rank([1, 103], [10, 11], [])]).ranks
    assert table.start.p50_ms == pytest.approx(2.0)
    assert table.end.p50_ms == pytest.approx(2.5)
    assert table.wall.p50_ms == pytest.approx(0.5)


def test_job_has_the_stages_of_each_runs_slowest_rank():
    merged = merge_ranks(
        [
            rank([0, 100], [10, 4], [stage("work", [9, 3], [9, 3])], peak=5),
            rank([0, 100], [4, 12], [stage("work", [3, 10], [3, 10])], peak=7),
        ]
    )
    assert merged.default.wall_ms.values == [10, 12]
    assert merged.default.stages[0].self_ms.values == [9, 10]
    assert merged.default.outside_ms.values == [1, 2]
    assert merged.default.stages[0].share == pytest.approx(19 / 22)
    assert merged.default.outside_share == pytest.approx(3 / 22)
    assert merged.first_call_ms == 20
    assert merged.warmup_ms == [10]
    assert merged.peak_host_rss_bytes == 7


def test_what_another_rank_takes_longer_is_outside_every_stage(waiting):
    first, second = waiting
    late = first.default.model_copy(update={"wall_ms": samples(11, 20), "outside_ms": samples(1, 1)})
    merged = merge_ranks([first.model_copy(update={"scenarios": [late]}), second])
    parts = [s.self_ms.values[0] for s in merged.default.stages] + [merged.default.outside_ms.values[0]]
    assert merged.default.wall_ms.values[0] == 11
    assert sum(parts) == pytest.approx(11)


def test_stages_that_only_one_rank_has_are_kept():
    merged = merge_ranks([rank([0], [10], [stage("first", [9], [9])]), rank([0], [12], [stage("last", [11], [11])])])
    assert {s.name: s.self_ms.values for s in merged.default.stages} == {"last": [11], "first": [0]}
    assert merged.ranks.stages == []
    assert [[s.name for s in own.stages] for own in merged.ranks.ranks] == [["first"], ["last"]]


def test_on_a_device_the_end_of_the_run_decides():
    merged = merge_ranks(
        [
            rank([0], [10], [stage("work", [1], device_ms=[9])]),
            rank([0], [12], [stage("work", [5], device_ms=[11])]),
        ]
    )
    assert merged.ranks.slowest_rank == 1
    assert merged.ranks.stages[0].total_ms.p50_ms == 2.0
    assert merged.default.stages[0].device_self_ms.values == [11]


def test_one_run_and_one_rank_are_no_special_case():
    merged = merge_ranks([rank([0], [10], [stage("work", [9], [9])])])
    assert merged.ranks.slowest_rank == 0
    assert merged.ranks.wall.p95_ms == 0


def test_warning_of_some_ranks_says_whose_it_is():
    one, other = ResultWarning(code="A", message="m"), ResultWarning(code="B", message="n")
    assert [w.message for w in merge_warnings([[one], [one, other], [one, other]])] == ["m", "Rank 1, 2: n"]
