import json
from pathlib import Path

import jsonschema
import pytest

import perfladder as pl
from perfladder.profiling.data import ProfileData

SCHEMA = json.loads((Path(__file__).parent / "profile.schema.json").read_text())


@pytest.fixture(scope="module")
def validator():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def test_data_follows_the_schema(pipe, x, wrap, profile, validator):
    plain = profile(pipe, x, warmup_runs=0).data
    pipe.unet = wrap(pipe.unet)
    tuned = profile(pipe, {"x": x}, scenarios={"a": {"steps": 1}, "b": {}}).data
    for data in (plain, tuned):
        validator.validate(data)
        validator.validate(json.loads(json.dumps(data, allow_nan=False)))


def test_the_schema_refuses_what_is_renamed(pipe, x, profile, validator):
    data = profile(pipe, x).data
    data["runs"][0]["regions"][0]["region"] = data["runs"][0]["regions"][0].pop("region_id")
    with pytest.raises(jsonschema.ValidationError, match="region_id"):
        validator.validate(data)


def test_data_can_be_read_back_as_a_model(pipe, x, wrap, profile):
    pipe.vae = wrap(pipe.vae)
    data = profile(pipe, x, inference_function=lambda value: pipe.vae(pipe.unet(value))).data
    assert [r.kind for r in ProfileData.model_validate(data).regions] == ["untuned_module", "aot_managed_module"]


def test_versions_and_times_are_there(pipe, x, profile):
    data = profile(pipe, x).data
    assert data["perfladder_version"] == pl.__version__
    assert data["created_at"].endswith("+00:00")
    assert data["config"] == {"warmup_runs": 1, "measured_runs": 2, "uses_inference_function": False}


def test_key_averages_count_the_measured_runs_only_and_show_operators(pipe, x, profile):
    data = profile(pipe, x, measured_runs=4).data
    views = data["profiler"]["key_averages"]
    rows = {row["key"]: row for row in views["cpu_time_total"]}
    assert len(rows) <= 20
    assert rows["aten::layer_norm"]["count"] == 4 * 3 * 2
    assert rows["perfladder.untuned_module:unet"]["count"] == 4 * 3
    assert not any("profiled_run" in key or "unet.blocks" in key for key in rows)
    totals = [row["cpu_time_total_us"] for row in views["cpu_time_total"]]
    assert totals == sorted(totals, reverse=True)
    assert {row["device_type"] for row in views["cpu_time_total"]} == {"CPU"}
    assert views["device_time_total"] == []


def test_runs_tell_what_their_host_time_is_made_of(pipe, x, profile):
    run = profile(pipe, x).data["runs"][0]
    whole = sum(value for name, value in run["host"].items() if name.endswith("_us"))
    assert whole == pytest.approx(run["timing"]["cpu_time_us"], rel=0.01)
    assert run["residual"]["host"]["python_us"] > 0
    assert run["residual"]["host"]["operator_dispatch_us"] > 0  # the glue's own subtraction
