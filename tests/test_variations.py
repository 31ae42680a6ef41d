"""Many climbs from few words, and their table."""

from typing import Any

import pytest

from perfladder.errors import InputError
from perfladder.timing.results import MetricValue
from perfladder.variations import MemberResult, SweepResult, plan_members, render_sweep
from perfladder.workload import WorkloadFile


@pytest.fixture
def file(make_workload, tmp_path):
    return WorkloadFile(make_workload(inputs={"steps": 4}), tmp_path)


def member(number: int, **fields: Any) -> MemberResult:
    known = {"label": "toy", "source": "toy.yaml", "changes": {}, "host_name": "here"}
    return MemberResult(**{"number": number, "status": "done", "exit_code": 0, **known, **fields})


def sweep(*members: MemberResult) -> SweepResult:
    return SweepResult(folder="runs/sweeps/1", runner="threads", members=list(members))


def test_all_combinations_are_climbed_the_last_field_changing_fastest(file, tmp_path):
    members = plan_members([("a.yaml", file)], {"inputs.steps": [4, 8], "dtype": ["float32", None]})
    assert [one.label for one in members] == [
        "test: steps 4, dtype float32",
        "test: steps 4, dtype None",
        "test: steps 8, dtype float32",
        "test: steps 8, dtype None",
    ]
    assert [(one.workload.inputs["steps"], one.workload.dtype) for one in members[1:3]] == [(4, None), (8, "float32")]
    assert {one.base_dir for one in members} == {str(tmp_path)}
    assert [one.number for one in members] == [1, 2, 3, 4]


def test_without_a_field_that_varies_each_workload_is_climbed_as_it_is(file):
    members = plan_members([("a.yaml", file), ("b.yaml", file)], {})
    assert [(one.source, one.label, one.workload) for one in members] == [
        ("a.yaml", "test", file.workload),
        ("b.yaml", "test", file.workload),
    ]


@pytest.mark.parametrize("values", [[], [3, 3]])
def test_a_field_needs_values_each_once(file, values):
    with pytest.raises(InputError, match=r"vary\.measured_runs: expected one value or more, each once"):
        plan_members([("a.yaml", file)], {"measured_runs": values})


def test_a_value_that_a_workload_does_not_take_is_named_with_it(file):
    with pytest.raises(InputError, match=r"(?s)a\.yaml with dtype = float99 is not valid.*dtype: got 'float99'"):
        plan_members([("a.yaml", file)], {"dtype": ["float32", "float99"]})


@pytest.mark.parametrize(("codes", "expected"), [([0, 0], 0), ([0, 3], 5), ([5, 0], 5), ([4, 3], 4)])
def test_the_exit_code_is_that_of_a_run_where_a_rung_failed_unless_all_failed(codes, expected):
    members = [member(n, exit_code=code, status="failed" if code in (3, 4) else "done") for n, code in enumerate(codes)]
    assert sweep(*members).exit_code == expected


def test_the_table_has_a_row_a_member_and_no_cell_breaks_it():
    metric = MetricValue(name="latency_p50", value=12.3456, unit="ms")
    lines = render_sweep(sweep(member(1, metric=metric), member(2, status="failed", exit_code=3, error="a | b\nc")))
    assert "| 1 | toy | done | latency_p50 12.35 ms | - | - | here | - |" in lines
    assert "| 2 | toy | failed (3) | - | - | a \\| b c | here | - |" in lines
