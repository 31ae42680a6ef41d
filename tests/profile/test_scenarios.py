import pytest
import torch

import perfladder as pl
from perfladder.errors import InputError


def test_each_scenario_is_run_and_reported_and_then_all_together(pipe, x, profile):
    scenarios = {"short": {"steps": 1}, "long": {"steps": 6}}
    result = profile(pipe, {"x": x}, scenarios=scenarios, warmup_runs=2)
    data = result.data
    assert pipe.num_calls == 2 * (2 + 1 + 2)
    assert [run["scenario"] for run in data["runs"]] == ["short", "short", "long", "long"]
    assert [run["run_index"] for run in data["runs"]] == [0, 1, 2, 3]
    assert list(data["scenarios"]) == ["short", "long"]
    calls = {
        name: {row["region_id"]: row["calls_per_run"] for row in scenario["summary"]["regions"]}
        for name, scenario in data["scenarios"].items()
    }
    assert calls["short"]["untuned_module:unet"] == 1
    assert calls["long"]["untuned_module:unet"] == 6
    assert data["scenarios"]["long"]["input"] == {"args_count": 0, "kwargs": ["x", "steps"]}
    assert data["summary"]["num_runs"] == 4
    together = {row["region_id"]: row["calls_per_run"] for row in data["summary"]["regions"]}
    assert together["untuned_module:unet"] == 3.5
    assert all(len(s["summary"]["unprofiled"]["wall_time_us"]) == 2 for s in data["scenarios"].values())


def test_fractions_of_a_summary_add_up(pipe, x, profile):
    data = profile(pipe, {"x": x}, scenarios={"a": {"steps": 1}, "b": {}}).data
    for summary in (data["summary"], *(s["summary"] for s in data["scenarios"].values())):
        covered = sum(row["cpu_time_fraction"] for row in summary["regions"])
        assert covered + summary["residual"]["cpu_time_fraction"] == pytest.approx(1, abs=1e-3)


def test_a_scenario_that_is_no_mapping_takes_the_place_of_the_input(pipe, x, profile):
    data = profile(pipe, x, scenarios={"one": torch.ones(1, 8), "two": (torch.ones(2, 8), 2)}).data
    assert [s["input"]["args_count"] for s in data["scenarios"].values()] == [1, 2]


def test_without_scenarios_runs_name_none(pipe, x, profile):
    data = profile(pipe, x).data
    assert data["scenarios"] == {}
    assert {run["scenario"] for run in data["runs"]} == {None}
    assert data["summary"]["num_runs"] == 2


@pytest.mark.parametrize("scenarios", [{}, {1: None}, ["a"]])
def test_wrong_scenarios_are_an_input_error(scenarios, pipe, x):
    with pytest.raises(InputError, match="scenarios"):
        pl.profile(pipe, x, scenarios=scenarios)


def test_markdown_names_the_scenarios(pipe, x, profile):
    text = profile(pipe, {"x": x}, scenarios={"short": {"steps": 1}}).markdown()
    assert "| Scenario `short` | 0 positional arguments; keyword arguments: x, steps |" in text
    assert "| 0 | `short` |" in text
