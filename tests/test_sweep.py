import pytest

from perfladder.errors import InputError
from perfladder.workload import InputSet, load_workload

BATCHES = {"input": "latents.$tensor.0", "values": [1, 2, 8], "items": "value"}
LATENTS = {"latents": {"$tensor": [1, 4]}, "steps": 3}


def test_each_value_is_a_scenario_with_its_own_items(make_workload):
    workload = make_workload(inputs=LATENTS, sweep=BATCHES)
    assert workload.scenario_names == ["latents.$tensor.0 1", "latents.$tensor.0 2", "latents.$tensor.0 8"]
    assert workload.input_set("latents.$tensor.0 8") == InputSet({"latents": {"$tensor": [8, 4]}, "steps": 3}, 8)
    assert workload.inputs == LATENTS, "the workload's own inputs stay as they are"


def test_sweep_of_a_whole_input_may_name_a_new_one(make_workload):
    workload = make_workload(sweep={"input": "mode", "values": ["fast", "good"]}, items_per_call=4)
    assert [workload.input_set(name) for name in workload.scenario_names] == [
        InputSet({"mode": "fast"}, 4),
        InputSet({"mode": "good"}, 4),
    ]


def test_value_that_is_no_word_goes_by_its_place(make_workload):
    sweep = {"input": "size", "values": [[8, 8], [16, 16]], "items": [1, 4]}
    workload = make_workload(sweep=sweep)
    assert workload.scenario_names == ["size #1", "size #2"]
    assert workload.input_set("size #2") == InputSet({"size": [16, 16]}, 4)


def test_scenario_has_its_own_items(make_workload):
    workload = make_workload(inputs={"x": 1}, scenarios={"large": {"x": 8, "$items_per_call": 8}, "small": {"x": 2}})
    assert workload.input_set("large") == InputSet({"x": 8}, 8)
    assert workload.input_set("small") == InputSet({"x": 2}, 1)
    assert workload.input_set(None) == InputSet({"x": 1}, 1)


def test_sweep_follows_the_scenarios(make_workload):
    workload = make_workload(scenarios={"large": {}}, sweep={"input": "x", "values": [1, 2]})
    assert workload.scenario_names == ["large", "x 1", "x 2"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sweep": {"input": "x.y", "values": [1, 2]}}, "sweep.input: 'x.y' leads nowhere in 'inputs'"),
        ({"sweep": {"input": "latents.$tensor.9", "values": [1, 2]}, "inputs": LATENTS}, "there is no '9'"),
        ({"sweep": {"input": "x", "values": [1, 1]}}, "a value is listed twice"),
        ({"sweep": {"input": "x", "values": [1]}}, "sweep.values"),
        ({"sweep": {"input": "x", "values": ["a", "b"], "items": "value"}}, "whole numbers above 0"),
        ({"sweep": {"input": "x", "values": [1, 2], "items": [1]}}, "items has 1 numbers for 2 values"),
        ({"sweep": {"input": "x", "values": [1, 2], "item": [1]}}, "Did you mean 'items'"),
        ({"sweep": {"input": "x", "values": [1, 2]}, "scenarios": {"x 1": {}}}, "which 'scenarios' has as well"),
        ({"scenarios": {"large": {"$items_per_call": 0}}}, r"scenarios.large.\$items_per_call: expected"),
        ({"metric": "cold_start", "launches": 2}, "needs 'launches' to be 3 or more"),
        ({"concurrency": [4, 1]}, "rising numbers"),
        ({"concurrency": [1, 2], "nproc": 2}, "concurrency needs nproc to be 1"),
    ],
)
def test_wrong_field_is_named(make_workload, fields, message):
    with pytest.raises(InputError, match=message):
        make_workload(**fields)


def test_cold_start_has_three_launches_unless_more_are_asked_for(make_workload):
    assert make_workload().num_launches == 1
    assert make_workload(launches=4).num_launches == 4
    assert make_workload(metric="cold_start").num_launches == 3
    assert make_workload(metric="cold_start", launches=5).num_launches == 5


def test_sweep_reaches_the_call(load_target):
    loaded = load_target(
        "def build():\n    return lambda x: x.shape[0]",
        inputs={"x": {"$tensor": [1, 4]}},
        sweep={"input": "x.$tensor.0", "values": [2, 3]},
    )
    assert [loaded.run(name).value for name in (None, *loaded.workload.scenario_names)] == [1, 2, 3]


def test_sweep_is_written_as_in_yaml(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text("name: w\ntarget: m:f\nsweep: {input: batch, values: [1, 2, 4], items: value, min_gain: 0.2}\n")
    sweep = load_workload(path).workload.sweep
    assert sweep is not None
    assert (sweep.input, sweep.values, sweep.min_gain) == ("batch", [1, 2, 4], 0.2)
