"""The verdict on a night with all that belongs to it: commits, causes, stages, kernel families, split histories."""

import pytest
from nights import MACHINE, SOFTWARE, commit_of, make_night, make_nights

from perfladder.errors import InputError
from perfladder.nightly.judge import judge_night
from perfladder.nightly.model import Rules
from perfladder.nightly.trend import trend_data
from perfladder.nightly.views import render_history, render_night, sparkline
from perfladder.nightly.words import alarm_of

RULES = Rules()
SLOW = {"slow": {"decoder": 1.3}}


def second_of(night, **fields):
    return make_night(900, second_of=night.run_id, **fields)


def judged(tonight, nights, **options):
    return judge_night(tonight, nights, RULES, **options)


def test_a_regression_names_commits_stage_and_kernel_family():
    nights, tonight = make_nights(30), make_night(30, **SLOW)
    assert judged(tonight, nights).kind == "suspected"
    found = judged(tonight, nights, second=second_of(tonight, **SLOW))
    assert (found.kind, found.is_new, found.window) == ("regression", True, 1)
    assert found.ratio == pytest.approx(1.09, rel=0.01)
    assert found.interval.low < 1.09 < found.interval.high
    assert found.commits.last_good == commit_of(29)
    assert found.commits.first_changed == commit_of(30)
    assert [(row.part, row.name) for row in found.moved] == [("stage", "decoder"), ("family", "gemm")]
    assert found.moved[0].ratio == pytest.approx(1.3, rel=0.02)
    assert found.moved[0].interval.low > 1.2
    told = alarm_of(found)
    for part in ("pipe", "latency_p50", "decoder +", "gemm +", commit_of(29)[:12], commit_of(30)[:12]):
        assert part in told
    assert commit_of(30)[:12] in found.next_step


def test_a_second_measurement_that_does_not_agree_leaves_it_undecided_and_out_of_the_baseline():
    nights, tonight = make_nights(30), make_night(30, **SLOW)
    found = judged(tonight, nights, second=second_of(tonight))
    assert found.kind == "undecided"
    assert "second measurement does not show it" in found.reason
    nights = [*nights, tonight.model_copy(update={"verdict": "undecided"})]
    assert judged(make_night(31), nights).kind == "ok"


def test_a_regression_that_lasts_keeps_the_first_nights_commits():
    nights = make_nights(30)
    first = make_night(30, verdict="regression", **SLOW)
    nights.append(first.model_copy(update={"changed_at": first.run_id}))
    found = judged(make_night(31, **SLOW), nights)
    assert (found.kind, found.is_new) == ("regression", False)
    assert found.commits.first_changed == commit_of(30)
    assert "still" in found.reason


def test_suspected_nights_before_it_belong_to_a_regression():
    nights = make_nights(30)
    suspected = make_night(30, verdict="suspected", **SLOW)
    regression = make_night(31, verdict="regression", changed_at=suspected.run_id, **SLOW)
    found = judged(make_night(32, **SLOW), [*nights, suspected, regression])
    assert found.window == 3
    assert found.commits.last_good == commit_of(29)


def test_an_accepted_level_is_the_baseline_from_then_on():
    nights = make_nights(30)
    slower = [make_night(30 + place, verdict="regression", **SLOW) for place in range(3)]
    slower = [night.model_copy(update={"changed_at": slower[0].run_id}) for night in slower]
    assert judged(make_night(33, **SLOW), [*nights, *slower]).kind == "regression"
    accepted = [*slower[:2], slower[2].model_copy(update={"is_accepted": True})]
    assert judged(make_night(33, **SLOW), [*nights, *accepted]).kind == "ok"
    worse = make_night(33, slow={"decoder": 2.0})
    assert judged(worse, [*nights, *accepted]).kind == "suspected"


def test_another_machine_begins_another_history_and_the_old_one_is_found_again():
    nights = make_nights(30)
    other = {**MACHINE, "devices": ["B200"]}
    found = judged(make_night(30, level=0.5, machine=other), nights)
    assert found.kind == "no_baseline_yet"
    assert [d.field for d in found.split_because] == ["machine.devices"]
    assert "machine.devices" in found.reason
    nights.append(make_night(30, level=0.5, machine=other))
    assert judged(make_night(31), nights).kind == "ok"


def test_other_work_has_another_level():
    assert judged(make_night(30, work="f" * 16, level=3.0), make_nights(30)).kind == "no_baseline_yet"


def test_new_versions_do_not_split_the_history_and_are_named_as_what_else_changed():
    software = {**SOFTWARE, "driver": "590.2", "packages": {"torch": "2.14.0"}}
    tonight = make_night(30, level=1.1, commit=commit_of(29), software=software)
    found = judged(tonight, make_nights(30), second=second_of(tonight, level=1.1))
    assert found.kind == "regression"
    assert {d.field for d in found.causes} == {"driver", "packages.torch"}
    assert "the code of the workload's repository is the same" in found.commits.told
    assert "driver" in alarm_of(found)
    assert "Look at what changed besides the code" in found.next_step


def test_a_disturbed_second_measurement_is_no_alarm_unless_nights_are_always_so():
    tonight = make_night(30, **SLOW)
    busy = second_of(tonight, disturbances=["MACHINE_BUSY"], **SLOW)
    found = judged(tonight, make_nights(30), second=busy)
    assert (found.kind, found.disturbances) == ("undecided", ["MACHINE_BUSY"])
    assert "not in its usual state" in found.reason
    always = make_nights(30, disturbances=["MACHINE_BUSY"])
    assert judged(tonight, always, second=busy).kind == "regression"


def test_disturbed_nights_are_no_part_of_the_baseline():
    nights = make_nights(30)
    nights[20] = make_night(20, level=1.4, disturbances=["DEVICE_THROTTLED"], verdict="ok")
    assert judged(make_night(30, **SLOW), nights).kind == "suspected"


def test_a_named_baseline_takes_the_place_of_the_last_good_nights():
    nights = make_nights(30)
    release = [make_night(500, level=0.9), make_night(501, level=0.9)]
    found = judged(make_night(30), nights, baseline=release)
    assert (found.kind, found.num_baseline_nights) == ("suspected", 2)
    assert found.baseline == pytest.approx(9.0, rel=0.01)
    with pytest.raises(InputError, match=r"machine\.cpu"):
        judged(make_night(30), nights, baseline=[make_night(500, machine={**MACHINE, "cpu": "Arm"})])


def test_launches_of_one_night_that_differ_much_make_the_limit_wider():
    loud = make_nights(30, launches=[8.0, 9.0, 10.0, 11.0, 12.0])
    tonight = make_night(30, **SLOW)
    assert judged(tonight, loud).kind == "ok"
    assert judged(tonight, loud).noise > 0.05


def test_nights_after_tonight_do_not_count():
    nights = make_nights(40)
    assert judged(nights[5], nights).kind == "no_baseline_yet"


def test_a_trend_has_every_night_and_marks_the_change():
    nights = [*make_nights(40), *[make_night(place, **SLOW) for place in range(40, 50)]]
    nights.append(make_night(50, machine={**MACHINE, "cpu": "Arm"}))
    nights.append(make_night(51, **SLOW))
    trend = trend_data(nights, RULES)
    (change,) = trend.changes
    assert change.at == nights[40].run_id
    assert change.ratio == pytest.approx(1.09, rel=0.01)
    assert (change.last_commit, change.first_commit) == (commit_of(39), commit_of(40))
    assert [level.num_nights for level in trend.levels] == [40, 11]
    assert [point.is_comparable for point in trend.points].count(False) == 1
    assert all(point.interval.low <= point.value <= point.interval.high for point in trend.points)
    assert len(sparkline(trend)) == 51
    assert type(trend).model_validate_json(trend.model_dump_json()) == trend
    with pytest.raises(InputError, match="one workload"):
        trend_data([])


@pytest.mark.parametrize("count", [1, 2])
def test_the_noise_of_too_few_nights_is_not_known(count):
    trend = trend_data(make_nights(count), RULES)
    assert trend.noise is None
    assert '"noise":null' in trend.model_dump_json()
    assert "Nights differ" not in render_history([trend])
    assert trend_data(make_nights(3), RULES).noise > 0


def test_nights_of_another_machine_tell_nothing_of_the_noise():
    trend = trend_data([*make_nights(5), make_night(5, machine={**MACHINE, "cpu": "Arm"})], RULES)
    assert trend.noise is None


def test_the_page_of_a_night_has_verdict_movement_and_trend():
    nights, tonight = make_nights(30), make_night(30, **SLOW)
    second = second_of(tonight, **SLOW)
    verdict = judged(tonight, nights, second=second)
    page = render_night(verdict, trend_data([*nights, tonight, second], RULES))
    for text in (
        "# pipe: regression",
        "stage `decoder`",
        "kernel family `gemm`",
        "measured again",
        "second measurement",
    ):
        assert text in page
    for line in page.splitlines():
        assert "None" not in line
    assert "no nights" in render_history([])
